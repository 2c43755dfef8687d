"""Interval problem: a workload as tensors with inactive intervals, and what a machine offers to fill them.

A *run* is one execution of an op: each op once, and again wherever it is recomputed. Between two runs that
access a tensor lies an interval in which the tensor may stay, leave over a slow tier, or be dropped and
recomputed. Everything is numbered: tensors, tiers, runs and intervals are indices into tuples.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from gascompile.core.errors import UnsupportedOpError
from gascompile.core.machine import Link, Machine
from gascompile.core.workload import PERSISTENT, TensorKind, TensorSpec, Workload
from gascompile.cost_models.simulate.clock import Pipes, pipe_times

_SMALL_PART = 128
"""Of the limit: what may be kept in its place because it is small."""


@dataclass(frozen=True, slots=True)
class Route:
    """A slow tier that tensors can be fetched from, and brought to where there is a link out."""

    tier: str
    room_bytes: int
    link_in: int
    """Index into ``machine.links`` of the link to the compute tier."""
    link_out: int | None


@dataclass(frozen=True, slots=True)
class IntervalProblem:
    """The task in numbers."""

    workload: Workload
    machine: Machine
    limit_bytes: int
    """What the compute tier may hold, less what is reserved."""
    routes: tuple[Route, ...]
    """Fastest link in first."""
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    changed_bytes: tuple[int, ...]
    """What an iteration changes of each at most: what is written out of one whose older value lies outside."""
    persistent: tuple[bool, ...]
    written: tuple[bool, ...]
    """Whether any op writes the tensor; a persistent one that none writes is clean for ever."""
    stays_to_end: tuple[bool, ...]
    op_times_s: tuple[float, ...]
    reads: tuple[tuple[int, ...], ...]
    """Tensors that each op reads and does not write; the caller's inputs are left out."""
    writes: tuple[tuple[int, ...], ...]
    recompute: bool
    """Whether ops may run again."""
    repeatable: Mapping[int, int]
    """Activations that can be recomputed, with the op that writes them; it makes all its results anew."""
    writers: Mapping[int, tuple[int, ...]]
    op_s_per_byte: float = 0.0
    """Processors' time that moving a byte takes from ops."""
    fixed: frozenset[int] = frozenset()
    """Tensors that never leave."""
    views_s: tuple[float, ...] = ()
    """What views take of the time of each op that they were joined to; empty where none were."""
    _transfers: dict[tuple[int, int, bool], tuple[int, float, Pipes]] = field(
        init=False, default_factory=dict, repr=False, compare=False
    )
    """What was asked for before: a search asks for the same thousands of times."""

    def iteration_s(self, seconds: float, *, ops_s: float, moved_bytes: int) -> float:
        """Return the seconds of an iteration whose processors also have to move ``moved_bytes``."""
        return max(seconds, ops_s + moved_bytes * self.op_s_per_byte)

    @property
    def compute_s(self) -> float:
        """Seconds of all ops, each run once."""
        return sum(self.op_times_s)

    @property
    def fill_s(self) -> float:
        """Seconds that the slowest link takes to fill the memory; 0 without links."""
        rates = [self.machine.links[route.link_in].bandwidth_bytes_per_s for route in self.routes]
        return self.limit_bytes / min(rates) if rates else 0.0

    def transfer(self, tensor: int, route: int, *, out: bool) -> tuple[int, float, Pipes]:
        """Return the link that ``tensor`` takes, for how many seconds, and what that takes of pipes."""
        key = (tensor, route, out)
        if (known := self._transfers.get(key)) is not None:
            return known
        way = self.routes[route]
        number = way.link_out if out else way.link_in
        assert number is not None, "dirty tensors only take routes with a way out"
        sizes = self.changed_bytes if out else self.sizes
        link, size = self.machine.links[number], sizes[tensor]
        transfer = number, link.transfer_time_s(size), pipe_times(self.machine, link, size)
        self._transfers[key] = transfer
        return transfer

    def load_s(self, tensor: int, route: int) -> float:
        """Seconds that the link into the compute tier is busy with ``tensor``."""
        known = self._transfers.get((tensor, route, False))
        return (known or self.transfer(tensor, route, out=False))[1]

    def store_s(self, tensor: int, route: int) -> float:
        """Seconds that the link out of the compute tier is busy with ``tensor``."""
        known = self._transfers.get((tensor, route, True))
        return (known or self.transfer(tensor, route, out=True))[1]

    def without_views(self) -> IntervalProblem:
        """Return the task with views that take no time: no list of moves is slower for it, not even between them."""
        if not any(self.views_s):
            return self
        times = zip(self.op_times_s, self.views_s, strict=True)
        return replace(self, op_times_s=tuple(time_s - views_s for time_s, views_s in times))

    def link_out(self, route: int) -> Link:
        """Return the link to the route's tier; there must be one."""
        number = self.routes[route].link_out
        assert number is not None, "dirty tensors only take routes with a way out"
        return self.machine.links[number]

    def can_take(self, tensor: int, route: int) -> bool:
        """Whether a copy of ``tensor`` can come to be on the route's tier."""
        if tensor in self.fixed:
            return False
        clean = self.persistent[tensor] and not self.written[tensor]
        return clean or self.routes[route].link_out is not None

    @property
    def has_patches(self) -> bool:
        """Whether less is written out of a tensor than comes back."""
        return self.changed_bytes != self.sizes

    @property
    def fixed_bytes(self) -> int:
        """Bytes of all that never leaves."""
        return sum(self.sizes[tensor] for tensor in self.fixed)

    def without_small(self) -> IntervalProblem:
        """Return the task with what is mostly latency to move kept in its place, as far as that is little memory.

        Beside other transfers a small one takes longer than any link's latency says, and it frees next to nothing.
        """
        links = [self.machine.links[route.link_in] for route in self.routes]
        most = max((link.latency_s * link.bandwidth_bytes_per_s for link in links), default=0.0)
        left, fixed = self.limit_bytes // _SMALL_PART, set(self.fixed)
        for tensor in sorted(range(len(self.sizes)), key=self.sizes.__getitem__):
            left -= self.sizes[tensor]
            if self.sizes[tensor] >= most or left < 0:
                break
            fixed.add(tensor)
        return replace(self, fixed=frozenset(fixed))

    def tightened(self, margin: float, factor: float) -> IntervalProblem:
        """Return the task with a share of memory less, and links and pipes of so much of their bandwidth."""
        return replace(
            self,
            limit_bytes=int(self.limit_bytes * (1 - margin)),
            machine=self.machine.with_bandwidths(factor),
        )


def interval_problem(
    workload: Workload,
    machine: Machine,
    limits_bytes: Mapping[str, int],
    *,
    reserved_bytes: int = 0,
    recompute: bool = True,
    op_s_per_byte: float = 0.0,
    staying: Collection[str] = (),
) -> IntervalProblem:
    """Number the tensors of ``workload`` and find the routes that ``machine`` offers.

    Args:
        limits_bytes: budget per tier; a tier without one holds what the machine says.
        reserved_bytes: bytes of the compute tier that are not the plan's.
        recompute: whether ops may run again.
        op_s_per_byte: processors' time that moving a byte takes from ops.
        staying: tensors that never leave.

    Raises:
        UnsupportedOpError: an op has no time on the compute tier.
        ValueError: an op names a tensor that the workload does not list.
    """
    site = machine.compute_tier
    tensors = _by_first_use(workload)
    number = {tensor.name: i for i, tensor in enumerate(tensors)}
    known = {tensor.name for tensor in workload.tensors}
    reads: list[tuple[int, ...]] = []
    writes: list[tuple[int, ...]] = []
    times: list[float] = []
    writers: dict[int, tuple[int, ...]] = {}
    for i, op in enumerate(workload.ops):
        if site not in op.time_s:
            raise UnsupportedOpError(f"op '{op.name}' has no time on '{site}': {dict(op.time_s)}")
        if unknown := {*op.reads, *op.writes} - known:
            raise ValueError(f"op '{op.name}' names unknown tensors: {sorted(unknown)}")
        times.append(op.time_s[site])
        written = tuple(dict.fromkeys(number[name] for name in op.writes if name in number))
        reads.append(
            tuple(
                dict.fromkeys(
                    number[name] for name in op.reads if name in number and name not in op.writes
                )
            )
        )
        writes.append(written)
        for tensor in written:
            writers[tensor] = (*writers.get(tensor, ()), i)
    persistent = tuple(tensor.kind in PERSISTENT for tensor in tensors)
    changed = changed_bytes(workload)
    return IntervalProblem(
        workload=workload,
        machine=machine,
        limit_bytes=limits_bytes.get(site, machine.tiers[site].size_bytes) - reserved_bytes,
        routes=_routes(machine, limits_bytes),
        names=tuple(number),
        sizes=tuple(tensor.size_bytes for tensor in tensors),
        changed_bytes=tuple(changed.get(t.name, t.size_bytes) for t in tensors),
        persistent=persistent,
        written=tuple(i in writers for i in range(len(tensors))),
        stays_to_end=tuple(tensor.kind == TensorKind.OUTPUT for tensor in tensors),
        op_times_s=tuple(times),
        reads=tuple(reads),
        writes=tuple(writes),
        recompute=recompute,
        repeatable=_repeatable(workload, persistent, number, writers, writes) if recompute else {},
        writers=writers,
        op_s_per_byte=op_s_per_byte,
        fixed=frozenset(number[name] for name in staying if name in number),
    )


def changed_bytes(workload: Workload) -> dict[str, int]:
    """Return the bytes that an iteration changes at most of each tensor that it writes.

    Of a state in which only some rows change it is those, as long as iterations follow each other: the copy that it
    left behind when it came back is older by them alone.
    """
    sizes = {tensor.name: tensor.size_bytes for tensor in workload.tensors}
    changed: dict[str, int] = {}
    for op in workload.ops:
        for name in op.writes:
            part = op.patches.get(name, sizes[name]) if workload.repeats else sizes[name]
            changed[name] = min(changed.get(name, 0) + part, sizes[name])
    return changed


def _routes(machine: Machine, limits_bytes: Mapping[str, int]) -> tuple[Route, ...]:
    site = machine.compute_tier
    position = {link.name: i for i, link in enumerate(machine.links)}
    route_of: dict[str, Route] = {}
    for link in machine.links_into(site):
        tier = link.source_tier
        if tier not in route_of:
            room = limits_bytes.get(tier, machine.tiers[tier].size_bytes)
            out = position.get(f"{site}->{tier}")
            route_of[tier] = Route(tier, room, position[link.name], out)
    return tuple(route_of.values())


def _by_first_use(workload: Workload) -> list[TensorSpec]:
    """Return all that may move; numbers break ties, so the order in which tensors are listed must say nothing."""
    first: dict[str, int] = {}
    for op in workload.ops:
        for name in (*op.reads, *op.writes):
            first.setdefault(name, len(first))
    return sorted(
        (tensor for tensor in workload.tensors if tensor.kind != TensorKind.INPUT),
        key=lambda tensor: (first.get(tensor.name, len(first)), tensor.name),
    )


def _repeatable(
    workload: Workload,
    persistent: tuple[bool, ...],
    number: Mapping[str, int],
    writers: Mapping[int, tuple[int, ...]],
    writes: list[tuple[int, ...]],
) -> dict[int, int]:
    """Return what ops write that can run again: each result theirs alone, none read, none that lasts."""
    kinds = {number[t.name]: t.kind for t in workload.tensors if t.name in number}
    source_of: dict[int, int] = {}
    for source, op in enumerate(workload.ops):
        made = writes[source]
        passing = all(
            kinds[tensor] in {TensorKind.ACTIVATION, TensorKind.GRADIENT}
            and not persistent[tensor]
            and len(writers[tensor]) == 1
            for tensor in made
        )
        # An op that writes one of the caller's inputs changes what is not the plan's.
        inside = all(name in number for name in op.writes)
        if passing and inside and not set(op.reads) & set(op.writes):
            source_of |= dict.fromkeys(made, source)
    return source_of
