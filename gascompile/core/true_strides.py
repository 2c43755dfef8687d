"""True strides: results of normalisation are laid out in a trace as the processor's kernels lay them out.

Torch's description of these ops keeps the input's strides, where the kernels return dense tensors. What comes
after them, views and formulas of gradients, depends on that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensorMode

_aten = torch.ops.aten
_INPUTS = {
    _aten.native_batch_norm.default: 0,
    _aten._native_batch_norm_legit.default: 0,
    _aten._native_batch_norm_legit.no_stats: 0,
    _aten._native_batch_norm_legit_functional.default: 0,
    _aten.native_batch_norm_backward.default: 1,
}
"""Ops whose first result lies as kernels lay it out for the argument of this number."""


@contextmanager
def true_strides() -> Iterator[None]:
    """Let fake tensors have the strides of real ones."""
    before = {op: decomposition_table[op] for op in _INPUTS if op in decomposition_table}
    try:
        for op, description in before.items():
            decomposition_table[op] = _laid_out(description, _INPUTS[op])
        FakeTensorMode.cache_clear()
        yield
    finally:
        for op, description in before.items():
            decomposition_table[op] = description
        FakeTensorMode.cache_clear()


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
