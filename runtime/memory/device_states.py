"""States: tensors that ops mutate and that outlive a run, in the memory of the device that mutates them.

Where the host computes they are the caller's own tensors. A device keeps copies. What the caller writes to a tensor
of theirs between two runs is taken over before the next one, by ``push``; what a run writes is brought back after it,
by ``pull``, into the memory that the caller's tensor has. So both see a state as one tensor that all write to in turns,
and a model is at any time what eager would have made of it. That takes a copy to the host of each state that a run
writes to, for which the host waits until ops are done; states that are only read are left alone. Who sees the states
of nobody else, as ``Generator`` does with its caches, may pull when it ends.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Mapping
from typing import Protocol

import torch
from torch.autograd.graph import increment_version

from gascompile.core.strides import distinct
from gascompile.runtime.memory.storages import bytes_of, over

_LOOKED_AT_BYTES = 8192
"""At each end of a tensor, between two runs. Statistics of batch norms have fewer, so that all of them is compared."""


class Keeper(Protocol):
    """The part of a device that is needed here."""

    @property
    def is_host(self) -> bool: ...

    def keep(self, value: torch.Tensor) -> torch.Tensor:
        """Return a copy of ``value`` in the device's memory."""
        ...

    def synchronize(self) -> None: ...


class DeviceStates:
    """The states of a session."""

    def __init__(self, device: Keeper, held: Mapping[str, torch.Tensor]) -> None:
        """Copy ``held`` to the device; views of one memory stay views of one memory.

        Raises:
            torch.OutOfMemoryError: the device has no room for them.
        """
        self._device = device
        self._held = dict(held)
        self._seen = {} if device.is_host else self._stamps()
        self.tensors: Mapping[str, torch.Tensor] = (
            self._held if device.is_host else _copies(device, self._held)
        )
        """What ops read and write, by name."""

    def push(self) -> None:
        """Take over what the caller has written to their tensors since they were last alike."""
        if self._device.is_host:
            return
        for name, tensor in self._held.items():
            stamp = _stamp(tensor)
            if stamp != self._seen[name]:
                distinct(self.tensors[name]).copy_(distinct(tensor.detach()))
                self._seen[name] = stamp

    def pull(self, written: Collection[str] | None = None) -> None:
        """Bring the caller's tensors up to date.

        Args:
            written: names of those that the run just before has written to, on this thread, if it is known; names of
                no states are passed over. Else all are compared, once the device has done all it was given.
        """
        if self._device.is_host or not self.tensors:
            return
        # What the caller has written since is newer than what the device has.
        self.push()
        if written is None:
            self._device.synchronize()
            changed = [name for name in self._held if not self._is_alike(name)]
        else:
            # Weights on their way for the next run are not waited for: the copy comes after the ops of this one.
            changed = [name for name in self._held if name in written]
        for name in changed:
            # Counted as a write once all are there: what an interrupt keeps from coming here is not taken for the
            # caller's own write, which would undo what the device has, and comes with the next call.
            held = self._held[name]
            distinct(over(held.untyped_storage(), held)).copy_(distinct(self.tensors[name]))
        if changed:
            counted = (self._held[name] for name in changed)
            increment_version([held for held in counted if not held.is_inference()])
            # Of all: views of one memory have one count.
            self._seen = self._stamps()

    def _stamps(self) -> dict[str, tuple[object, ...]]:
        return {name: _stamp(tensor) for name, tensor in self._held.items()}

    def _is_alike(self, name: str) -> bool:
        """Return whether both have the same; ops may write without saying so, and constants are not to be written."""
        held = self._held[name]
        ours = distinct(self.tensors[name]).to(held.device)
        return torch.equal(_bytes(ours), _bytes(distinct(held.detach())))

    def close(self) -> None:
        """Bring the caller's tensors up to date and give the device's memory back; idempotent."""
        if not self._device.is_host:
            try:
                self.pull()
            finally:
                self.tensors = {}

    def contains(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` shares its storage with a state."""
        start: int = tensor.untyped_storage().data_ptr()
        return any(start == t.untyped_storage().data_ptr() for t in self.tensors.values())

    @property
    def size_bytes(self) -> int:
        """Bytes of the storages that ops read and write."""
        storages = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for t in self.tensors.values()
        }
        return sum(storages.values())


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def _stamp(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return what differs after a write to ``tensor``, and once it has other memory.

    Torch does not count writes of batch norms in eager mode, nor those through ``.data`` or NumPy: they show in what
    stands there.
    """
    version = 0 if tensor.is_inference() else int(tensor._version)
    return version, tensor.data_ptr(), *_ends(tensor)


def _ends(tensor: torch.Tensor) -> tuple[bytes, ...]:
    """Return what stands in the first and last bytes of a tensor of the host; of a small one, in all."""
    start, stop = _span(tensor)
    storage = tensor.untyped_storage()
    if tensor.device.type != "cpu" or start == stop or storage.nbytes() < stop:
        return ()
    begin, end = storage.data_ptr() + start, storage.data_ptr() + stop
    if stop - start <= 2 * _LOOKED_AT_BYTES:
        return (ctypes.string_at(begin, stop - start),)
    return (
        ctypes.string_at(begin, _LOOKED_AT_BYTES),
        ctypes.string_at(end - _LOOKED_AT_BYTES, _LOOKED_AT_BYTES),
    )


def _copies(device: Keeper, held: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return copies of tensors on the device: of each storage the part that they lie in, once."""
    groups: dict[int, list[str]] = {}
    for name, tensor in held.items():
        key = tensor.untyped_storage().data_ptr() if tensor.numel() else id(tensor)
        groups.setdefault(key, []).append(name)
    made: dict[str, torch.Tensor] = {}
    for names in groups.values():
        spans = [_span(held[name]) for name in names]
        low, high = min(start for start, _ in spans), max(stop for _, stop in spans)
        if low == high:
            made |= {name: device.keep(held[name].detach()) for name in names}
            continue
        whole = bytes_of(held[names[0]].detach().untyped_storage())
        kept = device.keep(whole[low:high])
        for name in names:
            tensor = held[name]
            offset = int(tensor.storage_offset()) - low // tensor.element_size()
            made[name] = over(kept.untyped_storage(), tensor, offset)
    return made


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first byte of its storage that a tensor touches, aligned for any dtype, and the one after its last."""
    size = tensor.element_size()
    if not tensor.numel():
        return 0, 0
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset())
    return start * size // 16 * 16, (start + last + 1) * size
