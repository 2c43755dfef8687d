"""What a session reads with: the engine that the plan's machine names, one for each drive.

``kvikio`` reads straight to a device where GPUDirect Storage is active. Where it is not, KvikIO reads into the
session's own pinned memory and copy streams go on from there: left to itself it would pin memory of its own, which
no plan knows of. Tensors below the size from which that was measured to pay, single rows, and weights that stay in
the host's memory are read by aligned reads in any case.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from gascompile.core.machine import IoSettings
from gascompile.runtime.memory.arena import Arena
from gascompile.runtime.memory.shared_arena import SharedArena
from gascompile.runtime.memory.staging import Staging
from gascompile.runtime.transfer.engine import Engine
from gascompile.runtime.transfer.files import SourceFiles
from gascompile.runtime.transfer.routing import Router, by_drive, by_size, drive_of, share
from gascompile.runtime.transfer.shared_engine import SharedEngine

if TYPE_CHECKING:
    from gascompile.runtime.protocols import Device, Memory, Reader, Receive, TransferEngine

_log = logging.getLogger(__name__)

KVIKIO = "kvikio"


def open_engine(
    device: Device,
    arena: Memory,
    files: SourceFiles,
    io: IoSettings,
    stagings: list[Staging] | None = None,
    *,
    reader: Reader,
    pinned: list[Memory],
) -> TransferEngine:
    """Return the engine that reads ``files`` into ``arena``, through pinned memory where it needs any.

    Args:
        device: whose arena it is.
        arena: where tensors go.
        files: all files that will be read.
        io: which engine, with how many threads.
        stagings: where the slots are noted that aligned reads go through.
        reader: the low-level read of aligned reads.
        pinned: where memory is noted that has to be closed with the session.

    Raises:
        DeviceError: KvikIO is asked for and is not here, or memory cannot be pinned.
    """
    drives = {path: drive_of(number) for path, number in files.devices.items()}
    count = max(1, len(set(drives.values())))
    own = share(io, count)
    if not drives:
        # No memory is taken for reads that never come.
        return Engine(files, memoryview(b""), own, reader=reader)
    if device.is_host and isinstance(arena, Arena):
        memory = arena.memory
        engine = _each(count, drives, lambda: Engine(files, memory, own, reader=reader))
        return SharedEngine(engine, arena.ranks) if isinstance(arena, SharedArena) else engine
    if io.engine == KVIKIO:
        make = _with_kvikio(
            device, arena, files, io, own=own, count=count, reader=reader, pinned=pinned
        )
    else:
        staging = Staging(device, arena, io)
        pinned.append(staging.memory)
        if stagings is not None:
            stagings.append(staging)
        delivery = staging.delivery
        make = lambda: Engine(files, delivery, own, reader=reader)  # noqa: E731
    return _each(count, drives, make)


def _each(count: int, drives: dict[str, str], make: Callable[[], TransferEngine]) -> TransferEngine:
    return make() if count == 1 else Router([make() for _ in range(count)], by_drive(drives))


def _staging(device: Device, arena: Memory, io: IoSettings, pinned: list[Memory]) -> Receive:
    staging = Staging(device, arena, io)
    pinned.append(staging.memory)
    return staging.delivery


def _with_kvikio(
    device: Device,
    arena: Memory,
    files: SourceFiles,
    io: IoSettings,
    *,
    own: IoSettings,
    count: int,
    reader: Reader,
    pinned: list[Memory],
) -> Callable[[], TransferEngine]:
    """Return what makes the engine of one drive: KvikIO's, with aligned reads for the rest."""
    from gascompile.runtime.devices.probe import look
    from gascompile.runtime.transfer.kvikio_engine import KvikioEngine
    from gascompile.runtime.transfer.kvikio_path import import_kvikio, path_taken

    # Before any memory is pinned: it may not be here.
    kvikio, facts = import_kvikio(), look()
    taken = path_taken(kvikio, facts)
    if not taken.is_direct:
        _log.warning("reads to the GPU go through RAM, which is slower: %s", taken)
    stages = not taken.is_direct or io.least_bytes > 0
    delivery = _staging(device, arena, io, pinned) if stages else None

    def make() -> TransferEngine:
        small = Engine(files, delivery or memoryview(b""), own, reader=reader)
        large = KvikioEngine(
            arena,
            own,
            kvikio=kvikio,
            facts=facts,
            receive=None if taken.is_direct else delivery,
            races=device.races,
            num_engines=count,
        )
        return Router([small, large], by_size(io.least_bytes))

    return make
