"""Slots in the spill file: an extent per tensor, which another takes over once the tensor is back for good."""

from __future__ import annotations

from collections.abc import Sequence

from gascompile.core.sizes import PAGE_BYTES, align_up
from gascompile.core.steps import Offload, Reload, Step, Wait

Slots = dict[str, tuple[int, int]]
"""Offset and size in bytes by tensor."""


def spill_slots(steps: Sequence[Step]) -> Slots:
    """Return where in the file each tensor that is offloaded lies, its extent free again after its last reload."""
    first, last = _spans(steps)
    sizes = {step.tensor: step.size_bytes for step in steps if isinstance(step, Offload)}
    slots: Slots = {}
    for name in sorted(sizes, key=lambda name: first[name]):
        taken = sorted(
            (offset, offset + align_up(size_bytes, PAGE_BYTES))
            for other, (offset, size_bytes) in slots.items()
            if last[other] > first[name]
        )
        start = 0
        for begin, end in taken:
            if start + align_up(sizes[name], PAGE_BYTES) <= begin:
                break
            start = max(start, end)
        slots[name] = (start, sizes[name])
    return slots


def _spans(steps: Sequence[Step]) -> tuple[dict[str, int], dict[str, int]]:
    """Return per tensor its first offload and the wait for its last reload; without one, the last step."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    reading: set[str] = set()
    for i, step in enumerate(steps):
        match step:
            case Offload():
                first.setdefault(step.tensor, i)
                last[step.tensor] = len(steps)
                reading.discard(step.tensor)
            case Reload():
                last[step.tensor] = len(steps)
                reading.add(step.tensor)
            case Wait() if step.tensor in reading:
                last[step.tensor] = i
            case _:
                pass
    return first, last
