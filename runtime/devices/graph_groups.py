"""Divides the steps of a run into groups that a graph can hold and those that run on the host between them.

A group ends where the host has to act: a wait, a prefetch, a read of rows. The release of a staged copy is nothing but
a note of the host's, so it is put off to the end of the group that it falls into.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gascompile.runtime.devices.graph_rules import ARRIVAL, RELEASE, VALUES
from gascompile.runtime.run.schedule import RunSchedule, RunStep

Value = Any


@dataclass(slots=True, kw_only=True)
class Group:
    """Steps that follow each other and can be one graph."""

    steps: list[RunStep] = field(default_factory=list)
    entries: list[int] = field(default_factory=list)
    """Slots that it reads and that a step between groups has written since any group read them."""
    exits: list[int] = field(default_factory=list)
    """Slots that it writes and that a step between groups reads, or the caller."""

    @property
    def launches(self) -> bool:
        """Whether there is anything to give to the device: views are taken once."""
        return any(step.trait.launches for step in self.steps)

    @property
    def num_ops(self) -> int:
        """How many of the plan's ops it computes."""
        return sum(step.trait.num_ops for step in self.steps)

    @property
    def frees(self) -> tuple[int, ...]:
        """Slots that nobody reads after it."""
        return tuple({slot for step in self.steps for slot in step.frees})

    @property
    def name(self) -> str:
        """Its first and last op, for messages."""
        names = [step.trait.name for step in self.steps if step.trait.name]
        return f"'{names[0]}' to '{names[-1]}'" if names else "copies of outputs"


def divide(
    schedule: RunSchedule, refused: Mapping[int, str], copying: Collection[int] = ()
) -> list[Group | RunStep]:
    """Return the steps of ``schedule`` after its first run, with those that a graph can hold in groups.

    Args:
        schedule: what runs op by op.
        refused: by their index, why steps that look as if a graph could hold them cannot be in one.
        copying: indices of steps that look like views and make copies, as ``contiguous`` may.
    """
    parts: list[Group | RunStep] = []
    group: Group | None = None
    put_off: list[RunStep] = []
    made_in: dict[int, Group] = {}
    outside: set[int] = set()
    unsteady: set[int] = set()
    for i, step in enumerate(schedule.steps):
        reads, reason = step.trait.reads, step.trait.host or refused.get(i, "")
        if reason == ARRIVAL:
            # The run before awaited it.
            continue
        if reason == RELEASE:
            (parts if group is None else put_off).append(step)
            continue
        if not unsteady.isdisjoint(reads):
            reason = VALUES
        if reason:
            parts += put_off
            put_off, group = [], None
            parts.append(step)
            _leave(reads, made_in)
            made_in.pop(step.result, None)
            outside.add(step.result)
            if reason == VALUES:
                unsteady.add(step.result)
            continue
        if group is None:
            group = Group()
            parts.append(group)
        group.entries += [slot for slot in dict.fromkeys(reads) if slot in outside]
        # From now on they lie where graphs find them.
        outside.difference_update((*reads, step.result))
        group.steps.append(_launching(step) if i in copying else step)
        made_in[step.result] = group
    _leave(schedule.outputs, made_in)
    return [*parts, *put_off]


def _launching(step: RunStep) -> RunStep:
    return step._replace(trait=step.trait._replace(launches=True))


def more_bytes(parts: Sequence[Group | RunStep], sizes: Mapping[int, int]) -> int:
    """Return about the most that graphs of ``parts`` take beside what their steps take op by op.

    What steps between groups make is copied, what they and the caller read stays, and what a group is the last to read
    stays until it is captured.

    Args:
        parts: of ``divide``.
        sizes: bytes of what steps made, by slot.
    """
    groups = [part for part in parts if isinstance(part, Group)]
    copied_bytes = sum(sizes.get(slot, 0) for group in groups for slot in group.entries)
    kept_bytes = sum(sizes.get(slot, 0) for group in groups for slot in group.exits)
    longer = [
        sum(sizes.get(slot, 0) for slot in {*group.frees} - {step.result for step in group.steps})
        for group in groups
    ]
    return 2 * copied_bytes + kept_bytes + max(longer, default=0)


def pool_bytes(parts: Sequence[Group | RunStep], sizes: Mapping[int, int]) -> int:
    """Return the most that graphs of ``parts`` take for what their steps make, by ``sizes`` of results by slot."""
    alive: dict[int, int] = {}
    peak_bytes = 0
    for group in (part for part in parts if isinstance(part, Group)):
        for step in group.steps:
            alive[step.result] = sizes.get(step.result, 0)
            peak_bytes = max(peak_bytes, sum(alive.values()))
            for slot in step.frees:
                if slot not in group.exits:
                    alive.pop(slot, None)
    return peak_bytes


def _leave(slots: Sequence[int], made_in: Mapping[int, Group]) -> None:
    for slot in slots:
        group = made_in.get(slot)
        if group is not None and slot not in group.exits:
            group.exits.append(slot)


def interpret(steps: Sequence[RunStep], values: list[Value]) -> None:
    """Run steps one by one; an error says in which op it arose."""
    name = ""
    try:
        for function, gather, result, _, frees, _, trait, *_ in steps:
            name = trait.name
            values[result] = function(*gather(values))
            for slot in frees:
                values[slot] = None
    except BaseException as error:
        if name:
            error.add_note(f"in op '{name}'")
        raise
