"""The seams of the runtime: what an engine, a ticket and a low-level read must do.

Another backend (pinned staging and copy streams, GPUDirect) stands behind the same protocols.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Protocol

from gascompile.runtime.landing import Landing


class Reader(Protocol):
    """A positional read; raises ``OSError`` and may deliver fewer bytes than there is room for."""

    def __call__(self, descriptor: int, into: memoryview, offset: int, /) -> int: ...


class Ticket(Protocol):
    """A transfer under way."""

    @property
    def done(self) -> bool:
        """Whether ``wait`` returns or raises without blocking."""
        ...

    @property
    def failed(self) -> bool:
        """Whether the transfer ended without all its bytes."""
        ...

    def wait(self) -> None:
        """Block until all bytes are in place; raises ``StorageError`` when they cannot be."""
        ...


class TransferEngine(Protocol):
    """Moves tensors into a fixed memory, by priority, without blocking the caller."""

    @property
    def paths(self) -> Mapping[str, str]:
        """The I/O path really taken so far, per link."""
        ...

    def submit(
        self,
        landing: Landing,
        address: int,
        *,
        key: int,
        link: str,
        memory: memoryview | None = None,
        on_done: Callable[[], None] | None = None,
    ) -> Ticket:
        """Queue a tensor for the reservation at ``address``; the smallest ``key`` is served first.

        Args:
            memory: where it goes if not into the engine's own memory.
        """
        ...

    def drain(self) -> None:
        """Cancel what is queued and block until nothing writes to the memory any more."""
        ...

    def close(self) -> None:
        """Drain and stop; idempotent."""
        ...


def read_at(descriptor: int, into: memoryview, offset: int, /) -> int:
    """Read with one ``preadv``, which releases the GIL while the kernel copies."""
    return os.preadv(descriptor, [into], offset)
