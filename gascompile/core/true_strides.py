"""True strides: results of normalisation are laid out in a trace as the processor's kernels lay them out.

Torch's description of these ops keeps the input's strides, where the kernels return dense tensors. What comes
after them, views and formulas of gradients, depends on that.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensorMode

from gascompile.core.shared_context import SharedContext

_aten = torch.ops.aten
_INPUTS = {
    _aten.native_batch_norm.default: 0,
    _aten._native_batch_norm_legit.default: 0,
    _aten._native_batch_norm_legit.no_stats: 0,
    _aten._native_batch_norm_legit_functional.default: 0,
    _aten.native_batch_norm_backward.default: 1,
}
"""Ops whose first result lies as kernels lay it out for the argument of this number."""


_MOST_SHAPES = 1 << 16
"""Calls whose fake results are remembered: some 100 MB. A model of a hundred layers makes fewer than 1,000 of them."""


class _Results(dict[Any, Any]):
    """Fake results by call. Those of a graph are known by its identity, and kept apart to be found at once."""

    def __init__(self) -> None:
        super().__init__()
        self._of_graphs: list[Any] = []

    def __setitem__(self, call: Any, result: Any) -> None:
        if _is_of_graph(call):
            self._of_graphs.append(call)
        super().__setitem__(call, result)

    def forget_graphs(self) -> None:
        """Drop results of graphs: torch drops them with the graph only while they are in use."""
        for call in self._of_graphs:
            self.pop(call, None)
        self._of_graphs.clear()


_results = _Results()
"""What torch remembers of fake results that have true strides, for the next context; its own differ."""


@contextlib.contextmanager
def _replaced() -> Iterator[None]:
    before = {op: decomposition_table[op] for op in _INPUTS if op in decomposition_table}
    own = FakeTensorMode.cache
    if len(_results) > _MOST_SHAPES:
        _results.clear()
    for call in [call for call in own if _is_of_graph(call)]:
        del own[call]
    try:
        for op, description in before.items():
            decomposition_table[op] = _laid_out(description, _INPUTS[op])
        FakeTensorMode.cache = _results
        yield
    finally:
        for op, description in before.items():
            decomposition_table[op] = description
        FakeTensorMode.cache = own
        _results.forget_graphs()


def _is_of_graph(call: Any) -> bool:
    return not isinstance(call.key[0], torch._ops.OpOverload)


def _laid_out(description: Callable[..., Any], number: int) -> Callable[..., Any]:
    @functools.wraps(description)
    def described(*args: Any, **kwargs: Any) -> Any:
        first, *rest = description(*args, **kwargs)
        like = args[number]
        if isinstance(first, torch.Tensor):
            dense = torch.contiguous_format if like.is_contiguous() else suggest_memory_format(like)
            first = torch.empty_like(like, dtype=first.dtype, memory_format=dense)
        return (first, *rest)

    return described


true_strides = SharedContext(_replaced)
"""Encloses what lets fake tensors have the strides of real ones; torch's tables are the process's."""
