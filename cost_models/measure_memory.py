"""Measures what an op allocates beside its results: called once on made-up values, with torch's allocator counting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree

from gascompile.cost_models.rehearse import made_up, storage_elements

_MOST_BYTES = 256 << 20
"""Of an op's inputs and results; one with more is not called."""


class Count(Protocol):
    """What ``Counter.counting`` yields."""

    @property
    def peak_bytes(self) -> int:
        """The most that was alive."""


class Counter(Protocol):
    """What counts, as in ``runtime.counting``."""

    def counting(self) -> AbstractContextManager[Count]:
        """Count what this thread takes."""


def measured_workspace_bytes(
    function: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    result_bytes: int,
    counter: Counter,
) -> int | None:
    """Return what a call takes beside ``result_bytes``; ``None`` where it cannot be made, or is too large to be.

    Args:
        function: an overload of ATen; others may do more than compute.
        args: with fake tensors, in whose place made-up ones are used.
        kwargs: likewise.
        result_bytes: planned for what it returns.
        counter: of this process.
    """
    if not isinstance(function, torch._ops.OpOverload) or function.namespace != "aten":
        return None
    fakes = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor)]
    given_bytes = sum(storage_elements(v) * v.element_size() for v in fakes)
    if given_bytes + result_bytes > _MOST_BYTES:
        return None
    real_args, real_kwargs = pytree.tree_map_only(
        torch.Tensor, made_up, (tuple(args), dict(kwargs))
    )
    with torch.no_grad(), torch.random.fork_rng(devices=()):
        try:
            with counter.counting() as count:
                function(*real_args, **real_kwargs)
        except (RuntimeError, IndexError, ValueError, NotImplementedError):
            # Some ops look at values, and made-up ones are not theirs.
            return None
    return max(count.peak_bytes - result_bytes, 0)
