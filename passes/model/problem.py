"""The planning problem in the planner's own terms, and a decision about it.

A *weight* is read by at least one op. Between two of its uses lies an *interval*: number ``j`` goes from
use ``j`` to the next one, the last to the first use of the following iteration. A *placement* says for
every weight whether it is resident or over which link it is streamed, and which intervals a streamed
weight stays in the arena for. A *staged copy* is a streamed weight in the arena, from its
prefetch to the last of the uses that it stays for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gascompile.core.budget import Budget
from gascompile.core.errors import UnsupportedOpError
from gascompile.core.machine import Link, Machine
from gascompile.core.sizes import reserve_bytes
from gascompile.core.workload import Workload
from gascompile.cost_models.formulas.gathers import gathered
from gascompile.cost_models.simulate.clock import pipe_times
from gascompile.cost_models.simulate.events import running_sums
from gascompile.passes.model.liveness import Liveness, liveness


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight that ops read."""

    name: str
    size_bytes: int
    reserved_bytes: int
    """What it takes in the arena."""
    uses: tuple[int, ...]
    """Ops that read it, ascending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A workload on a machine within a budget."""

    workload: Workload
    machine: Machine
    live: Liveness
    weights: tuple[Weight, ...]
    """In the order of their first use."""
    unread_homes: dict[str, str]
    """Slow tier of each weight that no op reads."""
    links: tuple[Link, ...]
    """Links into the compute tier, fastest first."""
    op_times_s: tuple[float, ...]
    sums_s: tuple[float, ...]
    """Running sums of ``op_times_s``."""
    limits_bytes: dict[str, int]
    """Budget per tier."""
    room_bytes: dict[str, int]
    """What each slow tier can hold besides ``unread_homes``."""
    reserved_bytes: int
    """Bytes of the compute tier that must stay free."""
    _transfers_s: dict[int, tuple[float, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """By link what ``transfers_s`` has returned: searches ask hundreds of times."""

    @property
    def base_bytes(self) -> int:
        """What the compute tier holds besides the arena."""
        return self.live.state_bytes + self.live.peak_bytes + self.reserved_bytes

    @property
    def arena_limit_bytes(self) -> int:
        """The largest arena that the budget allows; negative where not even the rest fits."""
        return self.limits_bytes[self.machine.compute_tier] - self.base_bytes

    @property
    def repeats(self) -> bool:
        """Whether iterations follow each other."""
        return self.workload.repeats

    @property
    def compute_s(self) -> float:
        """Seconds of all ops."""
        return self.sums_s[-1]

    @property
    def streaming_s(self) -> float:
        """Seconds of reading every weight once over the link that is fastest for it; 0 without any link."""
        of_links = (self.transfers_s(link) for link in range(len(self.links)))
        return sum(map(min, zip(*of_links, strict=True)), 0.0)

    def transfers_s(self, link: int) -> tuple[float, ...]:
        """Seconds that loading each weight occupies a link."""
        if link not in self._transfers_s:
            transfer_s = self.links[link].transfer_time_s
            self._transfers_s[link] = tuple(transfer_s(w.size_bytes) for w in self.weights)
        return self._transfers_s[link]

    def transfer_s(self, weight: int, link: int) -> float:
        """Seconds that loading a weight occupies a link."""
        return self.transfers_s(link)[weight]

    def pipes(self, weight: int, link: int) -> tuple[tuple[int, float], ...]:
        """Return ``(pipe index, seconds)`` of loading a weight over a link."""
        return pipe_times(self.machine, self.links[link], self.weights[weight].size_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A decision: where each weight lives and which intervals it stays for."""

    strategy: str
    link_of: tuple[int | None, ...]
    """Per weight the index of the link it is streamed over; ``None`` when it is resident."""
    kept: frozenset[tuple[int, int]] = frozenset()
    """``(weight, interval)`` of streamed weights that stay in the arena over the interval.

    Never their last one: no staged copy crosses the end of an iteration, where each op waits anew.
    """

    @property
    def streamed(self) -> tuple[int, ...]:
        """Indices of the streamed weights."""
        return tuple(i for i, link in enumerate(self.link_of) if link is not None)


@dataclass(frozen=True, slots=True)
class StagedCopy:
    """A streamed weight in the arena, for one use or for several that follow each other."""

    weight: int
    link: int
    start: int
    """Op of the first use."""
    end: int
    """Op of the last use."""
    reserved_bytes: int


def problem(
    workload: Workload, machine: Machine, budget: Budget, *, reserved_bytes: int = 0
) -> Problem:
    """Return the planning problem.

    Raises:
        UnsupportedOpError: an op has no time on the tier that computes.
        ValueError: an op names a tensor that does not exist.
    """
    live = liveness(workload)
    site = machine.compute_tier
    for op in workload.ops:
        if site not in op.time_s:
            known = ", ".join(sorted(op.time_s)) or "none"
            raise UnsupportedOpError(
                f"op '{op.name}' has no time for tier '{site}' of machine '{machine.name}' (it has: {known}); "
                f"annotate the workload for this machine"
            )
    sizes = {tensor.name: tensor.size_bytes for tensor in workload.tensors}
    links = tuple(link for link in machine.links_into(site) if link.source_tier in machine.tiers)
    limits = budget.limits_bytes(machine)
    room = {link.source_tier: limits[link.source_tier] for link in links}
    tiers = {name: op.gather_tier for op in workload.ops for name in gathered(op)}
    idle = _unread_homes(
        [(n, sizes[n]) for n, uses in live.weight_uses.items() if not uses], room, tiers
    )
    weights = [
        Weight(name, sizes[name], reserve_bytes(sizes[name]), uses)
        for name, uses in live.weight_uses.items()
        if name not in idle
    ]
    op_times_s = tuple(op.time_s[site] for op in workload.ops)
    return Problem(
        workload=workload,
        machine=machine,
        live=live,
        weights=tuple(sorted(weights, key=lambda weight: weight.uses[:1])),
        unread_homes=idle,
        links=links,
        op_times_s=op_times_s,
        sums_s=tuple(running_sums(op_times_s)),
        limits_bytes=limits,
        room_bytes=room,
        reserved_bytes=reserved_bytes,
    )


def _unread_homes(
    idle: Sequence[tuple[str, int]], room: dict[str, int], tiers: Mapping[str, str]
) -> dict[str, str]:
    """Return a slow tier for each idle weight, that of ``tiers`` where it names one, and take its bytes from ``room``.

    A weight that fits nowhere is left out: it is then placed like one that ops read.
    """
    homes: dict[str, str] = {}
    # Those that must lie somewhere come first.
    for name, size_bytes in sorted(idle, key=lambda each: not tiers.get(each[0])):
        tier = tiers.get(name) or max(room, key=lambda tier: room[tier], default=None)
        if tier is not None and room.get(tier, 0) >= size_bytes:
            homes[name] = tier
            room[tier] -= size_bytes
    return homes


def copies_s(problem: Problem, copies: Sequence[StagedCopy]) -> list[float]:
    """Return the seconds that each copy occupies its link."""
    transfers_s = [problem.transfers_s(link) for link in range(len(problem.links))]
    return [transfers_s[copy.link][copy.weight] for copy in copies]


def staged_copies(problem: Problem, placement: Placement) -> list[StagedCopy]:
    """Return the staged copies of the streamed weights, in the order of their first use."""
    copies: list[StagedCopy] = []
    for i in placement.streamed:
        link = placement.link_of[i]
        assert link is not None
        copies.extend(_copies_of_weight(problem, placement, i, link))
    return sorted(copies, key=lambda copy: (copy.start, copy.weight))


def _copies_of_weight(
    problem: Problem, placement: Placement, i: int, link: int
) -> Iterable[StagedCopy]:
    weight = problem.weights[i]
    start = 0
    for j, op in enumerate(weight.uses):
        if j + 1 == len(weight.uses) or (i, j) not in placement.kept:
            yield StagedCopy(i, link, weight.uses[start], op, weight.reserved_bytes)
            start = j + 1


def slot_seconds(problem: Problem, readers: Sequence[int]) -> list[float]:
    """Return the compute of each slot around ``readers``: gap, op, gap, op, ..., gap."""
    seconds: list[float] = []
    reached = 0
    for op in readers:
        seconds += [problem.sums_s[op] - problem.sums_s[reached], problem.op_times_s[op]]
        reached = op + 1
    return [*seconds, problem.sums_s[-1] - problem.sums_s[reached]]
