"""Verify: replay a plan without the solver and refuse what breaks a budget or a dependency.

The plan's numbers are not trusted: sizes, peaks, link bytes and predicted seconds are derived again
from the workload, the machine and the steps. The steps are walked as the runtime walks them, first
what is issued up front, then three iterations, with a map of who owns which bytes of the arena.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NoReturn

from gascompile.core.errors import PlanVerificationError
from gascompile.core.plan import Plan
from gascompile.core.sizes import PAGE_BYTES, format_size, reserve_bytes
from gascompile.core.steps import Compute, Offload, Prefetch, Recompute, Release, Reload, Step, Wait
from gascompile.core.tiles import parse_tile
from gascompile.core.workload import TensorKind
from gascompile.cost_models.formulas.energy import plan_energy
from gascompile.cost_models.formulas.gathers import gather_link, gathered
from gascompile.cost_models.simulate.replay import replay_plan, up_front_transfers
from gascompile.passes.bounds.certify import EVERYTHING, WEIGHTS
from gascompile.passes.bounds.least_time import least_time
from gascompile.passes.model.liveness import liveness
from gascompile.passes.verify.account import account, require_accounts
from gascompile.passes.verify.heap import heap_tensors

_NUM_ITERATIONS = 3
_TOLERANCE = 1e-6


def verify(plan: Plan) -> None:
    """Return if ``plan`` can run as it claims.

    Raises:
        PlanVerificationError: names the first offending step or number.
    """
    try:
        liveness(plan.workload)
    except ValueError as error:
        raise PlanVerificationError(f"the plan's workload is inconsistent: {error}") from error
    _check_sizes(plan)
    _check_tensors(plan)
    _check_ops(plan)
    _check_gathers(plan)
    _check_program_order(plan)
    _check_moves(plan)
    _Walk(plan).run()
    _check_accounts(plan)
    _check_certificate(plan)
    _check_energy(plan)


def _refuse(message: str, step: int = -1) -> NoReturn:
    raise PlanVerificationError(
        f"{message}; the plan is refused, make it again from its workload", step=step
    )


def _check_sizes(plan: Plan) -> None:
    names = [tensor.name for tensor in plan.workload.tensors]
    if len(set(names)) != len(names):
        _refuse("two tensors of the workload have the same name")
    for tensor in plan.workload.tensors:
        if tensor.size_bytes < 0:
            _refuse(f"tensor '{tensor.name}' has the size {tensor.size_bytes}")


def _check_tensors(plan: Plan) -> None:
    """Check that every tensor is where it may be; residents of a shared arena may be another's."""
    site = plan.machine.compute_tier
    specs = {tensor.name: tensor for tensor in plan.workload.tensors}
    if missing := sorted(specs.keys() - plan.tensors.keys()):
        _refuse(f"the plan does not say where tensor '{missing[0]}' lives")
    sources = {link.source_tier for link in plan.machine.links if link.target_tier == site}
    offsite = {op.site for op in plan.ops}
    for name, tensor in plan.tensors.items():
        spec = specs.get(name)
        if spec is None and (tensor.kind != TensorKind.WEIGHT or tensor.address is None):
            _refuse(f"the plan places tensor '{name}', which the workload does not have")
        if spec and (spec.size_bytes, spec.kind) != (tensor.size_bytes, tensor.kind):
            _refuse(
                f"tensor '{name}' is a {spec.kind} of {spec.size_bytes} bytes in the workload, "
                f"a {tensor.kind} of {tensor.size_bytes} in the plan"
            )
        persists = tensor.kind in (TensorKind.WEIGHT, TensorKind.STATE)
        if tensor.home != site and not persists:
            _refuse(f"{tensor.kind} '{name}' lives in tier '{tensor.home}' instead of '{site}'")
        if tensor.home not in (site, *sources, *offsite):
            _refuse(f"no link leads from tier '{tensor.home}', the home of '{name}', to '{site}'")
        if tensor.address is not None and (tensor.kind, tensor.home) != (TensorKind.WEIGHT, site):
            _refuse(f"tensor '{name}' with home '{tensor.home}' has the address {tensor.address}")


def _check_ops(plan: Plan) -> None:
    if len(plan.ops) != len(plan.workload.ops):
        _refuse(f"the plan has {len(plan.ops)} ops, its workload {len(plan.workload.ops)}")
    for op, spec in zip(plan.ops, plan.workload.ops, strict=True):
        if op.name != spec.name:
            _refuse(f"op '{spec.name}' of the workload is called '{op.name}' in the plan")
        if op.site not in plan.machine.tiers or op.site not in spec.time_s:
            _refuse(f"op '{op.name}' runs on '{op.site}', for which the workload has no time")
        if not _close(op.time_s, spec.time_s[op.site]):
            _refuse(
                f"op '{op.name}' takes {op.time_s} s in the plan, {spec.time_s[op.site]} s in the workload"
            )


def _check_gathers(plan: Plan) -> None:
    """Check that the rows an op reads by itself are rows of a weight, and that a link brings them."""
    weights = {t.base for t in map(parse_tile, plan.tensors) if t is not None}
    weights |= {name for name, t in plan.tensors.items() if t.kind == TensorKind.WEIGHT}
    for spec in plan.workload.ops:
        for name, size_bytes in gathered(spec).items():
            if name not in weights or size_bytes < 0:
                _refuse(f"op '{spec.name}' gathers {size_bytes} bytes of '{name}', no weight")
            if size_bytes and gather_link(plan.machine, spec.gather_tier) is None:
                _refuse(f"op '{spec.name}' gathers rows of '{name}', but no link brings them")
            if spec.gather_tier and plan.tensors[name].home != spec.gather_tier:
                _refuse(f"op '{spec.name}' gathers rows of '{name}' where it does not lie")


def _check_program_order(plan: Plan) -> None:
    upcoming = 0
    for i, step in enumerate(plan.steps):
        if step.op != upcoming:
            _refuse(f"step {i} names op {step.op}, but stands before op {upcoming}", i)
        if isinstance(step, Compute):
            upcoming += 1
    if upcoming != len(plan.ops):
        _refuse(f"the steps run {upcoming} of {len(plan.ops)} ops")


def _check_moves(plan: Plan) -> None:
    """Check each prefetch against its tensor's home, size and link, and every address."""
    site = plan.machine.compute_tier
    on_heap = heap_tensors(plan)
    arena_bytes = plan.arena_bytes.get(site, 0)
    links = {link.name: link for link in plan.machine.links}
    for name, tensor in plan.tensors.items():
        if tensor.address is not None:
            _check_address(name, tensor.address, tensor.size_bytes, arena_bytes, -1)
    for i, step in enumerate(plan.steps):
        if isinstance(step, (Compute, Recompute)) or _is_heap_step(step, on_heap):
            continue
        moved = plan.tensors.get(step.tensor)
        if isinstance(step, (Offload, Reload)) or step.address is None:
            _refuse(f"step {i} moves '{step.tensor}', which is not on the heap", i)
        if moved is None or moved.kind != TensorKind.WEIGHT or moved.home == site:
            _refuse(f"step {i} moves '{step.tensor}', which is not a streamed weight", i)
        _check_address(step.tensor, step.address, moved.size_bytes, arena_bytes, i)
        if isinstance(step, Prefetch):
            link = links.get(step.link)
            if link is None or (link.source_tier, link.target_tier) != (moved.home, site):
                _refuse(
                    f"step {i} reads '{step.tensor}' over '{step.link}', but it goes from "
                    f"'{moved.home}' to '{site}'",
                    i,
                )
            if step.size_bytes != moved.size_bytes:
                _refuse(
                    f"step {i} reads {step.size_bytes} bytes of '{step.tensor}', "
                    f"which has {moved.size_bytes}",
                    i,
                )


def _is_heap_step(step: Prefetch | Wait | Release | Offload | Reload, heap: frozenset[str]) -> bool:
    return step.address is None and step.tensor in heap


def _check_address(name: str, address: int, size_bytes: int, arena_bytes: int, step: int) -> None:
    if address < 0 or address % PAGE_BYTES:
        _refuse(f"'{name}' has the address {address}, which is no multiple of {PAGE_BYTES}", step)
    if address + reserve_bytes(size_bytes) > arena_bytes:
        _refuse(
            f"'{name}' at {address} takes {reserve_bytes(size_bytes)} bytes and ends beyond "
            f"the arena of {arena_bytes}",
            step,
        )


@dataclass(slots=True)
class _Copy:
    """Bytes of a streamed weight in the arena or on their way there."""

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
class _Walk:
    """The arena while the steps are walked."""

    plan: Plan
    copies: dict[str, _Copy] = field(default_factory=dict)
    """One live copy per streamed weight."""
    residents: _Ranges = field(default_factory=_Ranges)
    staged: _Ranges = field(default_factory=_Ranges)
    """The bytes of ``copies``."""
    on_heap: frozenset[str] = frozenset()

    def run(self) -> None:
        """Walk what is issued up front and then the iterations."""
        self._place_residents()
        steps = self.plan.steps
        repeats = self.plan.workload.repeats
        self.on_heap = heap_tensors(self.plan)
        for i in up_front_transfers(steps) if repeats else ():
            self._step(i, steps[i])
        for _ in range(_NUM_ITERATIONS if repeats else 1):
            for i, step in enumerate(steps):
                self._step(i, step)
            self._end_iteration(repeats=repeats)

    def _end_iteration(self, *, repeats: bool) -> None:
        for copy in self.copies.values():
            if copy.arrived or not repeats:
                _refuse(
                    f"'{copy.tensor}' is not released by the end of the iteration that needs it"
                )

    def _place_residents(self) -> None:
        placed = sorted(
            (tensor.address, tensor.address + reserve_bytes(tensor.size_bytes), name)
            for name, tensor in self.plan.tensors.items()
            if tensor.address is not None
        )
        reached = 0
        for begin, end, name in placed:
            if begin < reached and end > begin:
                _refuse(
                    f"resident '{name}' at {begin} overlaps the one below it, which ends at {reached}"
                )
            reached = max(reached, end)
            self.residents.add(_Copy(name, begin, end, True))

    def _step(self, i: int, step: Step) -> None:
        match step:
            case Compute():
                self._compute(i, step.op)
            case Recompute():
                self._compute(i, step.source)
            case Prefetch():
                self._prefetch(i, step)
            case Offload() | Reload():
                return
            case _ if step.tensor in self.on_heap:
                return
            case Wait():
                copy = self._copy(i, step, "waits for")
                if copy.arrived:
                    _refuse(f"step {i} waits for '{step.tensor}' a second time", i)
                copy.arrived = True
            case Release():
                copy = self._copy(i, step, "releases")
                if not copy.arrived:
                    _refuse(f"step {i} releases '{step.tensor}' before it has arrived", i)
                self.staged.remove(self.copies.pop(step.tensor))

    def _compute(self, i: int, op: int) -> None:
        spec, site = self.plan.workload.ops[op], self.plan.ops[op].site
        for name in (*spec.reads, *spec.writes):
            tensor = self.plan.tensors[name]
            if tensor.kind != TensorKind.WEIGHT or name in self.on_heap:
                continue
            if name in spec.writes:
                _refuse(f"op '{spec.name}' writes '{name}', whose copy in the arena is clean", i)
            if tensor.address is not None and site == self.plan.machine.compute_tier:
                continue
            if site != self.plan.machine.compute_tier:
                if tensor.home != site:
                    _refuse(f"op '{spec.name}' on '{site}' reads '{name}' of '{tensor.home}'", i)
                continue
            if name not in self.copies or not self.copies[name].arrived:
                _refuse(
                    f"op '{spec.name}' needs '{name}', which no step has brought and waited for", i
                )

    def _prefetch(self, i: int, step: Prefetch) -> None:
        if step.tensor in self.copies:
            _refuse(f"step {i} reads '{step.tensor}' again before its last copy is released", i)
        begin, end = step.address, step.address + reserve_bytes(step.size_bytes)
        other = self.residents.overlapping(begin, end) or self.staged.overlapping(begin, end)
        if other is not None:
            _refuse(
                f"step {i} reads '{step.tensor}' to {begin}..{end}, where '{other.tensor}' "
                f"still has {other.begin}..{other.end}",
                i,
            )
        self.copies[step.tensor] = copy = _Copy(step.tensor, begin, end)
        self.staged.add(copy)

    def _copy(self, i: int, step: Wait | Release, verb: str) -> _Copy:
        copy = self.copies.get(step.tensor)
        if copy is None or copy.begin != step.address:
            _refuse(f"step {i} {verb} '{step.tensor}' at {step.address}, where it is not", i)
        return copy


def _check_accounts(plan: Plan) -> None:
    """Check peaks and link bytes against what the steps take and move, and the peaks against the budget."""
    site = plan.machine.compute_tier
    if set(plan.arena_bytes) != {site}:
        _refuse(f"the plan has arenas in {sorted(plan.arena_bytes)} instead of '{site}' alone")
    require_accounts(plan)
    reserved = {place.name: place.reserved_bytes for place in plan.places}
    held, moved = account(plan)
    if dict(plan.peak_bytes) != held:
        _refuse(f"the plan claims peaks of {dict(plan.peak_bytes)} bytes, its steps need {held}")
    for tier, size_bytes in held.items():
        limit = plan.budget_bytes.get(tier, 0) - reserved.get(tier, 0)
        if size_bytes > limit:
            _refuse(
                f"tier '{tier}' would hold {format_size(size_bytes)} ({size_bytes} bytes), "
                f"its budget leaves {format_size(limit)} ({limit} bytes)"
            )
    if dict(plan.link_bytes) != moved:
        _refuse(f"the plan claims to move {dict(plan.link_bytes)} bytes, its steps move {moved}")


def _check_certificate(plan: Plan) -> None:
    found = plan.certificate
    numbers = (
        found.predicted_s,
        found.lower_bound_s,
        found.lower_bound_all_s,
        found.limit_s,
        found.gap,
        found.solve_s,
    )
    if not all(math.isfinite(number) and number >= 0 for number in numbers):
        _refuse(f"the certificate holds {numbers}")
    seconds = replay_plan(plan).seconds
    if not _close(seconds, found.predicted_s):
        _refuse(f"the plan predicts {found.predicted_s} s, its replay takes {seconds} s")
    limit_s, _ = least_time(plan.workload, plan.machine, plan.budget_bytes)
    in_order = (limit_s, found.limit_s, found.lower_bound_s, found.predicted_s)
    if any(a > b * (1 + _TOLERANCE) for a, b in pairwise(in_order)):
        _refuse(f"limit, lower bound and prediction are not in order: {in_order}")
    if found.lower_bound_all_s > found.lower_bound_s * (1 + _TOLERANCE):
        _refuse(
            f"the bound of everything, {found.lower_bound_all_s} s, is above that of {found.holds_over}"
        )
    if found.holds_over not in {WEIGHTS, EVERYTHING}:
        _refuse(f"the certificate holds over '{found.holds_over}', which no bound does")
    gap = (
        (found.predicted_s - found.lower_bound_s) / found.predicted_s if found.predicted_s else 0.0
    )
    if abs(gap - found.gap) > _TOLERANCE:
        _refuse(f"the certificate claims a gap of {found.gap}, its numbers give {gap}")
    names = {"compute", *(link.name for link in plan.machine.links)}
    if found.binding not in names:
        _refuse(f"the certificate names the resource '{found.binding}', which does not exist")


def _check_energy(plan: Plan) -> None:
    """Check the joules that a plan claims; older ones claim none."""
    claimed, found = plan.energy, plan_energy(plan)
    if claimed is None or (found is not None and _close(claimed.joules, found.joules)):
        return
    _refuse(f"the plan claims {claimed.joules} joules, its machine's model gives {found}")


def _close(a: float, b: float) -> bool:
    return abs(a - b) <= _TOLERANCE * max(abs(a), abs(b))
