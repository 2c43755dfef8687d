"""Rounds: a model is called several times in one trace, so that later calls find what earlier ones have left.

In each round it is called once per signature, in the order in which the real calls came. What a call keeps,
and the next one uses, shows as a value of one call in the graph of another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from gascompile.capture.later.history import Call, OutlinedCall


@dataclass(frozen=True, slots=True)
class TracedCall:
    """What one call in a trace returned."""

    number: int
    """Of its signature."""
    num_leaves: int
    plain: str
    """Its structure, and the leaves that are no tensors."""

    @staticmethod
    def of(returned: object, number: int) -> TracedCall:
        """Describe what a call returned."""
        leaves, spec = pytree.tree_flatten(returned)
        plain = [leaf for leaf in leaves if not isinstance(leaf, (torch.Tensor, torch.SymInt))]
        return TracedCall(number, len(leaves), repr((spec, plain)))


class Rounds:
    """Two rounds of calls. In the trace, an empty tensor is returned after the leaves of each call."""

    def __init__(self, earlier: Sequence[OutlinedCall] = ()) -> None:
        """Call nothing yet.

        Args:
            earlier: inputs of other signatures, with outlines of tensors, which come first.
        """
        self._earlier = tuple(earlier)
        self.calls: list[TracedCall] = []

    def run(
        self,
        call: Callable[..., Any],
        given: Call,
        last: Callable[[], AbstractContextManager[None]],
    ) -> list[Any]:
        """Call the model, in the last round within ``last``, and return all leaves."""
        self.calls.clear()
        leaves = self._round(call, given)
        with last():
            return leaves + self._round(call, given)

    def _round(self, call: Callable[..., Any], given: Call) -> list[Any]:
        leaves: list[Any] = []
        for number, (args, kwargs) in enumerate(
            (*(c.made() for c in self._earlier), _fresh(given))
        ):
            returned = call(*args, **kwargs)
            self.calls.append(TracedCall.of(returned, number))
            leaves += [*pytree.tree_leaves(returned), torch.empty(0)]
        return leaves


def _fresh(given: Call) -> Call:
    """Return the call in containers of its own: models put things into caches that they are given."""
    leaves, spec = pytree.tree_flatten(given)
    call: Call = pytree.tree_unflatten(leaves, spec)
    return call
