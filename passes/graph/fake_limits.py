"""Limits on what one op of a program may ask of a run on fake tensors: nothing is computed, but every piece is made.

A model that was captured stays far below them. A program from a file could ask for a billion pieces of an expanded
number, or for a recurrent layer of as many steps.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from gascompile.core.errors import UnsupportedOpError

MAX_PIECES = 1 << 16  # each is a tensor and a node of the graph
MAX_KERNELS = 1 << 16
"""Of one op."""

_ATEN = torch.ops.aten
_SPLITS = {_ATEN.split.Tensor, _ATEN.split_copy.Tensor, _ATEN.unsafe_split.Tensor}
_UNBINDS = {_ATEN.unbind.int, _ATEN.unbind_copy.int}


def limit_work(func: Any, args: Sequence[Any], num_kernels: int) -> None:
    """Return unless ``func`` would make too many pieces, or is one kernel too many of its op.

    Raises:
        UnsupportedOpError: names the limit.
    """
    if num_kernels >= MAX_KERNELS:
        raise UnsupportedOpError(
            f"an op calls more than {MAX_KERNELS} kernels; split it up, as a recurrent layer over parts of its input"
        )
    _check_dim(func, args)
    if func not in _SPLITS and func not in _UNBINDS:
        return
    size_at = 2 if func in _SPLITS else 1
    dim = args[size_at] if len(args) > size_at else 0
    shape = args[0].shape
    if not isinstance(dim, int) or not -len(shape) <= dim < len(shape):
        return  # the op refuses it
    step = args[1] if func in _SPLITS else 1
    if int(shape[dim]) > MAX_PIECES * max(int(step), 1):
        raise UnsupportedOpError(
            f"{func} would make {int(shape[dim])} / {step} pieces, more than {MAX_PIECES}; make fewer"
        )


@functools.cache
def _place_of_dim(func: Any) -> int:
    """Return which argument of an op names a dimension of its first; -1 where none does."""
    names = [argument.name for argument in func._schema.arguments]
    if "dim" not in names or func.overloadpacket in _NEW_DIMENSION:
        return -1
    return names.index("dim")


_NEW_DIMENSION = {
    _ATEN.unsqueeze,
    _ATEN.unsqueeze_,
    _ATEN.unsqueeze_copy,
    _ATEN.stack,
    _ATEN.diag_embed,
}
"""Ops whose dimension is one of their result."""
_SIZES = ("input_sizes", "self_sizes", "sizes")
"""What gradients of selections call the shape of which they make one: their dimension is one of that."""


@functools.cache
def _place_of_sizes(func: Any) -> int:
    """Return which argument of an op names the shape that its dimension is one of; -1 where its first one has it."""
    names = [argument.name for argument in func._schema.arguments]
    return next((names.index(name) for name in _SIZES if name in names), -1)


def _check_dim(func: Any, args: Sequence[Any]) -> None:
    """Refuse a dimension that a tensor has not: fakes of some ops, such as ``softmax``, look at none."""
    place = _place_of_dim(func)
    if not 0 < place < len(args) or not isinstance(args[0], torch.Tensor):
        return
    sizes = _place_of_sizes(func)
    rank = len(args[sizes]) if 0 < sizes < len(args) else args[0].dim()
    dim, count = args[place], max(rank, 1)
    if type(dim) is int and not -count <= dim < count:
        raise IndexError(f"the dimension {dim} is none of a tensor of {count}")
