"""The seams of heap tensors that move: who holds those that outlive runs, and who moves what ops make."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

from gascompile.core.parts import Span
from gascompile.runtime.protocols import Event, Ticket

if TYPE_CHECKING:
    from gascompile.runtime.memory.host_slots import Outside


class Moves(Protocol):
    """What copies the memory of heap tensors out of the computing tier and back: of activations."""

    @property
    def path(self) -> str:
        """The I/O path that the bytes take."""
        ...

    def write(
        self,
        name: str,
        storage: torch.UntypedStorage,
        *,
        link: str | None = None,
        after: Event | None = None,
    ) -> Ticket:
        """Start copying a storage out once compute has reached ``after``; it must not change before that has ended."""
        ...

    def read(
        self,
        name: str,
        storage: torch.UntypedStorage,
        *,
        link: str | None = None,
        after: Event | None = None,
    ) -> Ticket:
        """Start filling a storage that has its memory again, once compute has reached ``after``."""
        ...

    def drain(self) -> None:
        """Let what is under way end, whether it fails or not."""
        ...

    def close(self) -> None:
        """Finish what is under way and give all back; idempotent."""
        ...


class Store(Protocol):
    """Holder of heap tensors that outlive runs, each in the computing tier's memory, outside, or both."""

    path: str
    num_changes: int
    """Grows whenever a value changes."""
    tensors: dict[str, torch.Tensor]
    """They stay the same objects; those that are away have no memory."""
    sizes: dict[str, int]

    @property
    def resident_bytes(self) -> int:
        """What is in memory."""
        ...

    @property
    def host_bytes(self) -> int:
        """Memory of the host that is taken for a device."""
        ...

    def is_away(self, name: str) -> bool:
        """Return whether a tensor has no memory."""
        ...

    def changed(self, names: Iterable[str]) -> None:
        """Take note that the values in memory are newer than what is outside."""
        ...

    def patched(self, name: str, spans: Sequence[Span]) -> None:
        """Take note that the value in memory is newer than what is outside, in these pages alone."""
        ...

    def newer_bytes(self, name: str, link: str | None = None) -> int:
        """Return the bytes that a write over a link would carry now."""
        ...

    def write(self, name: str, *, link: str | None = None, after: Event | None = None) -> Ticket:
        """Start copying a tensor out, or what is newer of it."""
        ...

    def read(self, name: str, *, link: str | None = None, after: Event | None = None) -> Ticket:
        """Take memory for a tensor and start copying it back."""
        ...

    def drop(self, name: str) -> None:
        """Give a tensor's memory back."""
        ...

    def write_out(self, names: Iterable[str]) -> None:
        """Bring what is outside up to date; blocks."""
        ...

    def drain(self) -> None:
        """Let what is under way end, whether it fails or not."""
        ...

    def rest(self, away: Iterable[str], outside: Outside | None = None) -> None:
        """Bring about that exactly ``away`` are out of memory, a device's values where ``outside`` says; blocks."""
        ...


@runtime_checkable
class HostStore(Store, Protocol):
    """One of a device, which has slots on the host that ops there may use."""

    def slot(self, name: str, size_bytes: int) -> torch.Tensor:
        """Return bytes of the host where something goes for a part of a run."""
        ...

    def claim(self, name: str) -> None:
        """Take note that a slot of the host is being written: what shared its place is there no more."""
        ...

    def at_home(self, name: str) -> torch.Tensor:
        """Return a tensor as it lies in its slot of the host, where ops of the host change it."""
        ...

    def changed_at_home(self, names: Iterable[str]) -> None:
        """Take note that values in slots of the host are, or will be, newer than all others; from any thread."""
        ...
