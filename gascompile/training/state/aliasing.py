"""Storages: how the tensors of a model lie in memory, while a step has them and after it has given them back.

What moves between tiers is a storage with one dense tensor that fills it. Tensors that look at part of such a
one are views of it, in plans too. Others get memory of their own, and their places back in the end.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gascompile.core.errors import CaptureError, UnsupportedOpError
from gascompile.core.strides import repeats
from gascompile.runtime.memory.storages import without_memory
from gascompile.training.state.open_tensors import behind

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ViewLayout:
    """Which elements of a storage a tensor has."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> ViewLayout:
        """Return that of a tensor."""
        return cls(tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()))

    def within(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the view of a tensor that fills its storage."""
        return whole.as_strided(self.size, self.stride, self.offset)

    def traced_within(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the same view by ops that a trace can look through when it is changed, where there are such."""
        order = sorted(range(len(self.size)), key=lambda dim: -self.stride[dim])
        count = 1
        for dim in reversed(order):
            if self.size[dim] > 1 and self.stride[dim] != count:
                return self.within(whole)
            count *= self.size[dim]
        flat = whole.permute(_by_stride(whole)).view(-1)
        back = sorted(range(len(order)), key=order.__getitem__)
        sizes = [self.size[dim] for dim in order]
        return flat.narrow(0, self.offset, count).view(sizes).permute(back)

    def without_memory(self, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor that has this shape alone."""
        return without_memory(
            torch.empty_strided(self.size, self.stride, dtype=dtype, device="meta")
        )


@dataclass(frozen=True, slots=True)
class View:
    """A parameter or buffer that shares the memory of a larger one."""

    tensor: torch.Tensor
    owner: str
    layout: ViewLayout


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor lay that has memory of its own now."""

    tensor: torch.Tensor
    storage: torch.UntypedStorage
    size_bytes: int
    layout: ViewLayout
    is_view: bool


class Storages:
    """The memory of a model's parameters and buffers. Takes what lies oddly apart, until ``restore``."""

    def __init__(self, model: nn.Module) -> None:
        """Look at all parameters and buffers.

        Raises:
            CaptureError: one has no values, or some overlap of which none holds all the others.
            UnsupportedOpError: one is not on the CPU.
        """
        self._model = model
        _, tensors = named_tensors(model)
        self.views: dict[str, View] = {}
        """By name; owners are none."""
        self.left: dict[int, str] = {}
        """Storages that tensors have left, by identity, with the name of one."""
        self.followed: dict[int, str] = {}
        """Likewise those that somebody else has, of which a view in a loss is one of this tensor."""
        self._repeating = frozenset(n for n, t in tensors.items() if repeats(t.shape, t.stride()))
        self._places: list[_Place] = []
        groups: dict[int, dict[str, torch.Tensor]] = {}
        for name, tensor in tensors.items():
            _require_values(name, tensor)
            groups.setdefault(tensor.untyped_storage()._cdata, {})[name] = tensor
        owned = [(group, _owner(group)) for group in groups.values()]
        for group, owner in owned:
            self._take(group, owner)

    def _take(self, group: Mapping[str, torch.Tensor], owner: str | None) -> None:
        storage = next(iter(group.values())).untyped_storage()
        if owner is not None:
            for name, tensor in group.items():
                if name != owner:
                    self.views[name] = View(tensor, owner, ViewLayout.of(tensor))
            if storage.resizable():
                return
        (first, *_) = group
        self.left[storage._cdata] = first
        size_bytes = storage.nbytes()
        for name, tensor in group.items():
            is_view = name in self.views
            self._places.append(_Place(tensor, storage, size_bytes, ViewLayout.of(tensor), is_view))
            if not is_view:
                tensor.data = tensor.detach().clone(memory_format=torch.contiguous_format)
        for name, view in self.views.items():
            if name in group:
                view.tensor.data = view.layout.within(group[view.owner].detach())
        held = sum(t.nbytes for name, t in group.items() if name not in self.views)
        # Who else has it would read no memory.
        is_ours = torch._C._storage_Use_Count(storage._cdata) == 1
        if is_ours and storage.resizable() and held == size_bytes:
            storage.resize_(0)

    def leave_shared(self) -> None:
        """Let what others have a hold on as well lie elsewhere, until ``restore``: its memory will move.

        Whoever has it, as a state_dict or an array, finds the values of now in it, and would find none.
        """
        shared = self._shared()
        if shared:
            gc.collect()  # Cycles that nobody sees may have had it.
            shared = self._shared()
        for group, owner in shared:
            storage = group[owner].untyped_storage()
            self.followed[storage._cdata] = owner
            for name, tensor in group.items():
                layout, is_view = ViewLayout.of(tensor), name in self.views
                self._places.append(_Place(tensor, storage, storage.nbytes(), layout, is_view))
            group[owner].data = group[owner].detach().clone()
            for name, view in self.views.items():
                if name in group:
                    view.tensor.data = view.layout.within(group[owner].detach())
        apart = {place.storage._cdata for place in self._places} - self.followed.keys()
        left = [self.left[of] for of in apart if torch._C._storage_Use_Count(of) > 1]
        if names := sorted([*left, *(owner for _, owner in shared)]):
            _log.warning(
                "others have the memory of %s%s, too, as a state_dict, a view or the graph of a loss has: it keeps the "
                "values of now until the step is closed, and what is written to it is lost; delete what has it, or "
                "clone it",
                ", ".join(repr(name) for name in names[:3]),
                f" and {len(names) - 3} more" if len(names) > 3 else "",
            )

    def _shared(self) -> list[tuple[dict[str, torch.Tensor], str]]:
        """Return the tensors that fill their storages and their views, where somebody else has such a storage."""
        _, tensors = named_tensors(self._model)
        groups: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in tensors.items():
            owner = self.views[name].owner if name in self.views else name
            groups.setdefault(owner, {})[name] = tensor
        gone = {place.storage._cdata for place in self._places}
        found = []
        for owner, group in groups.items():
            storage = group[owner].untyped_storage()
            is_here = (
                group[owner].layout is torch.strided and storage.nbytes() >= group[owner].nbytes
            )
            # One more has it while it is asked.
            is_shared = torch._C._storage_Use_Count(storage._cdata) > len(group) + 1
            if is_here and is_shared and storage._cdata not in gone:
                found.append((group, owner))
        return found

    def require_writable(self, names: Collection[str]) -> None:
        """Refuse that steps write to a tensor of which several elements lay in one place, as eager does.

        Raises:
            UnsupportedOpError: names it.
        """
        for name in sorted(self._repeating.intersection(names)):
            raise UnsupportedOpError(
                f"'{name}' is trained, or changed by the loss, and several of its elements lie in one place, as of "
                "expand(): torch refuses to write to such a tensor, and a step would give each its own value. Make it "
                "of tensor.expand(...).clone(), or expand it in the forward pass"
            )

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Let views have their shapes and share no memory, as traces want it."""
        empty = {
            name: view.layout.without_memory(view.tensor.dtype) for name, view in self.views.items()
        }
        before = {name: view.tensor.data for name, view in self.views.items()}
        canonical, _ = named_tensors(self._model)
        changed = []
        try:
            for name, (held, leaf) in places(self._model):
                # Of other tensors autograd remembers what they are views of.
                if canonical[name] in empty and not isinstance(held[leaf], nn.Parameter):
                    changed.append((held, leaf, held[leaf]))
                    held[leaf] = empty[canonical[name]]
            for name, view in self.views.items():
                view.tensor.data = empty[name]
            yield
        finally:
            for held, leaf, tensor in changed:
                held[leaf] = tensor
            for name, view in self.views.items():
                view.tensor.data = before[name]

    def restore(self) -> None:
        """Let all tensors lie where they lay before, with the values that owners and others have now."""
        _, tensors = named_tensors(self._model)
        for view in self.views.values():
            behind(view.tensor).data = view.layout.within(behind(tensors[view.owner]).detach())
        for place in self._places:
            storage, layout = place.storage, place.layout
            if behind(place.tensor).is_meta:
                continue  # its value is lost
            if storage.nbytes() < place.size_bytes:
                storage.resize_(place.size_bytes)
            tensor = behind(place.tensor)
            there = torch.empty(0, dtype=tensor.dtype)
            there.set_(storage, layout.offset, layout.size, layout.stride)
            if not place.is_view:
                _once(there, layout).copy_(_once(tensor.detach(), layout))
            tensor.data = there
        self._places.clear()
        self.views.clear()
        self.followed.clear()


def named_tensors(model: nn.Module) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """Return the first name of the same tensor for every name, and the tensors by it."""
    first: dict[int, str] = {}
    canonical: dict[str, str] = {}
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        canonical[name] = first.setdefault(id(tensor), name)
        tensors.setdefault(canonical[name], tensor)
    return canonical, tensors


def places(model: nn.Module) -> Iterator[tuple[str, tuple[dict[str, Any], str]]]:
    """Yield where modules hold their parameters and buffers, by every name."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for held in (module._parameters, module._buffers):
            for leaf, tensor in held.items():
                if tensor is not None:
                    yield f"{prefix}.{leaf}" if prefix else leaf, (held, leaf)


def _require_values(name: str, tensor: torch.Tensor) -> None:
    if tensor.is_meta:
        raise CaptureError(
            f"'{name}' is on the meta device and has no values; call model.to_empty(device='cpu') and load "
            "a state_dict before compile_step"
        )
    if tensor.device.type != "cpu":
        raise UnsupportedOpError(f"'{name}' is on {tensor.device}; move the model to the CPU")


def _owner(group: Mapping[str, torch.Tensor]) -> str | None:
    """Return the tensor that fills its storage and of which the others are views; ``None`` if all lie apart.

    Raises:
        CaptureError: some overlap.
    """
    for name, tensor in group.items():
        size_bytes = tensor.untyped_storage().nbytes()
        if tensor.storage_offset() or size_bytes != tensor.nbytes or not _is_dense(tensor):
            continue
        other = next((n for n, t in group.items() if t.dtype != tensor.dtype), None)
        if other is not None:
            raise CaptureError(
                f"'{name}' and '{other}' share memory as {tensor.dtype} and {group[other].dtype}; give "
                "them memory of their own"
            )
        return name
    if len(group) > 1:
        _require_apart(group)
    return None


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() or tensor.permute(_by_stride(tensor)).is_contiguous()


def _by_stride(tensor: torch.Tensor) -> list[int]:
    return sorted(range(tensor.dim()), key=lambda d: -tensor.stride()[d])


def _require_apart(group: Mapping[str, torch.Tensor]) -> None:
    taken = torch.zeros(next(iter(group.values())).untyped_storage().nbytes(), dtype=torch.bool)
    for name, tensor in group.items():
        layout, width = ViewLayout.of(tensor), tensor.itemsize
        stride = (*(width * step for step in layout.stride), 1)
        in_bytes = ViewLayout((*layout.size, width), stride, width * layout.offset)
        mine = _once(in_bytes.within(taken), in_bytes)
        if bool(mine.any()):
            raise CaptureError(
                f"'{name}' and others of {sorted(group)} overlap in memory, and none of them holds all the others; "
                "register a buffer of all of that memory, or give them memory of their own"
            )
        mine.fill_(True)


def _once(tensor: torch.Tensor, layout: ViewLayout) -> torch.Tensor:
    """Return each element once where a tensor was expanded."""
    for dim, (size, step) in enumerate(zip(layout.size, layout.stride, strict=True)):
        if size > 1 and not step:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def in_order_of(like: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return the elements of ``value`` in the order in which ``like`` lies in memory."""
    laid = value.detach().to(torch.float32)
    if laid.stride() != like.stride():
        laid = torch.empty_strided(like.shape, like.stride()).copy_(laid)
    return laid.as_strided((like.numel(),), (1,))
