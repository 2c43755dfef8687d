"""Arena: who owns which bytes of the block whose addresses a plan has fixed, while its steps are walked.

Residents have their bytes all the time, a staged copy from the start of its load to its release. No byte has two
owners; what is read has arrived and been waited for, once; a copy is clean, so that nothing in the arena is written.
What waits half the way there is ``middle``'s.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from gascompile.core.plan import Plan
from gascompile.core.sizes import reserve_bytes
from gascompile.core.steps import Evict, Fetch, Prefetch, Release, Wait
from gascompile.core.workload import TensorKind
from gascompile.cost_models.simulate.byte_ranges import ByteRanges, Held, refuse
from gascompile.cost_models.simulate.middle import MiddleAccount


@dataclass(slots=True)
class _Copy(Held):
    """Bytes of a weight in the arena or on their way there."""

    arrived: bool = False


@dataclass(slots=True)
class ArenaAccount:
    """The copies in a plan's arenas. Whoever passes ``on_change`` hears of bytes that are taken and given back."""

    plan: Plan
    beside: Collection[str]
    """Tensors that lie outside of it."""
    on_change: Callable[[str, str, int], None]
    """Called with a place, a tensor and the bytes that it takes more."""
    copies: dict[str, _Copy] = field(default_factory=dict)
    """One live copy per streamed weight."""
    residents: ByteRanges = field(default_factory=ByteRanges)
    staged: ByteRanges = field(default_factory=ByteRanges)
    """The bytes of ``copies``."""
    middle: MiddleAccount = field(init=False)

    def __post_init__(self) -> None:
        self.middle = MiddleAccount(self.plan, self.on_change)

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
            self._tell(name, end - begin)

    def move(self, i: int, step: Fetch | Evict | Prefetch | Wait | Release) -> None:
        """Carry out a move of a streamed weight."""
        match step:
            case Fetch():
                self.middle.fetch(i, step)
            case Evict():
                self.middle.evict(i, step)
            case Prefetch():
                self._load(i, step)
                self.middle.push(i, step)
            case Wait():
                copy = self._copy(i, step, "waits for")
                if copy.arrived:
                    refuse(f"step {i} waits for '{step.tensor}' a second time", i)
                copy.arrived = True
                self.middle.wait(step)
            case Release():
                copy = self._copy(i, step, "releases")
                if not copy.arrived:
                    refuse(f"step {i} releases '{step.tensor}' before it has arrived", i)
                self.staged.remove(self.copies.pop(step.tensor))
                self._tell(step.tensor, copy.begin - copy.end)

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

    def state(self) -> dict[str, tuple[int | bool, ...]]:
        """Return where each copy begins and whether it has arrived; of those half the way, see there."""
        here = {name: (copy.begin, copy.arrived) for name, copy in self.copies.items()}
        return {**here, **self.middle.state()}

    def end(self) -> None:
        """Refuse an iteration that leaves more behind than loads on their way into the next one."""
        self.middle.end()
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
        self._tell(step.tensor, end - begin)

    def _tell(self, name: str, size_bytes: int) -> None:
        self.on_change(self.plan.machine.compute_tier, name, size_bytes)

    def _copy(self, i: int, step: Wait | Release, verb: str) -> _Copy:
        copy = self.copies.get(step.tensor)
        if copy is None or copy.begin != step.address:
            refuse(f"step {i} {verb} '{step.tensor}' at {step.address}, where it is not", i)
        return copy
