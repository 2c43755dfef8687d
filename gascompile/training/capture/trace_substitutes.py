"""Stand-ins: what a loss sees while it is traced in the place of real tensors that it has from elsewhere.

A closure may hold class weights, a teacher, a parameter of the model or a view of one. While the loss is
traced, each of them is replaced by what is traced for it; tensors of others become inputs of the program.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from gascompile.capture.fingerprint.code_origin import Origin, origin_of_file
from gascompile.capture.record.callers import caller_of
from gascompile.core.errors import CaptureError, UnsupportedOpError
from gascompile.core.tensor_attributes import share_attributes
from gascompile.training.capture.cached_casts import CachedCasts
from gascompile.training.capture.constant_values import ConstantValues
from gascompile.training.state.aliasing import Storages, ViewLayout, named_tensors, places
from gascompile.training.state.open_tensors import OpenTensor

_TAKING = frozenset(
    getattr(torch.Tensor, name)
    for name in ("to", "cpu", "contiguous", "float", "double", "half", "bfloat16")
)
"""What gives the tensor itself where there is nothing to do."""
_OF_LEAVES: dict[object, object] = {
    getattr(torch.Tensor, "is_leaf").__get__: True,  # noqa: B009
    getattr(torch.Tensor, "grad_fn").__get__: None,  # noqa: B009
}
"""What parameters say of themselves in a call, and what stands for them in a trace does not."""
_GRAD = getattr(torch.Tensor, "grad").__get__  # noqa: B009


class TraceSubstitutes:
    """Knows the real tensors of a model by identity and by memory, and what was found beside them."""

    def __init__(self, model: nn.Module, storages: Storages) -> None:
        """Take note of the model's tensors, as they are outside of a trace."""
        self._model, self._storages = model, storages
        self._canonical, tensors = named_tensors(model)
        self._tensors = tensors
        self._names = {id(tensor): name for name, tensor in tensors.items()}
        self._names.update((id(view.tensor), name) for name, view in storages.views.items())
        self._owners = {
            tensor.untyped_storage()._cdata: name
            for name, tensor in tensors.items()
            if name not in storages.views
        }
        self.outside: list[torch.Tensor] = []
        """Tensors that are none of the model's, in the order in which they are met."""
        self._met: list[torch.Tensor] = []
        """Kept, as they are told apart by identity."""

    @contextmanager
    def active(self, outside: Mapping[int, torch.Tensor], *, caches: bool) -> Iterator[None]:
        """Let the loss see what is traced.

        Args:
            outside: what is traced, by ``id`` of the real tensor; others are found and noted.
            caches: whether autocast keeps what it casts.
        """
        place_of = dict(places(self._model))
        traced = {name: held[leaf] for name, (held, leaf) in place_of.items()}
        changed = []
        try:
            for name, first in self._canonical.items():
                view = self._storages.views.get(first)
                held, leaf = place_of[name]
                if view is not None and not isinstance(view.tensor, nn.Parameter):
                    changed.append((held, leaf, held[leaf]))
                    owner = traced[view.owner]
                    held[leaf] = view.layout.traced_within(
                        owner if view.tensor.requires_grad else owner.detach()
                    )
                    traced[name] = held[leaf]
                elif name != first:
                    # One tensor under all its names, so that its gradients add up as they come, like eager's.
                    changed.append((held, leaf, held[leaf]))
                    held[leaf] = traced[first]
            for name, first in self._canonical.items():
                held, leaf = place_of[name]
                if first in self._tensors:
                    share_attributes(self._tensors[first], held[leaf])
                    if isinstance(self._tensors[first], nn.Parameter):
                        # By this isinstance() tells parameters.
                        vars(held[leaf])["_is_param"] = True
            casts = CachedCasts(traced.values(), enabled=caches)
            with casts.active(), _Substitution(self, traced, outside, casts):
                yield
            _require_no_hooks(traced)
        finally:
            for held, leaf, before in changed:
                held[leaf] = before

    def of(
        self,
        real: torch.Tensor,
        traced: Mapping[str, torch.Tensor],
        known: dict[int, torch.Tensor],
    ) -> torch.Tensor:
        """Return what is traced for a real tensor."""
        name = self._names.get(id(real))
        if name is not None:
            return traced[name]
        if id(real) in known:
            return known[id(real)]
        if isinstance(real, OpenTensor):
            return self._outside(real, known)
        storage = real.untyped_storage()._cdata
        other = self._storages.left.get(storage)
        if other is not None:
            raise CaptureError(
                f"loss_fn uses a tensor of {list(real.shape)} that shares memory with '{other}'; register it as a "
                "buffer of the model"
            )
        owner = self._owners.get(storage, self._storages.followed.get(storage))
        if owner is not None:
            base = traced[owner] if real.requires_grad else traced[owner].detach()
            substitute = ViewLayout.of(real).traced_within(base)
        else:
            if real.device.type != "cpu":
                raise UnsupportedOpError(
                    f"loss_fn uses a tensor of {list(real.shape)} on {real.device}; move it to the CPU"
                )
            return self._outside(real, known)
        self._met.append(real)
        known[id(real)] = substitute
        return substitute

    def _outside(self, real: torch.Tensor, known: dict[int, torch.Tensor]) -> torch.Tensor:
        if all(real is not other for other in self.outside):
            self.outside.append(real)
        self._met.append(real)
        known[id(real)] = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype)
        return known[id(real)]


class _Substitution(TorchFunctionMode):
    def __init__(
        self,
        of: TraceSubstitutes,
        traced: Mapping[str, torch.Tensor],
        outside: Mapping[int, torch.Tensor],
        casts: CachedCasts,
    ) -> None:
        super().__init__()
        self._of, self._traced, self._known = of, traced, dict(outside)
        self._casts = casts
        self._constants = ConstantValues()
        self._parameters = {
            id(tensor): name for name, tensor in traced.items() if isinstance(tensor, nn.Parameter)
        }

    def __torch_function__(
        self, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _TAKING and self._is_real(args[0]) and _gives_back(func, args, kwargs or {}):
            # The very tensor, as in eager: models keep what they get of it, as rotary tables, and trace it again.
            return args[0]
        if args and id(args[0]) in self._parameters:
            if func in _OF_LEAVES:
                return _OF_LEAVES[func]
            if func == _GRAD and args[0].requires_grad and _asks(sys._getframe(1)):
                raise UnsupportedOpError(
                    f"the loss reads the gradient of '{self._parameters[id(args[0])]}': while it is computed, planned "
                    "steps have none. What to do: torch.autograd.grad where the loss is made of gradients"
                )
        args, kwargs = pytree.tree_map_only(torch.Tensor, self._substitute, (args, kwargs or {}))
        args, kwargs = self._casts.of(func, (args, kwargs))
        return self._constants.call(func, args, kwargs)

    def _substitute(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self._is_real(tensor):
            return tensor
        return self._of.of(tensor, self._traced, self._known)

    @staticmethod
    def _is_real(tensor: torch.Tensor) -> bool:
        return not (
            isinstance(tensor, (FakeTensor, FunctionalTensor))
            or torch._is_functional_tensor(tensor)  # what one of torch's wrappers asks within
            or torch._C._functorch.is_functorch_wrapped_tensor(tensor)
            or tensor.is_meta
        )


def _require_no_hooks(traced: Mapping[str, torch.Tensor]) -> None:
    """Refuse a loss that leaves hooks on gradients of parameters: eager's add up from call to call."""
    for name, tensor in traced.items():
        if tensor._backward_hooks:
            raise UnsupportedOpError(
                f"the loss leaves a gradient hook on '{name}': in eager another one is added at every call. Scale or "
                "clip what the loss computes, or hook a value that it computes"
            )


def _asks(frame: types.FrameType | None) -> bool:
    """Return whether the program calls, perhaps by other modes of ours."""
    while frame is not None and origin_of_file(frame.f_code.co_filename) is Origin.OWN:
        frame = frame.f_back
    return caller_of(frame) is not None


def _gives_back(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a conversion of a real tensor is none."""
    others = pytree.tree_leaves((args[1:], kwargs))
    if any(isinstance(value, torch.Tensor) for value in others) or isinstance(args[0], OpenTensor):
        return False
    with torch.utils._python_dispatch._disable_current_modes():
        one = args[0].detach()
        return func(one, *args[1:], **kwargs) is one
