"""Slots in pinned memory of the host, for what leaves a device's memory: blocks, and an area shared over time.

What rests on the host between iterations has a block of its own. What is there for a part of an iteration has a
place in the area, which something else takes over once it is back for good.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gascompile.core.errors import StorageError
from gascompile.core.plan import Plan
from gascompile.core.sizes import PAGE_BYTES, SPILL_BUFFER_BYTES, align_up
from gascompile.core.steps import Offload, Reload, Wait
from gascompile.runtime.memory.pinned import HOST
from gascompile.runtime.memory.spill_slots import Slots, spill_slots

if TYPE_CHECKING:
    import torch

    from gascompile.runtime.protocols import Device, HostMemory

NUM_PIECES = 4
"""Of each direction of staged transfers: one at the drive, one at the link, one on either side: neither waits."""
STAGING_BYTES = 2 * NUM_PIECES * SPILL_BUFFER_BYTES
"""Pinned memory of both directions."""
HOST_BYTES = STAGING_BYTES + 2 * SPILL_BUFFER_BYTES
"""Of the host's memory, for what passes through it, whatever a plan brings there."""

FILE = "nvme"
"""The place that has a slot for everything that lasts."""


def in_files(steps: Sequence[Offload | Reload | Wait]) -> list[Offload | Reload | Wait]:
    """Return the moves of what is written to a file at some time."""
    written = {s.tensor for s in steps if isinstance(s, Offload) and HOST not in s.link.split("->")}
    return [step for step in steps if step.tensor in written]


def blocks_of(plan: Plan, persistent: Collection[str]) -> dict[str, int]:
    """Return the bytes of what rests on the host, by tensor; nothing where the host computes."""
    if plan.machine.compute_tier == HOST:
        return {}
    return {
        name: tensor.size_bytes
        for name, tensor in plan.tensors.items()
        if name in persistent and tensor.home == HOST
    }


def area_of(plan: Plan, blocks: Collection[str]) -> Slots:
    """Return where in the area each other tensor lies that is brought to the host for a while."""
    if plan.machine.compute_tier == HOST:
        return {}
    ends = {link.name: {link.source_tier, link.target_tier} for link in plan.machine.links}
    over_host = {
        step.tensor
        for step in plan.steps
        if isinstance(step, Offload) and HOST in ends[step.link] and step.tensor not in blocks
    }
    moves = [
        step
        for step in plan.steps
        if isinstance(step, (Offload, Reload, Wait)) and step.tensor in over_host
    ]
    return spill_slots(moves)


def area_bytes(slots: Slots) -> int:
    """Return the size of an area."""
    ends = (offset + align_up(size_bytes, PAGE_BYTES) for offset, size_bytes in slots.values())
    return max(ends, default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """Where the values of one plan are outside of its device's memory, at the end of an iteration."""

    homes: Mapping[str, str]
    """Tier whose slot holds the value of now, by tensor."""
    blocks: Mapping[str, int]
    """Bytes of what has a block."""
    area: Slots
    most_bytes: int
    """Of the host, for blocks and area."""

    @classmethod
    def of(cls, plan: Plan, persistent: Collection[str], *, taken_bytes: int) -> Outside:
        """Return it for a plan.

        Args:
            plan: for a device with memory of its own.
            persistent: what outlives iterations; the plan need not know all of it.
            taken_bytes: of the host's budget, by others.
        """
        site = plan.machine.compute_tier
        homes = {
            name: plan.tensors[name].home if name in plan.tensors else FILE for name in persistent
        }
        blocks = blocks_of(plan, persistent)
        return cls(
            homes={name: home for name, home in homes.items() if home != site},
            blocks=blocks,
            area=area_of(plan, blocks),
            most_bytes=plan.budget_bytes[HOST] - taken_bytes,
        )

    @property
    def blocks_bytes(self) -> int:
        """What blocks take, in whole pages."""
        return sum(align_up(max(size, 1), PAGE_BYTES) for size in self.blocks.values())

    @property
    def size_bytes(self) -> int:
        """What blocks and area take."""
        return self.blocks_bytes + area_bytes(self.area)


class HostSlots:
    """The slots of one device's host. Blocks and area are changed while nothing is under way."""

    def __init__(self, device: Device) -> None:
        """Take no memory yet."""
        self._device = device
        self._blocks: dict[str, HostMemory] = {}
        self._area: HostMemory | None = None
        self._slots: Slots = {}
        self._rivals: dict[str, tuple[str, ...]] = {}
        self._there: set[str] = set()

    @property
    def size_bytes(self) -> int:
        """Pinned memory of blocks and area."""
        blocks = sum(memory.size_bytes for memory in self._blocks.values())
        return blocks + (self._area.size_bytes if self._area is not None else 0)

    @property
    def blocks(self) -> frozenset[str]:
        """What has a block."""
        return frozenset(self._blocks)

    def free(self, names: Iterable[str]) -> None:
        """Give blocks back; their values go with them."""
        for name in names:
            memory = self._blocks.pop(name, None)
            if memory is not None:
                memory.close()

    def take(self, sizes: Mapping[str, int]) -> None:
        """Take the blocks that are missing, whole pages each.

        Raises:
            DeviceError: so much memory cannot be pinned.
        """
        for name, size_bytes in sizes.items():
            if name not in self._blocks:
                memory = self._device.pinned(align_up(max(size_bytes, 1), PAGE_BYTES))
                # Pages are taken now, not while something is copied to them.
                memory.fill(0, memory.size_bytes, 0)
                self._blocks[name] = memory

    def lay_out(self, slots: Slots, most_bytes: int) -> None:
        """Let the area have these slots; its values are lost.

        Args:
            slots: offset and size in bytes by tensor.
            most_bytes: an area that is larger than needed stays as it is up to this size.

        Raises:
            DeviceError: so much memory cannot be pinned.
        """
        needed_bytes = area_bytes(slots)
        held_bytes = self._area.size_bytes if self._area is not None else 0
        self._there.clear()
        self._slots, self._rivals = dict(slots), _rivals(slots)
        if needed_bytes <= held_bytes <= most_bytes:
            return
        if self._area is not None:
            area, self._area = self._area, None
            area.close()
        if needed_bytes:
            self._area = self._device.pinned(needed_bytes)
            self._area.fill(0, needed_bytes, 0)

    def bytes(self, name: str, size_bytes: int) -> torch.Tensor:
        """Return the first bytes of a slot.

        Raises:
            StorageError: it has fewer.
        """
        block = self._blocks.get(name)
        if block is not None:
            return block.bytes(0, size_bytes)
        offset, slot_bytes = self._slots[name]
        assert self._area is not None, "there are slots in it"
        if size_bytes > slot_bytes:
            raise StorageError(
                f"'{name}' has {size_bytes} bytes, its slot {slot_bytes}; plan for the larger input"
            )
        return self._area.bytes(offset, offset + size_bytes)

    def claim(self, name: str) -> None:
        """Take note that a slot is being written: what lay in its place is there no more."""
        if name not in self._blocks:
            self._there.difference_update(self._rivals.get(name, ()))
            self._there.add(name)

    def has(self, name: str) -> bool:
        """Return whether nothing else has been written over a slot since it was written last."""
        return name in self._blocks or name in self._there

    def close(self) -> None:
        """Give all memory back; idempotent."""
        self.free(tuple(self._blocks))
        if self._area is not None:
            self._area.close()
            self._area = None
        self._slots = {}
        self._there.clear()


def _rivals(slots: Slots) -> dict[str, tuple[str, ...]]:
    """Return for each tensor the others whose slots overlap its own."""
    spans = {
        name: (offset, offset + align_up(size_bytes, PAGE_BYTES))
        for name, (offset, size_bytes) in slots.items()
    }
    return {
        name: tuple(
            other
            for other, (low, high) in spans.items()
            if other != name and low < end and begin < high
        )
        for name, (begin, end) in spans.items()
    }
