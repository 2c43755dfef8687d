"""An arena that the ranks of a host share: one copy of the weights, which each rank has mapped."""

from __future__ import annotations

import mmap

from gascompile.core.errors import UnsupportedOpError
from gascompile.runtime.collectives.local_ranks import LocalRanks
from gascompile.runtime.devices.cpu import CpuDevice
from gascompile.runtime.memory.arena import Arena
from gascompile.runtime.memory.early_memory import EarlyMemory


class SharedArena(Arena):
    """Memory of an exact size that all local ranks open at once and read weights into together."""

    def __init__(self, size_bytes: int, ranks: LocalRanks) -> None:
        """Map it; raises ``RankError`` where a rank cannot."""
        super().__init__(size_bytes, ranks.memory(max(size_bytes, 1)))
        self.ranks, self._number, self._is_closed = ranks, ranks.num_memories, False

    def fill(self, start: int, stop: int, value: int) -> None:
        """Refuse to write what others read."""
        raise UnsupportedOpError(
            f"bytes {start} to {stop} of an arena that several ranks read cannot be set to {value}: paranoid runs are "
            "of one rank; compile with mesh=False for them"
        )

    def close(self) -> None:
        """Give the memory back; the last rank frees it, also where a view survives. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._map.madvise(mmap.MADV_DONTNEED)
        if self.ranks.drop_memory(self._number):
            self._map.madvise(mmap.MADV_REMOVE)


class SharedCpu(CpuDevice):
    """The processor as the device of one of several ranks of a host."""

    def __init__(self, ranks: LocalRanks) -> None:
        """Compute beside ``ranks``."""
        self.ranks = ranks

    def arena(self, size_bytes: int, early: EarlyMemory | None = None) -> SharedArena:
        if early is not None:
            early.discard()
        return SharedArena(size_bytes, self.ranks)
