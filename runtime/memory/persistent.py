"""Tensors that outlive iterations, each in memory, in a slot of a file, or both.

A tensor's storage gives its memory back while it is away, so that views of it stay valid and follow. A value that
nobody has changed yet may lie in a file of somebody else, which is read alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from gascompile.core.errors import StorageError
from gascompile.core.parts import Span, in_pages
from gascompile.core.sizes import PAGE_BYTES, align_up
from gascompile.runtime.memory.device_moves import DeviceMoves
from gascompile.runtime.memory.host_slots import Outside
from gascompile.runtime.memory.pages import Pages
from gascompile.runtime.memory.source_slots import SourceSlots
from gascompile.runtime.memory.spill import Spill, memoryview_of
from gascompile.runtime.memory.storages import over
from gascompile.runtime.protocols import Event, Ticket


class Persistent:
    """Parameters, moments and buffers of one training run. Not for several threads at once."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        zeros: Mapping[str, tuple[int, torch.dtype]],
        folder: Path,
        buffers: memoryview,
        pages: Pages | None = None,
        *,
        unread: Collection[str] = (),
        sources: SourceSlots | None = None,
        sizes: Mapping[str, int] | None = None,
        moves: DeviceMoves | None = None,
    ) -> None:
        """Take ``tensors`` over, as they are in memory, and room in a file for all but those of ``sources``.

        Args:
            zeros: elements and dtype of vectors that begin as zeros and away: they take no memory yet.
            pages: where their memory comes from once they have been away; else the heap.
            unread: those of ``tensors`` that have no values yet and begin away; ``put`` gives them some.
            sources: values of some of ``unread``, which are read where they lie; closed with this.
            sizes: bytes of the storages of ``tensors``, where these have no memory.
            moves: of the device whose memory they have; the host's, if ``None``.

        Raises:
            StorageError: the folder cannot be written to, or has too little space.
        """
        self.tensors = dict(tensors)
        self.sizes = dict(
            sizes or {name: t.untyped_storage().nbytes() for name, t in tensors.items()}
        )
        for name, (count, dtype) in zeros.items():
            self.sizes[name] = count * dtype.itemsize
            device = moves.device.torch_device if moves is not None else None
            self.tensors[name] = torch.empty(count, dtype=dtype, device=device)
            self.tensors[name].untyped_storage().resize_(0)
        for name in unread:
            self.tensors[name].untyped_storage().resize_(0)
        self._size_bytes = sum(self.sizes.values())
        self._sources = SourceSlots({}, ()) if sources is None else sources
        slots, offset = {}, 0
        for name, size_bytes in self.sizes.items():
            if name not in self._sources:
                slots[name] = (offset, size_bytes)
                offset += align_up(size_bytes, PAGE_BYTES)
        self._pages = pages
        if pages is not None:
            for tensor in self.tensors.values():
                pages.adopt(tensor.untyped_storage())
        try:
            self._spill = Spill(
                folder, slots, buffers, pages=pages, sources=self._sources, moves=moves
            )
        except BaseException:
            self._sources.close()
            raise
        self.path = self._spill.path
        # A file's space that was never written reads as zeros.
        self._away: set[str] = {*zeros, *unread}
        self._valid: set[str] = {*zeros, *(name for name in unread if name in self._sources)}
        """Whose slot holds the value of now."""
        self._coming: set[str] = set()
        """Read for somebody else, and not there yet."""
        self._parts: dict[str, list[Span]] = {}
        """In which pages alone a slot is older than memory, of those that are."""
        self._writes: dict[str, Ticket] = {}
        self.num_changes = 0
        """Grows whenever a value changes."""

    def is_away(self, name: str) -> bool:
        """Return whether the tensor has no memory."""
        return name in self._away

    def is_in_place(self, name: str) -> bool:
        """Return whether the tensor's value lies in a file of somebody else."""
        return name in self._sources

    @property
    def host_bytes(self) -> int:
        """Memory of the host that is taken for a device."""
        return 0

    @property
    def resident_bytes(self) -> int:
        """What is in memory."""
        if not self._away:
            return self._size_bytes
        return sum(size for name, size in self.sizes.items() if name not in self._away)

    def take_slots(self, names: Iterable[str]) -> None:
        """Take room for new values of those among ``names`` that are read where others keep them.

        Raises:
            StorageError: the drive has too little space.
        """
        for name in sorted(names):
            if name in self._sources:
                self._spill.take_slot(name, self.sizes[name])

    def require_sources(self) -> None:
        """Refuse files of values that were changed, replaced or removed; before a run.

        Raises:
            StorageError: names the file.
        """
        self._sources.require_there()

    def has_sources(self) -> bool:
        """Return whether no file of values was written to."""
        return self._sources.is_unchanged

    def require_read(self) -> None:
        """Refuse files of values that were written to while they were read; after a run.

        Raises:
            StorageError: names the file.
        """
        self._sources.require_unchanged()

    def changed(self, names: Iterable[str]) -> None:
        """Take note that the values in memory are, or will be, newer than the slots'.

        Raises:
            StorageError: the drive has too little space for one that was never written.
        """
        self._changed(tuple(names), self._forget_slots)

    def _changed(self, names: tuple[str, ...], forget: Callable[[tuple[str, ...]], None]) -> None:
        for name in names:
            if name in self._sources:
                self._spill.take_slot(name, self.sizes[name])
        self.num_changes += len(names)
        forget(names)
        for name in names:
            if name in self._sources:
                # Last: an interrupt before leaves a value in memory that is not taken for the file's.
                self._sources.leave(name)

    def _forget_slots(self, names: Iterable[str]) -> None:
        """Take note that slots are older than memory, nobody knows where."""
        names = tuple(names)
        self._valid.difference_update(names)
        for name in names:
            self._parts.pop(name, None)

    def patched(self, name: str, spans: Sequence[Span]) -> None:
        """Take note that a tensor's value in memory is, or will be, newer than its slot in these pages alone.

        Raises:
            StorageError: as for ``changed``.
        """
        known = [] if name in self._valid else self._parts.get(name)
        if known is None or name in self._sources:
            self.changed((name,))
            return
        self.num_changes += 1
        merged = in_pages([*known, *spans])
        # Before its parts are known anew: an interrupt in between leaves a slot that is taken for older all over.
        self._forget_slots((name,))
        self._parts[name] = merged

    def newer_bytes(self, name: str, link: str | None = None) -> int:  # noqa: ARG002
        """Return the bytes that a write of a tensor over ``link`` carries now."""
        if name in self._parts:
            return sum(end - begin for begin, end in self._parts[name])
        return self.sizes[name]

    def write(self, name: str, *, link: str | None = None, after: Event | None = None) -> Ticket:
        """Start copying a tensor to its slot, or what is newer of it; it must not change before the ticket is done.

        Args:
            name: of the tensor.
            link: what it goes over, and thereby which slot is meant, where there are several.
            after: the copy starts no earlier.
        """
        if name in self._sources:
            self.changed((name,))
        storage = self.tensors[name].untyped_storage()
        parts = self._parts.pop(name, None)
        ticket = self._spill.write(name, storage, link=link, after=after, parts=parts)
        self._writes[name] = ticket
        # Last: whatever interrupts this, a slot that was not written is not taken for the value.
        self._valid.add(name)
        return ticket

    def drop(self, name: str) -> None:
        """Give a tensor's memory back.

        Raises:
            StorageError: its slot does not hold its value.
        """
        self._require_kept(name)
        # Before: who is interrupted in between takes memory for it that it has.
        self._away.add(name)
        self.tensors[name].untyped_storage().resize_(0)

    def _require_kept(self, name: str) -> None:
        if not self._is_kept(name):
            raise StorageError(f"'{name}' would lose its value: it was not written before it left")

    def _is_kept(self, name: str) -> bool:
        return name in self._valid

    def read(self, name: str, *, link: str | None = None, after: Event | None = None) -> Ticket:
        """Take memory for a tensor and start reading it; see ``write``."""
        storage = self.tensors[name].untyped_storage()
        storage.resize_(self.sizes[name])
        ticket = self._spill.read(name, storage, link=link, after=after)
        # Last: who is interrupted before reads it again.
        self._away.discard(name)
        return ticket

    def write_out(self, names: Iterable[str]) -> None:
        """Bring the slots of tensors up to date; blocks."""
        for name in sorted(names):
            if name not in self._away and name not in self._valid:
                self.write(name).wait()

    def rest(self, away: Iterable[str], outside: Outside | None = None) -> None:  # noqa: ARG002
        """Bring about that exactly ``away`` are out of memory; blocks.

        Args:
            away: names.
            outside: where a device's values are then; of no meaning where the host computes.
        """
        wanted = set(away)
        for name in self.sizes:
            if name in wanted and name not in self._away:
                if name not in self._valid:
                    self.write(name).wait()
                self.drop(name)
        for name in sorted(self._away - wanted):
            self.read(name).wait()

    def value(self, name: str) -> torch.Tensor:
        """Return a copy of a tensor, wherever it is, and leave it there.

        Raises:
            StorageError: it cannot be read, or its file was written to.
        """
        tensor = self.tensors[name]
        with self._reading(name):
            if name not in self._away:
                return tensor.detach().clone()
            storage = torch.UntypedStorage(self.sizes[name])
            self._spill.read(name, storage).wait()
        return over(storage, tensor)

    @contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        """Refuse what was read from a file that was written to; that is also why a read of it may fail."""
        try:
            yield
        finally:
            if name in self._sources:
                self._sources.require_unchanged()

    def outline(self, name: str) -> torch.Tensor:
        """Return a tensor of the host with a tensor's layout, whose memory may be away."""
        return self.tensors[name]

    def taken(self, name: str) -> torch.Tensor:
        """Return a tensor in memory, for somebody else to own once this is closed.

        Raises:
            StorageError: it cannot be read; to be asked for again.
        """
        with self._reading(name):
            if name in self._away or name in self._coming:
                self._coming.add(name)
                self.read(name).wait()
                self._coming.discard(name)
        return self.tensors[name]

    def assign(self, name: str, value: torch.Tensor) -> None:
        """Give a tensor a new value, wherever it is."""
        self.fill(name, lambda tensor: tensor.copy_(value))

    def fill(self, name: str, writer: Callable[[torch.Tensor], object]) -> None:
        """Let ``writer`` write all of a tensor, which is in memory for that time; blocks.

        What a file of others holds already is not written again.

        Raises:
            StorageError: the slot cannot be written, or the drive has too little space for one.
        """
        away = name in self._away
        tensor = self.tensors[name]
        if away:
            tensor.untyped_storage().resize_(self.sizes[name])
        else:
            self._forget_slots((name,))
        writer(tensor)
        self.num_changes += 1
        if away:
            # Not before: who is interrupted while writing leaves the value of the slot.
            self._forget_slots((name,))
            self._away.discard(name)
        if name in self._sources:
            if self._sources.holds(name, memoryview_of(tensor.untyped_storage())):
                self._valid.add(name)
            else:
                self.changed((name,))
        if away:
            if name not in self._valid:
                self.write(name).wait()
            self.drop(name)

    def put(self, name: str, fill: Callable[[memoryview, int], None]) -> None:
        """Give a tensor that is away its first value, without memory for all of it; nothing may be under way.

        Args:
            fill: writes a part of the tensor's bytes, in its order of memory and from an offset on.

        Raises:
            StorageError: the file cannot be written.
        """
        self._spill.put(name, fill, self.sizes[name])
        self._valid.add(name)

    def places(self) -> dict[str, tuple[int, int]]:
        """Return the file and the offset of each tensor's slot."""
        return {
            name: self._sources.pieces(name)[0][:2]
            if name in self._sources
            else self._spill.place(name)
            for name in self.sizes
        }

    def copy_to(self, name: str, target: int, offset: int) -> bool:
        """Copy a tensor's bytes from its slot to an open file; False where only memory has its value.

        Raises:
            OSError: a file cannot be read or written.
            StorageError: the file of somebody else that has the value was written to.
        """
        if name not in self._valid:
            return False
        with self._reading(name):
            if name in self._sources:
                self._sources.copy_to(name, target, offset)
            else:
                self._spill.copy_to(name, target, offset, self.sizes[name])
        return True

    def drain(self) -> None:
        """Let what is under way end, whether it fails or not: no copy may end in memory that goes meanwhile."""
        self._spill.drain()

    def recover(self) -> None:
        """After a failed transfer: let the others end, and fetch again what a slot has and memory may not.

        Values in files that were written to stay lost, which who asks for one learns, until they get others.

        Raises:
            StorageError: the drive still fails.
        """
        self._spill.drain()
        self._forget_slots(n for n, ticket in self._writes.items() if ticket.failed)
        # What is written from here on has nothing to do with them.
        self._writes.clear()
        for name in sorted(self._valid - self._away):
            if name not in self._sources or self._sources.is_unchanged:
                self.read(name).wait()

    def close(self) -> None:
        """Give the file back, and the memory of all that nobody has taken."""
        self._spill.close()
        self._sources.close()
        self.tensors.clear()
        if self._pages is not None:
            self._pages.trim()
