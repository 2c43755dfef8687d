"""Tensors that outlive iterations, where a device with memory of its own computes.

Each has up to three places: the device's memory, a slot on the host, a slot in the file. Iterations move values over
the device's streams. Between iterations nothing is under way; whoever then asks for a value gets it through the
host, from the place that has the newest one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from gascompile.core.errors import StorageError
from gascompile.core.parts import Span, in_pages
from gascompile.runtime.memory.device_moves import DeviceMoves
from gascompile.runtime.memory.host_slots import Outside
from gascompile.runtime.memory.pages import Pages
from gascompile.runtime.memory.persistent import Persistent
from gascompile.runtime.memory.pinned import HOST
from gascompile.runtime.memory.source_slots import SourceSlots
from gascompile.runtime.memory.storages import bytes_of, over, without_memory
from gascompile.runtime.protocols import Event, Ticket
from gascompile.runtime.transfer.copying import write_all


class DeviceValues(Persistent):
    """Parameters, moments and buffers of one training run on a device. Not for several threads at once."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        zeros: Mapping[str, tuple[int, torch.dtype]],
        folder: Path,
        moves: DeviceMoves,
        pages: Pages | None = None,
        *,
        unread: Collection[str] = (),
        sources: SourceSlots | None = None,
    ) -> None:
        """Copy the values of ``tensors``, which are the host's, to their slots in a file; all begin away.

        Args:
            tensors: with values, but for ``unread``.
            zeros: elements and dtype of vectors that begin as zeros.
            folder: where the file lies.
            moves: of the device.
            pages: where the device's memory comes from, where it is emulated.
            unread: those of ``tensors`` that get their values by ``put``.
            sources: values of some of ``unread``, which are read where they lie; closed with this.

        Raises:
            StorageError: the folder cannot be written to, or has too little space.
        """
        self._moves = moves
        self._on_host: set[str] = set()
        """Whose slot on the host holds the value of now, unless something else lies there by now."""
        self._host_parts: dict[str, list[Span]] = {}
        """In which pages alone a block of the host is older than the device's memory, of those that are."""
        self._targets: dict[str, bool] = {}
        """Whether the last write of each went to the host."""
        self._given: dict[str, torch.Tensor] = {}
        device = moves.device.torch_device
        twins = {name: without_memory(tensor, device) for name, tensor in tensors.items()}
        super().__init__(
            twins,
            zeros,
            folder,
            moves.buffers,
            pages,
            unread=tuple(twins),
            sizes={name: tensor.untyped_storage().nbytes() for name, tensor in tensors.items()},
            sources=sources,
            moves=moves,
        )
        try:
            for name in tensors.keys() - set(unread):
                self._spill.write(name, tensors[name].untyped_storage()).wait()
                self._valid.add(name)
        except BaseException:
            super().close()
            raise

    @property
    def host_bytes(self) -> int:
        return self._moves.host_bytes

    def _forget_slots(self, names: Iterable[str]) -> None:
        names = tuple(names)
        super()._forget_slots(names)
        self._on_host.difference_update(names)
        for name in names:
            self._host_parts.pop(name, None)

    def slot(self, name: str, size_bytes: int) -> torch.Tensor:
        return self._moves.host.bytes(name, size_bytes)

    def claim(self, name: str) -> None:
        self._moves.host.claim(name)

    def at_home(self, name: str) -> torch.Tensor:
        if name not in self._moves.host.blocks:
            raise StorageError(f"'{name}' has no place of its own on the host; plan again")
        tensor, content = self.tensors[name], self._moves.host.bytes(name, self.sizes[name])
        elements = content.view(tensor.dtype)
        offset = elements.storage_offset() + tensor.storage_offset()
        return elements.as_strided(tensor.shape, tensor.stride(), offset)

    def changed_at_home(self, names: Iterable[str]) -> None:
        # Of single sets and dicts: the thread of the device goes on with its own tensors meanwhile.
        names = tuple(names)
        for name in names:
            self._host_parts.pop(name, None)
        self._changed(names, super()._forget_slots)

    def patched(self, name: str, spans: Sequence[Span]) -> None:
        is_block = name in self._moves.host.blocks
        known = [] if is_block and name in self._on_host else self._host_parts.get(name)
        super().patched(name, spans)
        # Last: an interrupt before leaves a slot that is taken for older all over.
        if known is not None and is_block:
            self._host_parts[name] = in_pages([*known, *spans])

    def newer_bytes(self, name: str, link: str | None = None) -> int:
        assert link is not None, "a device's values leave over a link"
        if self._moves.place(link, writes=True) != HOST:
            return super().newer_bytes(name)
        parts = self._host_parts.get(name)
        if parts is None:
            return self.sizes[name]
        return sum(min(end, self.sizes[name]) - begin for begin, end in parts)

    def write(self, name: str, *, link: str | None = None, after: Event | None = None) -> Ticket:
        assert link is not None, "a device's values leave over a link"
        storage = self.tensors[name].untyped_storage()
        to_host = self._moves.place(link, writes=True) == HOST
        if not to_host and name in self._sources:
            self.changed((name,))
        self._targets[name] = to_host
        parts = (self._host_parts if to_host else self._parts).pop(name, None)
        ticket = self._spill.write(name, storage, link=link, after=after, parts=parts)
        self._writes[name] = ticket
        # Last: whatever interrupts this, a slot that was not written is not taken for the value.
        (self._on_host if to_host else self._valid).add(name)
        return ticket

    def read(self, name: str, *, link: str | None = None, after: Event | None = None) -> Ticket:
        assert link is not None, "a device's values come over a link"
        from_host = self._moves.place(link, writes=False) == HOST
        if not (self._is_on_host(name) if from_host else name in self._valid):
            raise StorageError(
                f"'{name}' is not where the plan reads it from: '{link}'; plan again"
            )
        return super().read(name, link=link, after=after)

    def write_out(self, names: Iterable[str]) -> None:
        """Do nothing: ``rest`` brings slots up to date where they are read from."""

    def rest(self, away: Iterable[str], outside: Outside | None = None) -> None:
        assert outside is not None, "a device's plan says where values rest"
        wanted = set(away)
        self._change_slots(outside)
        for name, home in outside.homes.items():
            if home == HOST and not self._is_on_host(name):
                self._to_host(name)
            elif home != HOST and name not in self._valid:
                self._to_file(name)
        for name in sorted(wanted - self._away):
            self.drop(name)
        for name in sorted(self._away - wanted):
            self._bring(name)

    def _change_slots(self, outside: Outside) -> None:
        """Let the host have the slots of a plan; what would lose its last copy thereby goes to the file."""
        host = self._moves.host
        kept = host.blocks & outside.blocks.keys()
        for name in sorted(self._on_host - kept):
            if name in self._away and name not in self._valid:
                self._to_file(name)
            self._on_host.discard(name)
        for name in self._host_parts.keys() - kept:
            del self._host_parts[name]
        host.free(host.blocks - kept)
        host.lay_out(outside.area, outside.most_bytes - outside.blocks_bytes)
        host.take(outside.blocks)

    def value(self, name: str) -> torch.Tensor:
        copy = self._blank(name)
        self._fetch(name, copy.untyped_storage())
        return copy

    def _blank(self, name: str) -> torch.Tensor:
        """Return a tensor of the host with a tensor's layout and memory for its value."""
        return over(torch.UntypedStorage(self.sizes[name]), self.tensors[name])

    def outline(self, name: str) -> torch.Tensor:
        tensor = self.tensors[name]
        return tensor if tensor.is_cpu else without_memory(tensor)

    def taken(self, name: str) -> torch.Tensor:
        if name not in self._given:
            self._given[name] = self.value(name)
        return self._given[name]

    def fill(self, name: str, writer: Callable[[torch.Tensor], object]) -> None:
        # As it is now, if there is a value yet: a view of it may be all that is written.
        known = name not in self._away or name in self._valid or self._is_on_host(name)
        value = self.value(name) if known else self._blank(name)
        writer(value)
        self.num_changes += 1
        source = bytes_of(value.untyped_storage())
        if name in self._sources and self._sources.holds(name, source.numpy().data):
            return
        self.changed((name,))
        if name not in self._away:
            self._content(name).copy_(source)
        elif name in self._moves.host.blocks:
            self._moves.host.bytes(name, self.sizes[name]).copy_(source)
            self._on_host.add(name)
        else:
            self._spill.write(name, value.untyped_storage()).wait()
            self._valid.add(name)

    def copy_to(self, name: str, target: int, offset: int) -> bool:
        if not super().copy_to(name, target, offset):
            storage = _apart(self.sizes[name])
            self._fetch(name, storage)
            write_all(target, bytes_of(storage).numpy().data, offset)
        return True

    def recover(self) -> None:
        self._spill.drain()
        for name, ticket in self._writes.items():
            if ticket.failed:
                (self._on_host if self._targets[name] else self._valid).discard(name)
                (self._host_parts if self._targets[name] else self._parts).pop(name, None)
        # What is written from here on has nothing to do with them.
        self._writes.clear()
        for name in sorted(self.sizes.keys() - self._away):
            there = name not in self._sources or self._sources.is_unchanged
            if self._is_on_host(name) or (name in self._valid and there):
                self._bring(name)

    def close(self) -> None:
        super().close()
        self._given.clear()
        self._moves.close()

    # ------------------------------------------------------------ through the host

    def _is_on_host(self, name: str) -> bool:
        return name in self._on_host and self._moves.host.has(name)

    def _is_kept(self, name: str) -> bool:
        return super()._is_kept(name) or self._is_on_host(name)

    def _content(self, name: str) -> torch.Tensor:
        return bytes_of(self.tensors[name].untyped_storage())

    def _fetch(self, name: str, storage: torch.UntypedStorage) -> None:
        """Fill a storage of the host with a value, wherever that is."""
        target = bytes_of(storage)
        with self._reading(name):
            self._fetch_from(name, storage, target)

    def _fetch_from(self, name: str, storage: torch.UntypedStorage, target: torch.Tensor) -> None:
        if name not in self._away:
            target.copy_(self._content(name))
        elif self._is_on_host(name):
            target.copy_(self._moves.host.bytes(name, self.sizes[name]))
        elif name in self._valid:
            self._spill.read(name, storage).wait()
        else:
            raise StorageError(f"the value of '{name}' is in no place; load a checkpoint")

    def _kept_bytes(self, name: str) -> torch.Tensor:
        """Return a value's bytes from a slot."""
        if self._is_on_host(name):
            return self._moves.host.bytes(name, self.sizes[name])
        storage = _apart(self.sizes[name])
        self._spill.read(name, storage).wait()
        return bytes_of(storage)

    def _to_host(self, name: str) -> None:
        in_memory = name not in self._away
        source = self._content(name) if in_memory else self._kept_bytes(name)
        self._moves.host.bytes(name, self.sizes[name]).copy_(source)
        self._moves.host.claim(name)
        self._on_host.add(name)

    def _to_file(self, name: str) -> None:
        storage = _apart(self.sizes[name])
        self._fetch(name, storage)
        self._spill.write(name, storage).wait()
        self._valid.add(name)

    def _bring(self, name: str) -> None:
        """Take the device's memory, unless it is there, and fill it from a slot."""
        self._require_kept(name)
        source = self._kept_bytes(name)
        self.tensors[name].untyped_storage().resize_(self.sizes[name])
        self._content(name).copy_(source)
        # Last: who is interrupted before brings it again.
        self._away.discard(name)


def _apart(size_bytes: int) -> torch.UntypedStorage:
    """Return memory that torch's allocator knows nothing of: it may be the one that stands for the device's."""
    return torch.from_numpy(np.empty(size_bytes, dtype=np.uint8)).untyped_storage()
