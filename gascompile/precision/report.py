"""What the forms of weights cost and lose: per weight from the store, and end to end by running both."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from gascompile.bundles.files import Weights
from gascompile.core.program import Program
from gascompile.weights.convert import conversion_errors


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """How one weight lies, moves and is computed in, and what was lost on the way."""

    name: str
    stored: str
    wire: str
    compute: str
    size_bytes: int
    """As it moves, when all of it does."""
    relative_error: float
    """Norm of the difference to the stored weight over the norm of that; 0 where nothing was rounded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatReport:
    """The forms of all weights of a plan."""

    weights: tuple[WeightFormat, ...]
    size_bytes: Mapping[str, int]
    """Bytes of the weights by the form that they move in."""
    relative_error: float
    """Largest of the weights' errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredError:
    """How far outputs are from those of the weights as they are stored."""

    relative_error: float
    """Norm of the difference over the norm of the exact outputs, over all floating outputs together."""
    outputs: Mapping[str, float]
    """The same for each floating output, by its place in what the model returns."""


def format_report(program: Program, weights: Weights) -> FormatReport:
    """Return the forms that the weights of ``program`` move in.

    Args:
        program: with its weights in their transfer formats.
        weights: where they lie; the store's files say what converting lost.

    Raises:
        StorageError: a file cannot be read.
        FormatError: a file of the store is damaged.
    """
    lost: dict[str, Mapping[str, float]] = {}
    formats = []
    size_bytes: dict[str, int] = {}
    for name, source in sorted(weights.sources.items()):
        paths = {extent.path for extent in source.extents}
        for path in paths - lost.keys():
            lost[path] = conversion_errors(path)
        bound, forms = program.bound[name], program.forms.get(name)
        wire = forms.wire if forms else bound.dtype
        size_bytes[wire] = size_bytes.get(wire, 0) + bound.size_bytes
        formats.append(
            WeightFormat(
                name=name,
                stored=forms.stored if forms else bound.dtype,
                wire=wire,
                compute=forms.compute if forms else bound.dtype,
                size_bytes=bound.size_bytes,
                relative_error=max((lost[path].get(name, 0.0) for path in paths), default=0.0),
            )
        )
    return FormatReport(
        weights=tuple(formats),
        size_bytes=size_bytes,
        relative_error=max((w.relative_error for w in formats), default=0.0),
    )


def output_error(outputs: Any, exact: Any) -> MeasuredError:
    """Return how far the outputs of one call are from those of another of the same structure."""
    pairs = [
        (pytree.keystr(path), value, wanted)
        for (path, value), (_, wanted) in zip(
            pytree.tree_flatten_with_path(outputs)[0],
            pytree.tree_flatten_with_path(exact)[0],
            strict=True,
        )
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    ]
    squares = {
        name: (
            float((value.double() - wanted.double()).square().sum()),
            float(wanted.double().square().sum()),
        )
        for name, value, wanted in pairs
    }
    wrong, total = (sum(parts[i] for parts in squares.values()) for i in (0, 1))
    return MeasuredError(
        relative_error=_ratio(wrong, total),
        outputs={name: _ratio(*parts) for name, parts in squares.items()},
    )


def _ratio(wrong: float, total: float) -> float:
    """Return the root of a ratio of sums of squares; infinite where nothing but error is there."""
    if total:
        return math.sqrt(wrong / total)
    return math.inf if wrong else 0.0
