"""Ranges: calls that differ in sizes alone get one plan for a range of them, from the second on.

A dimension that was seen with several sizes becomes one of ``torch.export``, from 2 up to a bound that leaves room to
grow; dimensions that had the same sizes at each call are one. Sizes 0 and 1 mean something else to many ops: a call
with such in the place of others keeps a plan of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from gascompile.capture.calls import positional_names
from gascompile.core.program import Dim, InputSpec
from gascompile.core.signature import constant_of

if TYPE_CHECKING:
    from gascompile.api.unit import Unit

_LEAST = 2  # torch.export takes sizes 0 and 1 for other programs
Bounds = tuple[int, int]
"""Least and most of a size."""


@dataclass(frozen=True, slots=True)
class Range:
    """Sizes that one plan is to hold for."""

    dynamic_shapes: Any
    """As ``torch.export.export`` takes them."""
    text: str
    covered: tuple[Unit, ...]
    """Plans whose calls are among those that it holds for."""


class Ranges:
    """Finds ranges for the calls of one model, and knows those that it cannot be captured for."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._refused: set[frozenset[tuple[int, int]]] = set()

    def attempts(
        self, units: Sequence[Unit], leaves: Sequence[Any], spec: pytree.TreeSpec
    ) -> Iterator[Range]:
        """Yield ranges for a call that fits none of ``units``, the widest first; none where only its own sizes do.

        The next one is asked for where a range has failed.
        """
        alike = [unit for unit in units if _is_alike(unit, leaves, spec)]
        sizes = _sizes(alike, leaves)
        varied = {place: seen for place, seen in sizes.items() if len(set(seen)) > 1}
        places = frozenset(varied)
        if not alike or not varied or places in self._refused:
            return
        tried = set()
        for bound in (_power, int):
            dims = _dims(varied, bound)
            tops = tuple(dim.max for dim in dims.values())
            if tops in tried:
                continue
            tried.add(tops)
            shapes = self._shapes(dims, leaves, spec)
            if shapes is None:
                break
            text = ", ".join(
                sorted({f"{dim.__name__} in {_LEAST}..{dim.max}" for dim in dims.values()})
            )
            yield Range(shapes, text, tuple(alike))
        self._refused.add(places)

    def _shapes(
        self, dims: Mapping[tuple[int, int], Any], leaves: Sequence[Any], spec: pytree.TreeSpec
    ) -> Any:
        """Return the dimensions in the structure of the arguments, or ``None`` where export takes none for those."""
        given: Iterator[Any] = iter(
            {d: dim for (i, d), dim in dims.items() if i == number} or None
            for number in range(len(leaves))
        )
        args, kwargs = _in_structure(spec, given)
        if args and kwargs:
            return None
        if kwargs:
            return kwargs
        # As it is now: a model may be given another forward.
        parameters = inspect.signature(self._model.forward).parameters.values()
        of_rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), None)
        named = dict(zip(positional_names(self._model), args, strict=False))
        rest = args[len(named) :]
        if rest and of_rest is None:
            return None
        return named | ({of_rest: rest} if rest else {})


def _in_structure(spec: pytree.TreeSpec, given: Iterator[Any]) -> Any:
    """Return the values of ``given`` in the structure of a call; a library's containers are lists of their parts."""
    if spec.is_leaf():
        return next(given)
    parts = [_in_structure(child, given) for child in spec.children()]
    if spec.type is dict:
        return dict(zip(spec.context, parts, strict=True))
    return tuple(parts) if spec.type is tuple else parts


def _is_alike(unit: Unit, leaves: Sequence[Any], spec: pytree.TreeSpec) -> bool:
    """Return whether a plan is for calls that differ from this one in sizes of at least two alone."""
    if spec != unit.in_spec:
        return False
    return all(map(_differs_in_sizes, unit.bundle.program.inputs, leaves))


def _differs_in_sizes(known: InputSpec, leaf: Any) -> bool:
    if known.dtype is None:
        return not isinstance(leaf, torch.Tensor) and constant_of(leaf) == known.constant
    if not isinstance(leaf, torch.Tensor) or f"torch.{known.dtype}" != str(leaf.dtype):
        return False
    return len(known.shape) == leaf.dim() and all(
        dim == size or min(size, _bounds(dim)[0]) >= _LEAST
        for dim, size in zip(known.shape, leaf.shape, strict=True)
    )


def _bounds(dim: int | Dim) -> Bounds:
    return (dim.minimum, dim.maximum) if isinstance(dim, Dim) else (dim, dim)


def _sizes(
    units: Sequence[Unit], leaves: Sequence[Any]
) -> dict[tuple[int, int], tuple[Bounds, ...]]:
    """Return by leaf and dimension the sizes of all plans and, last, of the call."""
    return {
        (i, d): (*(_bounds(unit.bundle.program.inputs[i].shape[d]) for unit in units), (size, size))
        for i, leaf in enumerate(leaves)
        if isinstance(leaf, torch.Tensor)
        for d, size in enumerate(leaf.shape)
    }


def _power(size: int) -> int:
    """Return the next power of two."""
    return 1 << (size - 1).bit_length()


def _dims(
    varied: Mapping[tuple[int, int], tuple[Bounds, ...]], bound: Any
) -> dict[tuple[int, int], Any]:
    """Return a dimension of ``torch.export`` per place; the same where sizes were the same all along."""
    made: dict[tuple[Bounds, ...], Any] = {}
    for seen in varied.values():
        if seen not in made:
            top = bound(max(high for _, high in seen))
            made[seen] = torch.export.Dim(f"size{len(made)}", min=_LEAST, max=top)
    return {place: made[seen] for place, seen in varied.items()}
