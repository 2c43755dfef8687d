"""Lasting values of a compiled model whose plan moves them: weights where they lie, states in slots of our own.

A state that may move is taken out of the caller's tensor, which stays without memory until it is given back. In
between there is one value, wherever it is: whoever wants it asks the session.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterable, Mapping

import torch

from gascompile.core.errors import PlanMismatchError, UnsupportedOpError
from gascompile.core.sources import WeightSource
from gascompile.core.strides import span_elements
from gascompile.core.waiting import life
from gascompile.runtime.memory.persistent import Persistent

_NUM_HANDLES = 2  # the look's own and the tensor's


def unread_weight(source: WeightSource) -> torch.Tensor:
    """Return a tensor with the layout of a weight, on the meta device.

    Raises:
        PlanMismatchError: the file has more or less than its bytes, or another form of them.
    """
    dtype = getattr(torch, source.dtype, None)
    if not isinstance(dtype, torch.dtype) or source.interleaved_heads:
        raise PlanMismatchError(
            f"'{source.name}' lies in its file otherwise than it is computed with; plan again"
        )
    made = torch.empty(source.shape, dtype=dtype, device="meta")
    if source.stride:
        made = torch.empty_strided(source.shape, source.stride, dtype=dtype, device="meta")
        count = span_elements(source.shape, source.stride)
    else:
        count = made.numel()
    stored_bytes = sum(extent.size_bytes for extent in source.extents)
    if stored_bytes != count * dtype.itemsize:
        raise PlanMismatchError(
            f"'{source.name}' has {stored_bytes} bytes in its file and {count * dtype.itemsize} in the plan; plan again"
        )
    return made


class TakenStates:
    """The caller's states whose values a store has."""

    def __init__(
        self, store: Persistent, held: Mapping[str, torch.Tensor], names: Iterable[str]
    ) -> None:
        """Take nothing yet."""
        self.store = store
        self.tensors = {name: held[name] for name in names}
        self.give: Callable[[str, torch.Tensor], None] = self._give
        """Gives a value back to the caller's tensor, which is a plain one again with that."""
        self.is_whole = True
        """False from the beginning of a run until it has ended well."""
        self._life = life()
        self._given = set(self.tensors)
        self._closed = False

    def take(self) -> None:
        """Take the values over, one after the other; whoever asked for it closes this after an error.

        Raises:
            StorageError: the store's file cannot be written.
        """
        for name, tensor in self.tensors.items():
            self.store.put(name, _filler(tensor))
            # From here on the store has the value.
            self._given.discard(name)
            tensor.data = torch.empty(0, dtype=tensor.dtype)

    def make_whole(self) -> None:
        """After a run that did not end well, let each value be where the store says that it is."""
        if not self.is_whole:
            self.store.recover()
            self.is_whole = True

    def close(self) -> None:
        """Give the values back and the store's files; idempotent, and to be repeated after an error.

        In a child of a fork nothing is done: what its parent's transfers make of the values is not known there.

        Raises:
            StorageError: a value cannot be read, and stays where it is.
        """
        if self._life is not life() or self._closed:
            return
        # Whoever drops a session leaves what it has started for the next run, or what a failed one has left.
        self.store.drain()
        self.make_whole()
        for name in self.tensors:
            if name not in self._given:
                self.give(name, self.store.taken(name))
                self._given.add(name)
        self.store.close()
        self._closed = True

    def _give(self, name: str, value: torch.Tensor) -> None:
        self.tensors[name].data = value


def has_own_memory(tensor: torch.Tensor) -> bool:
    """Return whether a state may be taken over; see ``require_own_memory``."""
    try:
        require_own_memory("", tensor)
    except UnsupportedOpError:
        return False
    return True


def require_own_memory(name: str, tensor: torch.Tensor) -> None:
    """Refuse a state whose memory others look at: it would leave without them.

    Raises:
        UnsupportedOpError: says why.
    """
    storage = tensor.untyped_storage()
    # This handle of it and the tensor's own.
    if torch._C._storage_Use_Count(storage._cdata) > _NUM_HANDLES:
        # What an interrupt has left of an opening looks at it, too, as long as it lies in a cycle.
        gc.collect()
    if torch._C._storage_Use_Count(storage._cdata) > _NUM_HANDLES:
        raise UnsupportedOpError(
            f"other tensors look at the memory of the state '{name}', which leaves without them: let go of views of "
            "it, give the model a clone of it, or plan for a larger budget"
        )
    if not tensor.is_contiguous() or storage.nbytes() != tensor.nbytes or tensor.storage_offset():
        raise UnsupportedOpError(
            f"the state '{name}' is a part of a larger memory, or laid out otherwise than it was planned for: it "
            "cannot leave memory; give the model a clone of it, or plan for a larger budget"
        )
    if tensor.requires_grad:
        raise UnsupportedOpError(
            f"the state '{name}' requires a gradient, which a moved one has none of; call requires_grad_(False)"
        )


def _filler(tensor: torch.Tensor) -> Callable[[memoryview, int], None]:
    """Return what copies a part of a tensor of the host, from an offset on, into memory."""
    source = tensor.detach()

    def fill(target: memoryview, offset: int) -> None:
        begin = source.data_ptr() + offset
        part = (ctypes.c_char * len(target)).from_address(begin)
        target[:] = memoryview(part).cast("B")

    return fill
