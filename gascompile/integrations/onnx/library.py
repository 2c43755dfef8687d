"""ONNX files as a model library: the hooks that the core asks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gascompile.core.errors import CheckpointError
from gascompile.weights.file_kinds import is_onnx as is_directory

if TYPE_CHECKING:
    import torch
    from torch import nn

    from gascompile.weights.checkpoint import Checkpoint

__all__ = ["is_directory"]
_MODULE = "gascompile.integrations.onnx.module"


def register_pytrees() -> None:
    """Models of ONNX return tensors and tuples."""


def register_types(modules: Iterable[str]) -> None:
    """Programs of ONNX models name no types."""


def register_ops(targets: Collection[str]) -> None:
    """Programs of ONNX models call torch's ops alone."""


def ignorable_weights(model: nn.Module, names: Collection[str]) -> set[str]:
    """Return the weights of an ONNX file that no node of its graph takes."""
    if _MODULE not in sys.modules:
        return set()  # No model is of a class that nobody has imported.
    from gascompile.integrations.onnx.module import OnnxModel

    return set(names) - set(model.tensors.values()) if isinstance(model, OnnxModel) else set()


def with_model_names(model: nn.Module, checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint: the module has its names."""
    return checkpoint


def rebuild_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return nothing: constants of the graph have their values."""
    return {}


def build_skeleton(path: Path, *, dtype: str | None = None) -> nn.Module:
    """Return the model of an ONNX file; its dtypes are its own. Raises as ``onnx_module`` does."""
    from gascompile.integrations.onnx.translate import onnx_module

    return onnx_module(path)


def fetch(name: str, revision: str | None = None) -> Path:
    """Refuse: there is no collection; raises ``CheckpointError``."""
    raise CheckpointError(f"{name[:1000]!r} is no ONNX file here")


def set_at_first_call(model: nn.Module, kwargs: Mapping[str, Any]) -> None:
    """Modules of graphs set nothing at their first call."""


def give_back(given: Sequence[Any], outputs: Any) -> Any:
    """Modules of graphs return what they make."""
    return outputs


def describable() -> AbstractContextManager[None]:
    """Modules of graphs compute as they always do."""
    return nullcontext()


def doubts(model: nn.Module) -> Iterator[str]:
    """Modules of graphs do in a trace what they do in a call."""
    yield from ()


def methods(cls: type) -> dict[str, Callable[..., Any]]:
    """Return nothing: a compiled model does what its class does."""
    return {}
