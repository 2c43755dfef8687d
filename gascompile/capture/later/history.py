"""History: the calls of one model that have plans, for what one leaves behind is what the next one finds.

Eager's calls follow each other; plans run no Python code. So a plan is one for calls after all that came before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from gascompile.core.signature import signature_of, strides_of

Call = tuple[tuple[Any, ...], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class CallOutline:
    """The layout of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def made(self) -> torch.Tensor:
        """Return a tensor of this layout."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype)


@dataclass(frozen=True, slots=True)
class OutlinedCall:
    """A call without its tensors, taken apart: containers of libraries take nothing in their place."""

    leaves: tuple[Any, ...]
    """With outlines in the place of tensors."""
    spec: pytree.TreeSpec

    @staticmethod
    def of(call: Call) -> OutlinedCall:
        """Take a call apart."""
        leaves, spec = pytree.tree_flatten(call)
        return OutlinedCall(
            tuple(
                CallOutline(tuple(leaf.shape), strides_of(leaf), leaf.dtype)
                if isinstance(leaf, torch.Tensor)
                else leaf
                for leaf in leaves
            ),
            spec,
        )

    def made(self) -> Call:
        """Return the call with tensors that are made here, in the order of the arguments."""
        leaves = [leaf.made() if isinstance(leaf, CallOutline) else leaf for leaf in self.leaves]
        call: Call = pytree.tree_unflatten(leaves, self.spec)
        return call


@dataclass(frozen=True, slots=True)
class Past:
    """A call that has a plan."""

    call: OutlinedCall
    inert: frozenset[str] = frozenset()
    """Values that calls change, and that are proven not to matter for this one."""
    settles: bool = False
    """Whether it changes what matters, as by keeping what it made at first."""


class History:
    """The calls by their signature, in the order in which they came."""

    def __init__(self) -> None:
        """Begin with none."""
        self._past: dict[str, Past] = {}

    def others(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Past]:
        """Return the calls of other signatures."""
        own = _key(args, kwargs)
        return [past for key, past in self._past.items() if key != own]

    def admit(
        self, inert: frozenset[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> bool:
        """Add a call for which changes of ``inert`` do not matter, if a plan of it alone holds after the others."""
        others = self.others(args, kwargs)
        if not all(past.inert == inert and not past.settles for past in others):
            return False
        self.add(args, kwargs, inert)
        return True

    def add(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        inert: frozenset[str] = frozenset(),
        *,
        settles: bool = False,
    ) -> None:
        """Take note of a call; what is proven inert is so for those before, too."""
        key = _key(args, kwargs)
        self._past.pop(key, None)
        for name, past in self._past.items():
            self._past[name] = Past(past.call, past.inert | inert, past.settles)
        self._past[key] = Past(OutlinedCall.of((args, dict(kwargs))), inert, settles)


def _key(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
    return f"{spec} {signature_of(leaves)}"
