"""Model libraries: what the compiler asks of the libraries that models come from.

Integrations answer; they register themselves under the name of their module, which is imported when something is asked
for the first time. No room below ``api`` knows any of them.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

if TYPE_CHECKING:
    import torch
    from torch import nn

    from gascompile.core.machine import Machine
    from gascompile.core.workload import Workload
    from gascompile.weights.checkpoint import Checkpoint

_log = logging.getLogger("gascompile")
_MODULES: list[str] = []
_COSTING: dict[str, str] = {}


class ModelLibrary(Protocol):
    """A library of models; every answer is empty, or what was given, for what is none of its."""

    def register_pytrees(self) -> None:
        """Teach torch's pytrees the types that loaded models return; import nothing for it."""
        ...

    def register_types(self, modules: Iterable[str]) -> None:
        """Import what defines the types that a saved program names; raises ``FormatError`` where it is missing."""
        ...

    def register_ops(self, targets: Collection[str]) -> None:
        """Import what registers the ops of a saved program."""
        ...

    def ignorable_weights(self, model: nn.Module, names: Collection[str]) -> set[str]:
        """Return the names in a checkpoint that the library itself ignores for this model."""
        ...

    def with_model_names(self, model: nn.Module, checkpoint: Checkpoint) -> Checkpoint:
        """Return a checkpoint with the names and shapes that ``model`` uses, read in place."""
        ...

    def rebuild_buffers(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Return the values of buffers on the meta device that no checkpoint holds."""
        ...

    def is_directory(self, path: Path) -> bool:
        """Return whether a folder, or a file, holds a model of the library."""
        ...

    def build_skeleton(self, path: Path, *, dtype: str | None = None) -> nn.Module:
        """Return the model of a folder or file on the meta device; raises ``CheckpointError``."""
        ...

    def fetch(self, name: str, revision: str | None = None) -> Path:
        """Return the folder of a model that has a name in the library's collection; raises ``CheckpointError``."""
        ...

    def set_at_first_call(self, model: nn.Module, kwargs: Mapping[str, Any]) -> None:
        """Set what the library itself sets on a model at the first call like this one."""
        ...

    def give_back(self, given: Sequence[Any], outputs: Any) -> Any:
        """Return what a call returned, with objects among its arguments in it that the model itself would return."""
        ...

    def describable(self) -> AbstractContextManager[None]:
        """Let models compute, while a training step is traced, by ops whose results torch can describe."""
        ...

    def doubts(self, model: nn.Module) -> Iterator[str]:
        """Yield, in words, what a trace of the model may do otherwise than its calls do."""
        ...

    def methods(self, cls: type) -> dict[str, Callable[..., Any]]:
        """Return what a compiled model does in another way than its class does."""
        ...


def register(module: str) -> None:
    """Add an integration: a module with the functions of ``ModelLibrary``."""
    if module not in _MODULES:
        _MODULES.append(module)


def register_costing(suffix: str, module: str) -> None:
    """Let a module cost models of files with an ending without torch; it has a function ``workload_of_file``."""
    _COSTING[suffix] = module


def workload_of_file(path: Path, machine: Machine, *, batch: int, tokens: int) -> Workload | None:
    """Return the workload of a model's file, costed without torch; ``None`` of files of which nothing can.

    Args:
        path: of the file.
        machine: whose rates count.
        batch: rows of made-up inputs.
        tokens: tokens per row of made-up inputs.
    """
    module = _COSTING.get(path.suffix)
    if module is None:
        return None
    workload: Workload = importlib.import_module(module).workload_of_file(
        path, machine, batch=batch, tokens=tokens
    )
    return workload


def model_libraries() -> tuple[ModelLibrary, ...]:
    """Return all integrations, in the order in which they were registered."""
    return tuple(_imported(module) for module in _MODULES)


def register_pytrees() -> None:
    """Teach torch's pytrees the types that loaded models of any library return."""
    for library in model_libraries():
        library.register_pytrees()


def ignorable_weights(model: nn.Module, names: Collection[str]) -> set[str]:
    """Return the names in a checkpoint that a library ignores for this model."""
    return {
        name for library in model_libraries() for name in library.ignorable_weights(model, names)
    }


def rebuild_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the values of buffers on the meta device that libraries can tell."""
    return {
        name: value
        for library in model_libraries()
        for name, value in library.rebuild_buffers(model).items()
    }


def set_at_first_call(model: nn.Module, kwargs: Mapping[str, Any]) -> None:
    """Set what libraries themselves set on their models at the first call like this one."""
    for library in model_libraries():
        library.set_at_first_call(model, kwargs)


@contextmanager
def describable() -> Iterator[None]:
    """Let models of all libraries compute, while a training step is traced, by ops that torch can describe."""
    with ExitStack() as stack:
        for library in model_libraries():
            stack.enter_context(library.describable())
        yield


def give_back(given: Sequence[Any], outputs: Any) -> Any:
    """Return what a call returned, with objects among its arguments in it that models of libraries return."""
    for library in model_libraries():
        outputs = library.give_back(given, outputs)
    return outputs


def warn_of_doubts(model: nn.Module) -> None:
    """Log what a trace of the model may do otherwise than its calls do, as libraries say."""
    for library in model_libraries():
        for doubt in library.doubts(model):
            _log.warning("%s", doubt)


def methods(cls: type) -> dict[str, Callable[..., Any]]:
    """Return what a compiled model does in another way than its class does, by the library that the class is of."""
    by_name: dict[str, Callable[..., Any]] = {}
    for library in model_libraries():
        by_name |= library.methods(cls)
    return by_name


@cache
def _imported(module: str) -> ModelLibrary:
    return cast(ModelLibrary, importlib.import_module(module))
