"""Several engines as one: a queue for each drive, and for each size of tensor the engine that is faster.

A drive that is slow, or asked for much at once, must not keep the threads that another could be read with. So
the files of one checkpoint may lie on any number of drives, and all of them are read at the same time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gascompile.core.machine import IoSettings
from gascompile.runtime.transfer.read_plan import Landing

if TYPE_CHECKING:
    from gascompile.runtime.protocols import Event, Receive, Ticket, TransferEngine

Route = Callable[[Landing, bool], int]
"""Returns which engine reads a tensor, and is told whether it goes to the engine's own memory, not the host's."""


class Router:
    """A ``TransferEngine`` that leaves each request to one of several."""

    def __init__(self, engines: Sequence[TransferEngine], route: Route) -> None:
        """Own ``engines``; ``route`` names one by its index."""
        self._engines = tuple(engines)
        self._route = route

    @property
    def paths(self) -> Mapping[str, str]:
        """The paths really taken so far, per link, of all engines together."""
        taken: dict[str, set[str]] = {}
        for engine in self._engines:
            for link, names in engine.paths.items():
                taken.setdefault(link, set()).update(names.split(" + "))
        return {link: " + ".join(sorted(names)) for link, names in taken.items()}

    def submit(
        self,
        landing: Landing,
        address: int,
        *,
        key: int,
        link: str,
        memory: memoryview | Receive | None = None,
        on_done: Callable[[], None] | None = None,
        after: Event | None = None,
    ) -> Ticket:
        """Queue a tensor with its engine; see ``TransferEngine.submit``."""
        engine = self._engines[self._route(landing, memory is None)]
        return engine.submit(
            landing, address, key=key, link=link, memory=memory, on_done=on_done, after=after
        )

    def drain(self) -> None:
        """Drain every engine."""
        for engine in self._engines:
            engine.drain()

    def close(self) -> None:
        """Close every engine; idempotent."""
        for engine in self._engines:
            engine.close()


def by_drive(drives: Mapping[str, str]) -> Route:
    """Return the route to one engine per drive, in the order in which ``drives``, by path, names them first.

    A tensor whose extents lie on several drives is read by the engine of the first.
    """
    order = {drive: i for i, drive in enumerate(dict.fromkeys(drives.values()))}
    numbers = {path: order[drive] for path, drive in drives.items()}
    return lambda landing, _: numbers[landing.pieces[0].path] if landing.pieces else 0


def by_size(least_bytes: int) -> Route:
    """Return the route to the second engine for what is worth it, to the first for small tensors and the host's."""
    return lambda landing, is_own: int(is_own and landing.size_bytes >= least_bytes)


def share(io: IoSettings, num_drives: int) -> IoSettings:
    """Return the settings for the engine of one of several drives.

    A staging buffer has two slots for each thread of ``io``. Unless there are more drives than slots, all of
    them together have at most as many threads, so that none can hold every slot and keep the others waiting.
    """
    if num_drives <= 1:
        return io
    return replace(io, num_threads=max(1, 2 * io.num_threads // num_drives))


def drive_of(device: int, *, system: Path = Path("/sys/dev/block")) -> str:
    """Return the drive that a file's ``st_dev`` is on: partitions of one are one drive.

    Args:
        device: of the file's status.
        system: where the kernel lists block devices by number.
    """
    entry = system / f"{os.major(device)}:{os.minor(device)}"
    try:
        place = entry.resolve(strict=True)
        return str(place.parent if (place / "partition").exists() else place)
    except OSError:
        return str(
            device
        )  # file systems over the network or over others have a number and no drive
