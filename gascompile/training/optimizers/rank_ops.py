"""Rank ops: what ranks that train one model exchange in a step, as ops of its program.

Every rank has the same sequence of them, as programs differ in numbers alone. None of them runs again to save memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from gascompile.core.ranks import STAGE_OPS
from gascompile.distributed import stage_ops
from gascompile.runtime.collectives.exchange import Exchange, exchange_under_way
from gascompile.training.optimizers.update_ops import nothing, part_of, range_of

NAMESPACE = "gascompile_ranks"
_SCALARS_BYTES = 1024
"""Results of one element, as the allocator rounds them up."""
_library = torch.library.Library(NAMESPACE, "DEF")
_library.define("add(Tensor[] values) -> Tensor[]")
_library.define("across(Tensor[] values) -> Tensor[]")
_library.define("total(Tensor value) -> Tensor")
_library.define(
    "add_part(Tensor gradient, int[] shape, int[] stride, int[] bounds, int own) -> Tensor"
)
_library.define(
    "begin_part(Tensor gradient, int[] shape, int[] stride, int[] bounds, int own) -> Tensor"
)
_library.define("end_part(Tensor begun, int[] bounds, int own) -> Tensor")
_library.define("norm(Tensor[] norms) -> Tensor")
_library.define("gather(Tensor(a!) parameter, int[] bounds) -> ()")
_library.define("begin_gather(Tensor parameter, int[] bounds) -> Tensor")
_library.define("end_gather(Tensor(a!) parameter, Tensor begun, int[] bounds) -> ()")
_library.define("whole(Tensor[] parts, int[] shape, int[] stride, int[] bounds) -> Tensor")


def _add(values: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the sums of tensors over the ranks, in one exchange."""
    return _added(values, exchange_under_way())


def _across(values: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the sums of tensors over the ranks that have the same stage of a pipeline, in one exchange."""
    exchange = exchange_under_way().across
    assert exchange is not None, "there are several pipelines"
    return _added(values, exchange)


def _added(values: list[torch.Tensor], exchange: Exchange) -> list[torch.Tensor]:
    flat = torch.cat([value.reshape(-1) for value in values])
    exchange.add(flat)
    parts = flat.split([value.numel() for value in values])
    # Of their own, as each goes when its last reader has run.
    return [part.clone().view(value.shape) for part, value in zip(parts, values, strict=True)]


def _total(value: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor over the ranks; its gradient is that of each rank, summed in the same way."""
    summed = value.clone(memory_format=torch.contiguous_format)
    exchange_under_way().add(summed)
    return summed


def _add_part(
    gradient: torch.Tensor, shape: list[int], stride: list[int], bounds: list[int], own: int
) -> torch.Tensor:
    """Return the elements that rank ``own`` keeps of a gradient's sum over the ranks.

    Args:
        gradient: of this rank's rows, of any strides.
        shape: of the parameter.
        stride: of the parameter; ``bounds`` are in its order of memory.
        bounds: where each rank's elements begin, and where the last ones end.
        own: this rank.
    """
    parameter = torch.empty_strided(shape, stride, device="meta")
    whole, _ = part_of(parameter, gradient, 0, bounds[0], bounds[-1])
    return exchange_under_way().add_part(whole, sizes_of(bounds))


def _begin_part(
    gradient: torch.Tensor, shape: list[int], stride: list[int], bounds: list[int], own: int
) -> torch.Tensor:
    """Begin what ``_add_part`` does; return nothing but what says so."""
    parameter = torch.empty_strided(shape, stride, device="meta")
    whole, is_copy = part_of(parameter, gradient, 0, bounds[0], bounds[-1])
    # The gradient may be gone before the end, or be written to.
    exchange_under_way().begin_part(whole if is_copy else whole.clone(), sizes_of(bounds))
    return gradient.new_zeros(())


def _end_part(begun: torch.Tensor, bounds: list[int], own: int) -> torch.Tensor:
    """Return what ``_add_part`` returns, of the first that was begun."""
    return exchange_under_way().end_part()


def _norm(norms: list[torch.Tensor]) -> torch.Tensor:
    """Return the norm of what all ranks have a part of, from the norms of this rank's parts."""
    own = torch.linalg.vector_norm(torch.stack(norms))
    # Stages of a pipeline may have gradients of other types, or none.
    square = own.double().square()
    exchange = exchange_under_way()
    exchange.add(square)
    if exchange.across is not None:
        # All that have the same stage have told the same.
        square /= exchange.across.size
    root: torch.Tensor = square.sqrt()
    return root.to(own.dtype)


def _gather(parameter: torch.Tensor, bounds: list[int]) -> None:
    """Take over what the other ranks have updated of a parameter."""
    exchange_under_way().gather(range_of(parameter, bounds[0], bounds[-1]), sizes_of(bounds))


def _begin_gather(parameter: torch.Tensor, bounds: list[int]) -> torch.Tensor:
    """Begin what ``_gather`` does; return nothing but what says so. The parameter may move meanwhile."""
    values = range_of(parameter, bounds[0], bounds[-1])
    exchange_under_way().begin_gather(values, sizes_of(bounds))
    return parameter.new_zeros(())


def _end_gather(parameter: torch.Tensor, begun: torch.Tensor, bounds: list[int]) -> None:
    """Take over what the other ranks have updated, of the first parameter of which that was begun."""
    exchange_under_way().end_gather(range_of(parameter, bounds[0], bounds[-1]))


def _whole(
    parts: list[torch.Tensor], shape: list[int], stride: list[int], bounds: list[int]
) -> torch.Tensor:
    """Return a parameter of which each rank has parts.

    Args:
        parts: this rank's own, a vector per range of the parameter.
        shape: of the parameter.
        stride: of the parameter.
        bounds: range by range where each rank's elements begin, in its order of memory, and where the last ones end.
    """
    assembled = parts[0].new_empty_strided(shape, stride)
    for part, ends in zip(parts, _per_range(parts, bounds), strict=True):
        exchange_under_way().gather(range_of(assembled, ends[0], ends[-1]), sizes_of(ends), part)
    return assembled


def _per_range(parts: Sequence[object], bounds: Sequence[int]) -> list[Sequence[int]]:
    """Return the bounds of each of the ranges of which a rank has ``parts``."""
    count = len(bounds) // len(parts)
    return [bounds[count * number : count * (number + 1)] for number in range(len(parts))]


def sizes_of(bounds: Sequence[int]) -> list[int]:
    """Return the number of each rank's elements."""
    return [end - begin for begin, end in itertools.pairwise(bounds)]


def _own_part(
    gradient: torch.Tensor, shape: list[int], stride: list[int], bounds: list[int], own: int
) -> torch.Tensor:
    return gradient.new_empty(sizes_of(bounds)[own])


for _name, _implementation in (
    ("add", _add),
    ("across", _across),
    ("total", _total),
    ("add_part", _add_part),
    ("begin_part", _begin_part),
    ("end_part", _end_part),
    ("norm", _norm),
    ("gather", _gather),
    ("begin_gather", _begin_gather),
    ("end_gather", _end_gather),
    ("whole", _whole),
):
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _implementation, _key)
for _name in ("add", "across"):
    _library.impl(_name, lambda values: [v.new_empty(v.shape) for v in values], "Meta")
_library.impl("add_part", _own_part, "Meta")
_library.impl("begin_part", lambda gradient, *_: gradient.new_empty(()), "Meta")
_library.impl("end_part", lambda begun, bounds, own: begun.new_empty(sizes_of(bounds)[own]), "Meta")
_library.impl(
    "total",
    lambda value: value.new_empty(value.shape),
    "Meta",
)
torch.library.register_autograd(
    "gascompile_ranks::total",
    lambda _, gradient: torch.ops.gascompile_ranks.total(gradient),
    lib=_library,
)
_library.impl("norm", lambda norms: norms[0].new_empty(()), "Meta")
_library.impl("gather", nothing, "Meta")
_library.impl("begin_gather", lambda parameter, _: parameter.new_empty(()), "Meta")
_library.impl("end_gather", nothing, "Meta")
_library.impl(
    "whole",
    lambda parts, shape, stride, _: parts[0].new_empty_strided(shape, stride),
    "Meta",
)

add = torch.ops.gascompile_ranks.add.default
across = torch.ops.gascompile_ranks.across.default
add_part = torch.ops.gascompile_ranks.add_part.default
begin_part = torch.ops.gascompile_ranks.begin_part.default
end_part = torch.ops.gascompile_ranks.end_part.default
total = torch.ops.gascompile_ranks.total.default
norm = torch.ops.gascompile_ranks.norm.default
gather = torch.ops.gascompile_ranks.gather.default
begin_gather = torch.ops.gascompile_ranks.begin_gather.default
end_gather = torch.ops.gascompile_ranks.end_gather.default
whole = torch.ops.gascompile_ranks.whole.default
BEGINS: dict[object, object] = {begin_part: add_part, begin_gather: gather}
"""What goes on beside ops from here on, and what waits for its end at once."""
ENDS = (end_part, end_gather)
"""Of what was begun, the first first."""


def exchanges(target: object) -> bool:
    """Return whether an op needs the other ranks."""
    namespaces = (NAMESPACE, STAGE_OPS)
    return isinstance(target, torch._ops.OpOverload) and target.namespace in namespaces


def waits(target: object) -> bool:
    """Return whether an op needs the other ranks while it runs: what it sends may go on its way behind others."""
    return exchanges(target) and target is not stage_ops.send


def bounds_of(target: object, args: Sequence[Any]) -> Sequence[int]:
    """Return where each rank's elements of a range begin, of an op that has one range."""
    place = 3 if target in (add_part, begin_part) else 2 if target is end_gather else 1
    bounds: Sequence[int] = args[place]
    return bounds


def exchanged(node: fx.Node) -> tuple[int, bool]:
    """Return the bytes that an op of ranks exchanges, and whether each rank has or gives a part of them."""
    if stage_ops.is_of_stages(node.target):
        args = pytree.tree_map(lambda a: a.meta["val"] if isinstance(a, fx.Node) else a, node.args)
        return stage_ops.message_bytes(node.target, args), True
    if node.target in (add_part, gather, *BEGINS, *ENDS):
        bounds = bounds_of(node.target, node.args)
        return torch.float32.itemsize * (bounds[-1] - bounds[0]), True
    values = pytree.tree_leaves(node.meta["val"])
    size_bytes = sum(value.numel() * value.element_size() for value in values)
    return size_bytes, node.target is whole


def gathered(node: fx.Node) -> list[int]:
    """Return the bytes of each of the exchanges that an op of gathers makes, one after the other."""
    if node.target is not whole:
        return [exchanged(node)[0]]
    args: Sequence[Any] = node.args
    parts, bounds, size_bytes = args[0], args[3], node.meta["val"].element_size()
    return [size_bytes * (ends[-1] - ends[0]) for ends in _per_range(parts, bounds)]


def workspace_bytes(target: object, args: Sequence[Any]) -> int:
    """Return what an op of ranks allocates beside its results, from layouts alone."""
    if stage_ops.is_of_stages(target):
        return _SCALARS_BYTES
    if target in (add, across):
        values: Sequence[torch.Tensor] = args[0]
        # All of them side by side, and what comes from the other ranks.
        return 2 * sum(value.numel() * value.element_size() for value in values)
    if target is total:
        return int(args[0].numel() * args[0].element_size())
    if target is norm:
        return _SCALARS_BYTES + 8 * len(args[0])
    if target is whole:
        # What is sent: a part for each rank, range by range.
        parts: Sequence[torch.Tensor] = args[0]
        count = len(args[3]) // len(parts) - 1
        return max(part.numel() * part.element_size() for part in parts) * count + _SCALARS_BYTES
    if target in ENDS:
        return 0  # That of the ops since the beginning has it.
    bounds = bounds_of(target, args)
    # What is received; and what is sent, where rows lie otherwise or a part goes to all.
    return 2 * torch.float32.itemsize * (bounds[-1] - bounds[0])
