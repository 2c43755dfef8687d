"""Row indices: where the rows are of what an op looks up for each row in its own part of a tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from gascompile.core.program import draws

_FEW = 1 << 16
"""Elements of what is computed here."""


def row_of_indices(indices: Sequence[Any], places: Sequence[int | None], rows: int) -> int | None:
    """Return the dimension of the result that has the rows where the first index is each row's own number.

    As masks of attention look up ``mask[arange(rows)[:, None], places]``, and classifiers ``x[arange(rows), last]``.
    ``None`` where that is not known.

    Args:
        indices: of ``aten.index``, the first one of the dimension of the rows.
        places: the dimension of rows of each, ``None`` where it has none.
        rows: their number.
    """
    values: list[torch.Tensor] = [i.meta["val"] for i in indices if isinstance(i, fx.Node)]
    if len(values) != len(indices) or any(value.dtype != torch.int64 for value in values):
        return None
    numbers, rank = constant_of(indices[0]), max(value.dim() for value in values)
    if numbers is None or not torch.equal(numbers.flatten(), torch.arange(rows)):
        return None
    if places[0] is not None or rows not in numbers.shape:
        return None
    dim = rank - numbers.dim() + list(numbers.shape).index(rows)
    for value, own in zip(values[1:], places[1:], strict=True):
        at = dim - rank + value.dim()
        is_even = at < 0 or value.shape[at] == 1
        if (own is None and not is_even) or (own is not None and own != at):
            return None
    return dim


def constant_of(
    node: fx.Node, known: Mapping[str, torch.Tensor] | None = None
) -> torch.Tensor | None:
    """Return what is computed from numbers of a trace alone; ``None`` for anything else, and for what is large.

    Args:
        node: of the trace.
        known: values of placeholders by their names.
    """
    values: dict[fx.Node, Any] = {}
    for of in _behind(node):
        leaves = pytree.tree_leaves(of.meta.get("val"))
        is_small = all(x.numel() <= _FEW for x in leaves if isinstance(x, torch.Tensor))
        if of.op == "placeholder" and known is not None and of.name in known:
            values[of] = known[of.name]
        elif isinstance(of.target, torch._ops.OpOverload) and is_small and not draws(of.target):
            args, kwargs = fx.node.map_arg((of.args, of.kwargs), values.__getitem__)
            values[of] = of.target(*args, **kwargs)
        else:
            return None
    return values[node] if isinstance(values[node], torch.Tensor) else None


def _behind(node: fx.Node) -> list[fx.Node]:
    found, left = set[fx.Node](), [node]
    while left:
        of = left.pop()
        if of not in found:
            found.add(of)
            left += of.all_input_nodes
    return sorted(found)
