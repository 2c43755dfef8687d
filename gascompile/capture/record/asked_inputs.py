"""Asked inputs: what the model's code asks of its inputs that their substitutes in a capture cannot say.

It is answered as of the caller's tensor where that is a value, refused where the two differ and it is an object, and
noted either way: the plan is for calls with the same answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from gascompile.core.errors import UnsupportedOpError
from gascompile.core.input_facts import FACTS, fact_of
from gascompile.core.tensor_attributes import share_attributes

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
    _T._is_view: "_is_view",
    _T.is_shared: "is_shared",
    _T.untyped_storage: "untyped_storage",
    _T._typed_storage: "untyped_storage",
    _T.storage: "untyped_storage",
}
"""Facts by the functions of torch that code asks by."""
PARAMETER = "nn.Parameter"
_OF_PARAMETERS = {"requires_grad", "is_leaf", "grad"}
OF_GRADIENTS = {"requires_grad": True, "is_leaf": False, "grad_fn": "a node of autograd's graph"}
"""What is said of values while gradients are recorded."""


class AskedInputs:
    """The tensors of the call that is captured, by their substitutes."""

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        model: nn.Module | None = None,
        *,
        is_recording: bool = False,
    ) -> None:
        """Take note of the caller's arguments.

        Args:
            args: by position.
            kwargs: by name.
            model: whose parameters and buffers may be asked, too.
            is_recording: whether to say of values that come of them what is so while gradients are recorded.
        """
        self._given = _by_path(args, kwargs)
        self._real: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.facts: dict[int, dict[str, str]] = {}
        """By ``id`` of the caller's tensor, those that were asked for, by name."""
        self.is_recording = is_recording
        self._model = model
        self._own: dict[int, tuple[torch.Tensor, torch.Tensor, str]] = {}
        self.own_facts: dict[tuple[str, str], torch.Tensor] = {}
        """Parameters, and buffers that want gradients, by their names and by what was asked of them."""

    def follow(self, twin: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Take note of what stands for the model's tensors in the capture, and of the arguments for the caller's."""
        self._follow_own(twin)
        self._real = {
            id(made): (made, self._given[path])
            for path, made in _by_path(args, kwargs).items()
            if path in self._given
        }

    def _follow_own(self, twin: nn.Module) -> None:
        if self._model is None:
            return
        modules = zip(twin.modules(), self._model.named_modules(), strict=True)
        for stand_in, (path, module) in modules:
            for kind in ("_parameters", "_buffers"):
                for key, real in vars(module)[kind].items():
                    made = vars(stand_in)[kind].get(key)
                    if real is None or made is None:
                        continue
                    share_attributes(real, made)
                    # Of other buffers what stands for them says the same.
                    if kind == "_parameters" or real.requires_grad:
                        self._own[id(made)] = made, real, f"{path}.{key}" if path else key

    def knows(self, tensor: object) -> bool:
        """Return whether a tensor stands for one of the caller's."""
        known = self._real.get(id(tensor))
        return known is not None and known[0] is tensor

    def answer(self, name: str, tensor: object) -> tuple[object] | None:
        """Return what to answer in a tuple; ``None`` where ``tensor`` may say it itself.

        Raises:
            UnsupportedOpError: it cannot be answered.
        """
        if id(tensor) in self._own and name in _OF_PARAMETERS:
            made, real, path = self._own[id(tensor)]
            self.own_facts[path, name] = real
            return self._told(name, made, real, f"the model's '{path}'")
        if not self.knows(tensor):
            if self.is_recording and name in OF_GRADIENTS and _may_require(tensor):
                return (OF_GRADIENTS[name],)
            return None
        made, real = self._real[id(tensor)]
        self.facts.setdefault(id(real), {})[name] = fact_of(name, real)
        return self._told(name, made, real, "an input")

    @staticmethod
    def _told(name: str, made: torch.Tensor, real: torch.Tensor, what: str) -> tuple[object] | None:
        if name not in _OBJECTS:
            return (FACTS[name](real),)
        if fact_of(name, real) != fact_of(name, made):
            raise UnsupportedOpError(
                f"it asks whether or what {what} has as {name}, which no plan knows of; pass x.detach().clone()"
            )
        return None

    def of_leaf(self, leaf: object) -> tuple[str, ...]:
        """Return the facts of a leaf of the caller's arguments that were asked for."""
        facts = self.facts.get(id(leaf), {})
        return tuple(facts[name] for name in sorted(facts))


def _by_path(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    leaves = pytree.tree_flatten_with_path((args, dict(kwargs)))[0]
    return {pytree.keystr(path): leaf for path, leaf in leaves if isinstance(leaf, torch.Tensor)}


def _may_require(tensor: object) -> bool:
    if not isinstance(tensor, torch.Tensor) or isinstance(tensor, nn.Parameter):
        return False
    return tensor.is_floating_point() or tensor.is_complex()
