"""What a session is made of and gives back, also when nobody has closed it.

Each part can be closed again: who is interrupted closes the session once more, and it goes on where it was.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from gascompile.core.own_work import OwnWork
from gascompile.runtime.memory.device_states import DeviceStates
from gascompile.runtime.memory.lasting import TakenStates
from gascompile.runtime.protocols import Device, Memory, TransferEngine
from gascompile.runtime.run.lane import Lane
from gascompile.runtime.transfer.files import SourceFiles
from gascompile.runtime.transfer.heap_moves import HeapMoves


@dataclass(slots=True)
class RunParts:
    """They know nothing of the session, so that one that is dropped is shut down, too."""

    kept: DeviceStates
    engine: TransferEngine
    files: SourceFiles
    device: Device
    memories: list[Memory]
    pinned: list[Memory]
    taken: TakenStates | None = None
    """What was the caller's before."""
    heaps: list[HeapMoves] = field(default_factory=list)
    lanes: list[Lane] = field(default_factory=list)
    """Of the run at hand: what computes beside the device."""

    keeper: OwnWork | None = None
    """What closes them where an interrupt would lose something: what was the caller's."""

    def close(self) -> None:
        """Stop the threads, close the files and give the memory back."""
        if self.keeper is not None:
            self.keeper.do(self.close_here, is_last=True)
        else:
            self.close_here()

    def close_here(self) -> None:
        """Do what ``close`` does, on this thread."""
        for heap in self.heaps:
            heap.close()
        self.heaps.clear()
        self.end_lanes(self.engine.close)
        self.files.close()
        if self.taken is not None:
            self.taken.close()
        try:
            self.kept.close()
        finally:
            self.device.close()
        for memory in (*self.memories, *self.pinned):
            memory.close()
        self.memories.clear()
        self.pinned.clear()

    def unpin(self, memory: Memory) -> None:
        """Give pinned memory back that nothing is copied from or to any more."""
        self.pinned[:] = [each for each in self.pinned if each is not memory]
        memory.close()

    def end_lanes(self, let_go: Callable[[], None]) -> None:
        """Let what computes beside the device end, with ``let_go``, which ends what it may be waiting for."""
        for lane in self.lanes:
            lane.cancel()
        let_go()
        for lane in self.lanes:
            lane.join()
        self.lanes.clear()
