"""States: tensors that ops mutate and that outlive a run, in the memory of the device that mutates them.

Where the host computes they are the caller's own tensors. A device keeps copies, which are the newer ones
while a session is open: ``pull`` brings the caller's up to date. What the caller writes to a tensor of theirs
between two runs is taken over before the next one, so both see a state as one tensor that all write to in turns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from gascompile.core.strides import distinct
from gascompile.runtime.memory.storages import bytes_of, over


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
        self._seen = {name: _stamp(tensor) for name, tensor in self._held.items()}
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

    def pull(self) -> None:
        """Bring the caller's tensors up to date; blocks until the device has done all it was given."""
        if self._device.is_host or not self.tensors:
            return
        # What the caller has written since is newer than what the device has.
        self.push()
        self._device.synchronize()
        for name, held in self._held.items():
            # Ops may write without saying so, as batch_norm does; constants are never written to.
            fresh, own = distinct(self.tensors[name]).to(held.device), distinct(held.detach())
            if not torch.equal(_bytes(fresh), _bytes(own)):
                own.copy_(fresh)
            self._seen[name] = _stamp(held)

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


def _stamp(tensor: torch.Tensor) -> tuple[int, int]:
    """Return what differs after every write to ``tensor``, where torch counts them, and once it has other memory."""
    return 0 if tensor.is_inference() else int(tensor._version), tensor.data_ptr()


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
