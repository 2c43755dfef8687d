"""Sources: what a user may point at instead of a module, and inputs to plan it with."""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import pickle
import sys
import zipfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from gascompile.capture.load_hooks import require_no_load_hooks
from gascompile.core.errors import CaptureError, CheckpointError, FormatError, UnsupportedOpError
from gascompile.core.files import is_file, is_folder
from gascompile.core.model_libraries import model_libraries
from gascompile.core.sizes import parse_size
from gascompile.formats.dtypes import FLOATING, is_lossless
from gascompile.formats.layout import is_read_packed
from gascompile.weights.checkpoint import kind_of_weights, open_checkpoint
from gascompile.weights.file_kinds import is_gguf, is_onnx

_log = logging.getLogger("gascompile")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A module with the place of its weights, if they are in files, and inputs to trace it with."""

    model: nn.Module
    checkpoint: Path | None
    inputs: tuple[tuple[Any, ...], dict[str, Any]] | None


def open_source(source: str | os.PathLike[str], *, batch: int = 1, tokens: int = 128) -> Source:
    """Return the model of a Hugging Face directory, a .gguf, .onnx or .pt2 file or ``package.module:callable``.

    ``batch`` and ``tokens`` shape the inputs that are made up for a Hugging Face model. A callable
    takes no arguments and returns a module, or a module and its example inputs.

    Raises:
        CheckpointError: the directory holds no usable model.
        CaptureError: the callable fails or returns something else.
        FormatError: the source is none of these.
    """
    text = os.fspath(source)
    path = Path(text)
    if is_folder(path) or is_gguf(path):
        return _open_directory(path, batch, tokens)
    if path.suffix == ".gguf" and path.exists():
        raise CheckpointError(
            f"{text[:1000]!r} is no GGUF file, whatever its name: it does not begin as one; download it again"
        )
    if is_onnx(path):
        graph: Any = _skeleton(path)[0]
        return Source(
            model=graph, checkpoint=path, inputs=((), graph.made_up_inputs(batch, tokens))
        )
    if path.suffix == ".pt2":
        if not is_file(path):
            raise FormatError(
                f"{text[:1000]!r} is not a .pt2 file: there is none of that name; check the path"
            )
        return _open_exported(path)
    if ":" in text:
        return _open_callable(text)
    raise FormatError(
        f"cannot open {text[:1000]!r}: a source is a Hugging Face directory (with config.json), a .gguf file, an .onnx "
        "file, a .pt2 file, a .workload.json file, or package.module:callable"
    )


def require_sense(budget: object, strategy: str | None) -> None:
    """Refuse a budget that is no size and a strategy that there is not, before anything slow; raises ``ValueError``."""
    if isinstance(budget, str):
        parse_size(budget)
    if strategy is not None:
        from gascompile.passes.plan.make_plan import require_known

        require_known(strategy)


def model_of(
    source: nn.Module | str | os.PathLike[str], checkpoint: str | os.PathLike[str] | None
) -> tuple[nn.Module, str | os.PathLike[str] | None]:
    """Return the model to compile and where its weights lie: ``source`` itself, or what its directory holds.

    Raises:
        TypeError: ``source`` is neither.
        CheckpointError: the directory holds no usable model; or a model with code of its own for loading weights is to
            take those of a checkpoint.
    """
    if isinstance(source, nn.Module):
        if checkpoint is not None:
            require_no_load_hooks(source)
        return _uncompiled(source), checkpoint
    if not isinstance(source, (str, os.PathLike)):
        raise TypeError(
            "model is a torch.nn.Module, a .gguf or .onnx file or a Hugging Face directory, not "
            f"{type(source).__name__}"
        )
    model, has_weights = _skeleton(Path(source))
    if checkpoint is None and not has_weights:
        raise CheckpointError(
            f"{Path(source)} holds no .safetensors file and no pytorch_model.bin; pass checkpoint= with the "
            "model's weights"
        )
    return model, checkpoint or source


def _uncompiled(model: nn.Module) -> nn.Module:
    """Return the model within what ``torch.compile`` returns for one: it is captured as it was written."""
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
    is_compiled = dynamo is not None and isinstance(model, dynamo.OptimizedModule)
    return cast(nn.Module, model._orig_mod) if is_compiled else model


def _skeleton(path: Path) -> tuple[nn.Module, bool]:
    """Return the model of a directory on the meta device, and whether its weights are there."""
    library = next((known for known in model_libraries() if known.is_directory(path)), None)
    if library is None:
        raise CheckpointError(
            f"{str(path)[:1000]!r} holds no config.json, so it is no Hugging Face model directory"
        )
    kind = kind_of_weights(path)
    has_blocks = kind == "gguf" or is_gguf(path)
    is_plain = kind in ("safetensors", "bin")
    has_weights = is_plain or has_blocks or is_onnx(path)
    # Values of blocks are computed in float32.
    dtype = "float32" if has_blocks else None
    if is_plain:
        dtype = _checkpoint_dtype([s.dtype for s in open_checkpoint(path).sources.values()])
    return library.build_skeleton(path, dtype=dtype), has_weights


def _open_directory(path: Path, batch: int, tokens: int) -> Source:
    model, has_weights = _skeleton(path)
    try:
        inputs = default_inputs(model, batch=batch, tokens=tokens)
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"the config.json of {path} gives inputs that cannot be made ({type(error).__name__}: {error})"
        ) from error
    return Source(model=model, checkpoint=path if has_weights else None, inputs=((), inputs))


_UNREADABLE = (
    OSError, RuntimeError, ValueError, LookupError, TypeError, AttributeError, AssertionError, EOFError,
    pickle.UnpicklingError, zipfile.BadZipFile,
)  # fmt: skip
"""What torch was seen to raise for archives that are missing, cut short, changed or of another version."""


def _open_exported(path: Path) -> Source:
    try:
        exported = torch.export.load(str(path))
    except _UNREADABLE as error:
        raise FormatError(
            f"{path} is not a .pt2 file that this torch can load: {error}; export the model again with "
            "torch.export.save of this torch version"
        ) from error
    _require_no_relations(exported, path)
    inputs = exported.example_inputs
    model = _Exported(exported.module(check_guards=False))
    return Source(
        model=model, checkpoint=None, inputs=(inputs[0], dict(inputs[1])) if inputs else None
    )


def _require_no_relations(exported: torch.export.ExportedProgram, path: Path) -> None:
    """Return if a program is for all sizes of its ranges: the module made of it does not look at what it is for alone.

    Raises:
        UnsupportedOpError: it took one of two ways by several sizes.
    """
    for guard in getattr(exported, "_guards_code", ()):
        if guard.count(".size()[") > 1 and " == " not in guard:
            raise UnsupportedOpError(
                f"{path} was exported for calls alone where {guard}, which no plan looks at; export it without "
                "dynamic_shapes, or so that the model does not decide by it"
            )


class _Exported(nn.Module):
    """Takes arguments as they were exported: an exported module refuses positional ones by name."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        # The flag stands for nothing: the graph is as it was exported, and eval() is refused.
        for part in self.modules():
            part.training = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def _open_callable(text: str) -> Source:
    module_name, _, attribute = text.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise CaptureError(
            f"cannot import {text!r}: {error}; write package.module:callable, importable from the current folder"
        ) from error
    made = factory() if callable(factory) and not isinstance(factory, nn.Module) else factory
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise CaptureError(
            f"{text} returned {type(model).__name__}; it should return a torch.nn.Module, or (module, example_inputs)"
        )
    if inputs is None:
        return Source(model=model, checkpoint=None, inputs=None)
    named = isinstance(inputs, Mapping)
    return Source(
        model=model, checkpoint=None, inputs=((), dict(inputs)) if named else (tuple(inputs), {})
    )


def default_inputs(model: Any, *, batch: int, tokens: int) -> dict[str, Any]:
    """Return inputs of plausible shapes for a transformers model: text, images, sound, or several of them."""
    accepted = set(inspect.signature(model.forward).parameters)
    config = model.config
    text = getattr(config, "text_config", config)
    inputs: dict[str, Any] = {}
    if "pixel_values" in accepted:
        vision = getattr(config, "vision_config", config)
        size = getattr(vision, "image_size", 224)
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        inputs["pixel_values"] = torch.zeros(
            batch, getattr(vision, "num_channels", 3), height, width, dtype=model.dtype
        )
    if "input_features" in accepted:
        frames = 2 * getattr(config, "max_source_positions", 1500)
        inputs["input_features"] = torch.zeros(
            batch, getattr(config, "num_mel_bins", 80), frames, dtype=model.dtype
        )
    if "input_ids" in accepted:
        limit = getattr(text, "max_position_embeddings", None) or tokens
        if tokens > limit:
            _log.warning(
                "%s has %d positions: %d tokens in place of %d",
                type(model).__name__,
                limit,
                limit,
                tokens,
            )
        inputs["input_ids"] = torch.zeros(batch, min(tokens, limit), dtype=torch.long)
        if "attention_mask" in accepted and not getattr(text, "is_decoder", True):
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    if "decoder_input_ids" in accepted and getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = torch.zeros(batch, 1, dtype=torch.long)
    if not inputs:
        raise CaptureError(
            f"no default inputs are known for {type(model).__name__}; call gascompile.plan from Python "
            "with example_inputs="
        )
    return inputs


def _checkpoint_dtype(dtypes: Collection[str]) -> str | None:
    """Return the floating dtype that most weights of a checkpoint have, or one that holds those that are packed."""
    floating = [d for d in dtypes if d in FLOATING]
    commonest = max(set(floating), key=floating.count) if floating else None
    packed = [d for d in dtypes if is_read_packed(d)]
    if commonest is not None and not all(is_lossless(d, commonest) for d in packed):
        return "float32"
    return commonest
