"""Inputs for ``run``, and the comparison with eager that ``run --check`` makes."""

from __future__ import annotations

import ast
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import typer
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from torch.utils import _pytree as pytree

from gascompile.api.sources import Source
from gascompile.capture.saved.program_io import load_treespec
from gascompile.core.errors import CheckpointError, StorageError
from gascompile.core.program import InputSpec, Program
from gascompile.core.sizes import format_size
from gascompile.weights.checkpoint import open_checkpoint
from gascompile.weights.file_kinds import is_onnx
from gascompile.weights.values import stored_value

_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""Largest difference, relative to the largest value, that the rounding of a dtype explains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How far the outputs are from eager's."""

    max_difference: float
    max_value: float
    """Largest magnitude in eager's outputs."""
    bit_identical: bool
    ok: bool
    """Whether the difference is within the rounding of the outputs' dtypes."""

    def sentence(self) -> str:
        """Return the finding as a line."""
        if self.bit_identical:
            return "check: bit-identical to eager"
        verdict = "within rounding" if self.ok else "MORE than rounding explains"
        size = f"{self.max_difference:.3g} (largest value {self.max_value:.3g})"
        return f"check: largest difference to eager {size}, {verdict}"


def with_given_inputs(kwargs: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Return ``kwargs`` with the tensors of a safetensors file in the place of those of the same name.

    Raises:
        CheckpointError: the file cannot be read.
        typer.BadParameter: a name in it is no argument.
    """
    try:
        given = load_file(file)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot read the inputs {file}: {error}; write them with safetensors"
        ) from error
    unknown = sorted(given.keys() - kwargs.keys()) if kwargs else []
    if unknown:
        raise typer.BadParameter(
            f"{file} holds '{unknown[0]}', which is no input of the model; its inputs are {', '.join(kwargs)}"
        )
    return {**kwargs, **given}


def inputs_of_program(program: Program) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return inputs of the shapes that a program was captured with: zeros, and its constants.

    Raises:
        CheckpointError: a constant is no plain value.
    """
    leaves = [_made_up(spec) for spec in program.inputs]
    args, kwargs = pytree.tree_unflatten(leaves, load_treespec(program.in_spec))
    return tuple(args), dict(kwargs)


def _made_up(spec: InputSpec) -> Any:
    if spec.dtype is not None:
        return torch.zeros(spec.upper_shape(), dtype=getattr(torch, spec.dtype), device=spec.device)
    try:
        return ast.literal_eval(spec.constant)
    except (ValueError, SyntaxError) as error:
        raise CheckpointError(
            f"the input '{spec.path}' was captured as {spec.constant}, which cannot be made up; load the bundle in "
            "Python with gascompile.load"
        ) from error


def require_room(model: nn.Module) -> None:
    """Check that an eager copy of ``model`` fits beside what is in memory now.

    Raises:
        StorageError: it does not.
    """
    tensors = [*model.parameters(), *model.buffers()]
    needed_bytes = sum(t.numel() * t.element_size() for t in tensors if t.device.type == "meta")
    free_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed_bytes * 5 // 4 > free_bytes:
        raise StorageError(
            f"--check loads the whole model, {format_size(needed_bytes)}, and {format_size(free_bytes)} of memory are "
            "free; leave out --check, or run it on a machine with more memory"
        )


def compare(
    source: Source, args: tuple[Any, ...], kwargs: Mapping[str, Any], outputs: Any
) -> Difference:
    """Run the model in eager mode and return how far ``outputs`` are from its own."""
    model = _with_weights(source)
    with torch.no_grad():
        expected = model(*args, **kwargs)
    ours, theirs = _tensors(outputs), _tensors(expected)
    if [t.shape for t in ours] != [t.shape for t in theirs]:
        return Difference(max_difference=float("inf"), max_value=0.0, bit_identical=False, ok=False)
    ok, largest, value = True, 0.0, 0.0
    for mine, right in zip(ours, theirs, strict=True):
        difference = _largest(mine.double() - right.double())
        magnitude = _largest(right.double())
        ok &= difference <= _TOLERANCE.get(right.dtype, 0.0) * max(magnitude, 1e-30)
        largest, value = max(largest, difference), max(value, magnitude)
    identical = all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    return Difference(
        max_difference=largest, max_value=value, bit_identical=identical, ok=ok or identical
    )


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _with_weights(source: Source) -> Any:
    """Return the model in memory; one on the meta device is loaded as transformers itself does it."""
    model: Any = source.model
    if source.checkpoint is None:
        return model
    if is_onnx(source.checkpoint):
        sources = open_checkpoint(source.checkpoint).sources
        values = {name: stored_value(weight) for name, weight in sources.items()}
        model.load_state_dict(values, strict=False, assign=True)
        return model
    dtype = next(model.parameters()).dtype
    try:
        loaded = type(model).from_pretrained(
            str(source.checkpoint), dtype=dtype, local_files_only=True
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"transformers cannot load {source.checkpoint} for the check: {error}; leave out --check"
        ) from error
    return loaded.eval()
