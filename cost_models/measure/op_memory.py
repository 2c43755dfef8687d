"""Measures what an op allocates beside its results: called once on made-up values, with torch's allocator counting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils import _pytree as pytree

from gascompile.cost_models.measure.rehearse import made_up, storage_elements

_MOST_BYTES = 256 << 20
"""Of an op's inputs and results; one with more is not called."""


class MemoryCount(Protocol):
    """What ``Counter.counting`` yields."""

    @property
    def peak_bytes(self) -> int:
        """The most that was alive."""


class MemoryCounter(Protocol):
    """What counts, as in ``runtime.counting``."""

    def counting(self) -> AbstractContextManager[MemoryCount]:
        """Count what this thread takes."""


class OpCall(NamedTuple):
    """An op on fake tensors, as the runtime calls it."""

    function: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result_bytes: int
    """Planned for what it returns."""


def op_kind(function: object, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return what the workspace of a call depends on: the op, the layout of its tensors, the other arguments."""
    parts = [str(function)]
    for value in pytree.tree_leaves((args, kwargs)):
        if isinstance(value, torch.Tensor):
            dtype = str(value.dtype).removeprefix("torch.")
            parts.append(f"{dtype}{tuple(value.shape)}{tuple(value.stride())}")
        else:
            parts.append(repr(value))
    return " ".join(parts)


def given_bytes(call: OpCall) -> int:
    """Return what the tensors that a call is given take when they are made up."""
    fakes = [v for v in pytree.tree_leaves((call.args, call.kwargs)) if isinstance(v, torch.Tensor)]
    return sum(storage_elements(v) * v.element_size() for v in fakes)


def measured_workspace_bytes(call: OpCall, counter: MemoryCounter) -> int | None:
    """Return what a call takes beside its results; ``None`` where it cannot be made, or is too large to be.

    Made-up tensors take the place of the fake ones. Only ops of ATen are called: others may do more than compute.
    """
    function, args, kwargs, result_bytes = call
    if not isinstance(function, torch._ops.OpOverload) or function.namespace != "aten":
        return None
    if given_bytes(call) + result_bytes > _MOST_BYTES:
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
