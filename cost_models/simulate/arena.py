"""Arena: who owns which bytes of the block whose addresses a plan has fixed, while its steps are walked.

Residents have their bytes all the time, a staged copy from the start of its load to its release. No byte has two
owners; what is read has arrived and been waited for, once; a copy is clean, so that nothing in the arena is written.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import NoReturn

from gascompile.core.errors import PlanVerificationError
from gascompile.core.plan import Plan
from gascompile.core.sizes import reserve_bytes
from gascompile.core.steps import Prefetch, Release, Wait
from gascompile.core.workload import TensorKind


def refuse(message: str, step: int = -1) -> NoReturn:
    """Raise what a plan that cannot run as it claims is refused with."""
    raise PlanVerificationError(
        f"{message}; the plan is refused, make it again from its workload", step=step
    )


@dataclass(slots=True)
class _Copy:
    """Bytes of a weight in the arena or on their way there."""

    tensor: str
    begin: int
    end: int
    arrived: bool = False


@dataclass(slots=True)
class _Ranges:
    """Copies whose bytes do not overlap, by their first byte; what is empty is in nobody's way."""

    begins: list[int] = field(default_factory=list)
    copies: list[_Copy] = field(default_factory=list)

    def overlapping(self, begin: int, end: int) -> _Copy | None:
        """Return a copy that has some of the bytes; only the neighbours can."""
        k = bisect_left(self.begins, begin)
        for other in self.copies[max(k - 1, 0) : k + 1]:
            if other.begin < end and begin < other.end:
                return other
        return None

    def add(self, copy: _Copy) -> None:
        """Add a copy that overlaps none."""
        if copy.begin < copy.end:
            k = bisect_left(self.begins, copy.begin)
            self.begins.insert(k, copy.begin)
            self.copies.insert(k, copy)

    def remove(self, copy: _Copy) -> None:
        """Remove a copy that was added."""
        if copy.begin < copy.end:
            k = bisect_left(self.begins, copy.begin)
            del self.begins[k], self.copies[k]


@dataclass(slots=True)
class ArenaAccount:
    """The copies in a plan's arena. Whoever passes ``on_change`` hears of bytes that are taken and given back."""

    plan: Plan
    beside: Collection[str]
    """Tensors that lie outside of it."""
    on_change: Callable[[str, int], None]
    copies: dict[str, _Copy] = field(default_factory=dict)
    """One live copy per streamed weight."""
    residents: _Ranges = field(default_factory=_Ranges)
    staged: _Ranges = field(default_factory=_Ranges)
    """The bytes of ``copies``."""

    def place_residents(self) -> None:
        """Give the residents their bytes."""
        placed = sorted(
            (tensor.address, tensor.address + reserve_bytes(tensor.size_bytes), name)
            for name, tensor in self.plan.tensors.items()
            if tensor.address is not None
        )
        reached = 0
        for begin, end, name in placed:
            if begin < reached and end > begin:
                refuse(
                    f"resident '{name}' at {begin} overlaps the one below it, which ends at {reached}"
                )
            reached = max(reached, end)
            self.residents.add(_Copy(name, begin, end, True))
            self.on_change(name, end - begin)

    def move(self, i: int, step: Prefetch | Wait | Release) -> None:
        """Carry out a move of a streamed weight."""
        match step:
            case Prefetch():
                self._load(i, step)
            case Wait():
                copy = self._copy(i, step, "waits for")
                if copy.arrived:
                    refuse(f"step {i} waits for '{step.tensor}' a second time", i)
                copy.arrived = True
            case Release():
                copy = self._copy(i, step, "releases")
                if not copy.arrived:
                    refuse(f"step {i} releases '{step.tensor}' before it has arrived", i)
                self.staged.remove(self.copies.pop(step.tensor))
                self.on_change(step.tensor, copy.begin - copy.end)

    def need(self, i: int, op: int) -> None:
        """Refuse op ``op`` if a weight that it reads is not there."""
        spec, site = self.plan.workload.ops[op], self.plan.ops[op].site
        for name in (*spec.reads, *spec.writes):
            tensor = self.plan.tensors[name]
            if tensor.kind != TensorKind.WEIGHT or name in self.beside:
                continue
            if name in spec.writes:
                refuse(f"op '{spec.name}' writes '{name}', whose copy in the arena is clean", i)
            if site != self.plan.machine.compute_tier:
                if tensor.home != site:
                    refuse(f"op '{spec.name}' on '{site}' reads '{name}' of '{tensor.home}'", i)
                continue
            if tensor.address is None and (
                name not in self.copies or not self.copies[name].arrived
            ):
                refuse(
                    f"op '{spec.name}' needs '{name}', which no step has brought and waited for", i
                )

    def state(self) -> dict[str, tuple[int, bool]]:
        """Return where each copy begins and whether it has arrived."""
        return {name: (copy.begin, copy.arrived) for name, copy in self.copies.items()}

    def end(self) -> None:
        """Refuse an iteration that leaves more behind than loads on their way into the next one."""
        for copy in self.copies.values():
            if copy.arrived or not self.plan.workload.repeats:
                refuse(f"'{copy.tensor}' is not released by the end of the iteration that needs it")

    def _load(self, i: int, step: Prefetch) -> None:
        if step.tensor in self.copies:
            refuse(f"step {i} reads '{step.tensor}' again before its last copy is released", i)
        begin, end = step.address, step.address + reserve_bytes(step.size_bytes)
        other = self.residents.overlapping(begin, end) or self.staged.overlapping(begin, end)
        if other is not None:
            refuse(
                f"step {i} reads '{step.tensor}' to {begin}..{end}, where '{other.tensor}' "
                f"still has {other.begin}..{other.end}",
                i,
            )
        self.copies[step.tensor] = copy = _Copy(step.tensor, begin, end)
        self.staged.add(copy)
        self.on_change(step.tensor, end - begin)

    def _copy(self, i: int, step: Wait | Release, verb: str) -> _Copy:
        copy = self.copies.get(step.tensor)
        if copy is None or copy.begin != step.address:
            refuse(f"step {i} {verb} '{step.tensor}' at {step.address}, where it is not", i)
        return copy
