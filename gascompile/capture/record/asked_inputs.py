"""Asked inputs: what the model's code asks of its inputs that their substitutes in a capture cannot say.

It is answered as of the caller's tensor where that is a value, refused where the two differ and it is an object, and
noted either way: the plan is for calls with the same answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from gascompile.core.errors import UnsupportedOpError
from gascompile.core.input_facts import FACTS, fact_of

_OBJECTS = ("grad", "grad_fn", "_base", "_version", "untyped_storage", "nn.Parameter")
"""Facts that are less than what is asked for."""
_T = torch.Tensor
ASKING: dict[object, str] = {
    **{
        getattr(_T, name).__get__: name
        for name in ("requires_grad", "is_leaf", "grad", "grad_fn", "_base", "_version")
    },
    _T.storage_offset: "storage_offset",
    _T.is_inference: "is_inference",
    torch.is_inference: "is_inference",
    _T.is_pinned: "is_pinned",
    _T.untyped_storage: "untyped_storage",
    _T._typed_storage: "untyped_storage",
    _T.storage: "untyped_storage",
}
"""Facts by the functions of torch that code asks by."""
PARAMETER = "nn.Parameter"


class AskedInputs:
    """The tensors of the call that is captured, by their substitutes."""

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Take note of the caller's arguments."""
        self._given = _by_path(args, kwargs)
        self._real: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.facts: dict[int, dict[str, str]] = {}
        """By ``id`` of the caller's tensor, those that were asked for, by name."""

    def follow(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Take note of the arguments that stand for the caller's in the capture."""
        self._real = {
            id(made): (made, self._given[path])
            for path, made in _by_path(args, kwargs).items()
            if path in self._given
        }

    def answer(self, name: str, tensor: object) -> tuple[object] | None:
        """Return what to answer in a tuple; ``None`` where ``tensor`` may say it itself.

        Raises:
            UnsupportedOpError: it cannot be answered.
        """
        known = self._real.get(id(tensor))
        if known is None or known[0] is not tensor:
            return None
        made, real = known
        fact = fact_of(name, real)
        self.facts.setdefault(id(real), {})[name] = fact
        if name not in _OBJECTS:
            return (FACTS[name](real),)
        if fact != fact_of(name, made):
            raise UnsupportedOpError(
                f"it asks whether or what an input has as {name}, which no plan knows of; pass x.detach().clone()"
            )
        return None

    def of_leaf(self, leaf: object) -> tuple[str, ...]:
        """Return the facts of a leaf of the caller's arguments that were asked for."""
        facts = self.facts.get(id(leaf), {})
        return tuple(facts[name] for name in sorted(facts))


def _by_path(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    leaves = pytree.tree_flatten_with_path((args, dict(kwargs)))[0]
    return {pytree.keystr(path): leaf for path, leaf in leaves if isinstance(leaf, torch.Tensor)}
