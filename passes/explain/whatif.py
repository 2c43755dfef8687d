"""What if: what more memory or bandwidth would be worth, each number the prediction of a plan made for it.

Beside it stands by how much the change moves the bound of the linear relaxation, in which transfers can be
cut at will: what is physically there to be had, where the plan's own step from tensor to tensor is coarse.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from gascompile.core.budget import Budget
from gascompile.core.errors import InfeasiblePlanError
from gascompile.core.machine import Machine, PlaceKind
from gascompile.core.plan import Plan
from gascompile.core.sizes import GIB, PAGE_BYTES, align_up
from gascompile.core.steps import Compute, Evict, Fetch, Prefetch, Release, Wait
from gascompile.core.workload import TensorKind
from gascompile.passes.bounds.shadow_prices import Solution
from gascompile.passes.model.problem import Problem, problem
from gascompile.passes.plan.make_plan import make_plan
from gascompile.passes.search.relaxed_place import relaxed_place

_HELPS = 0.01
"""Share of an iteration that a budget has to save to count as a help."""
_GROWTH = (1.0625, 1.125, 1.25, 1.5, 2.0, 3.0, 4.0)
_BISECTIONS = 3  # each a plan; the answer is then exact to an eighth of a step
_SMALL_SHARE = 8
"""Where a whole GiB or GB/s is much beside what there is, the step is this part of it."""

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """The plan on a machine or within a budget that is changed in one thing."""

    change: str
    """``budget``, ``bandwidth``, ``drive``, ``next`` or ``half``."""
    subject: str
    """The tier, link or pipe that is changed."""
    amount: float
    """How much more of it there is: bytes, or bytes per second."""
    predicted_s: float | None
    """One iteration of the plan made for it; ``None`` where no plan keeps the budget."""
    change_s: float | None
    """``predicted_s`` minus that of the same search without the change; negative where it helps."""
    proven_change_s: float | None = None
    """No plan that the bound of the variant holds over changes the time by less: ``change_s`` is never below."""
    price_s: float | None = None
    """What the relaxation's price says, a slope of its bound; a plan can gain more, as it may come closer to it."""
    bound_change_s: float | None = None
    """What the bound of the linear relaxation changes by; ``None`` where it does not cover the plan."""
    required_bytes: int | None = None
    """The smallest feasible budget, where this one is not."""

    def speedup(self, base_s: float) -> float | None:
        """Return how much more iterations a second it gives, as a share."""
        if self.predicted_s is None or not self.predicted_s:
            return None
        return base_s / self.predicted_s - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """Variants of a plan."""

    plan_s: float
    """One iteration as the plan predicts it."""
    base_s: float
    """One iteration of a plan made anew for the same machine and budget; variants are compared with it."""
    binding: str
    """What sets the physical limit of the unchanged task."""
    variants: tuple[Variant, ...]
    notes: tuple[str, ...] = ()

    def of(self, change: str) -> tuple[Variant, ...]:
        """Return the variants of one kind."""
        return tuple(variant for variant in self.variants if variant.change == change)


def whatif(
    plan: Plan,
    *,
    step_bytes: int | None = None,
    step_bytes_per_s: float | None = None,
    move_all: bool | None = None,
    time_limit_s: float = 10.0,
    progress: Progress = lambda label: None,
) -> WhatIf:
    """Return what changes of budget and machine would be worth to ``plan``, by planning each of them.

    Args:
        step_bytes: memory to add per tier; by default 1 GiB, or an eighth of a small budget.
        step_bytes_per_s: bandwidth to add per link; by default 1 GB/s, or an eighth of a slow link's.
        move_all: plans may move and recompute all tensors; by default where ``plan`` does so.
        time_limit_s: seconds the solver may take for each plan.
        progress: is told what is planned next.

    Raises:
        InfeasiblePlanError: no plan keeps the budget that ``plan`` was made for.
    """
    everything = _moves_all(plan) if move_all is None else move_all
    search = _Search(plan, time_limit_s, progress, move_all=everything)
    base = search.plan("the plan as it is", search.machine, search.limits)
    assert base is not None, "an infeasible budget of the plan itself is raised"
    search.base_s = base.certificate.predicted_s
    search.base_solution = search.relaxed(search.machine, search.limits)
    variants = [
        *_budgets(search, step_bytes),
        *_links(search, step_bytes_per_s),
        *_second_drive(search),
        *_next_budget(search),
        *_half_budget(search),
    ]
    notes = []
    if search.base_s < plan.certificate.predicted_s * (1 - _HELPS):
        notes.append(
            f"the plan itself ('{plan.strategy}') is slower than one made anew for the same machine and budget"
        )
    return WhatIf(
        plan_s=plan.certificate.predicted_s,
        base_s=search.base_s,
        binding=base.certificate.binding,
        variants=tuple(variants),
        notes=tuple(notes),
    )


class _Search:
    """Plans the workload of a plan under changed conditions."""

    def __init__(
        self, plan: Plan, time_limit_s: float, progress: Progress, *, move_all: bool
    ) -> None:
        self.machine = plan.machine
        self.limits = dict(plan.budget_bytes)
        self.site = plan.machine.compute_tier
        self.base_s = 0.0
        self.base_solution: Solution | None = None
        self._move_all = move_all
        self._trains = _changes_weights(plan)
        """What trains keeps all on the heap."""
        self._plan = plan
        self._time_limit_s = time_limit_s
        # What libraries take is reserved by every plan.
        libraries_bytes = plan.machine.library_bytes(self.site)
        self._own_bytes = max(0, plan.reserved_bytes - libraries_bytes)
        self._progress = progress
        self.required_bytes = 0

    def plan(self, label: str, machine: Machine, limits: dict[str, int]) -> Plan | None:
        """Return the plan for a machine and a budget; ``None`` where none keeps the budget."""
        self._progress(label)
        # What else a step takes of a device's host is as it was.
        beside = self._plan.beside_bytes
        left = {tier: size - beside.get(tier, 0) for tier, size in limits.items()}
        try:
            return make_plan(
                self._plan.workload,
                machine,
                Budget(left),
                fingerprint={},
                time_limit_s=self._time_limit_s,
                move_all=self._move_all,
                has_arena=not self._trains,
                reserved_bytes=self._own_bytes,
            )
        except InfeasiblePlanError as error:
            if limits == self.limits:
                raise
            self.required_bytes = error.required_bytes
            return None

    def variant(
        self,
        change: str,
        subject: str,
        amount: float,
        *,
        machine: Machine | None = None,
        limits: dict[str, int] | None = None,
    ) -> Variant:
        """Plan one variant and compare it."""
        label = f"{change}: {subject}"
        conditions = (machine or self.machine, limits or self.limits)
        plan = self.plan(label, *conditions)
        relaxed = self.relaxed(*conditions) if plan is not None else None
        base = self.base_solution
        gained_s = None if relaxed is None or base is None else relaxed.bound_s - base.bound_s
        predicted_s = plan.certificate.predicted_s if plan is not None else None
        return Variant(
            change=change,
            subject=subject,
            amount=amount,
            predicted_s=predicted_s,
            change_s=None if predicted_s is None else predicted_s - self.base_s,
            proven_change_s=(
                None if plan is None else plan.certificate.lower_bound_s - self.base_s
            ),
            price_s=None if base is None else self._priced(base, change, subject, amount),
            bound_change_s=gained_s,
            required_bytes=self.required_bytes if plan is None else None,
        )

    def _priced(self, base: Solution, change: str, subject: str, amount: float) -> float | None:
        """Return what the prices say of a change; ``None`` where they say nothing."""
        if change in ("budget", "next", "half") and subject == self.site:
            return -base.memory_price_s_per_byte * amount
        if change == "bandwidth" and subject in base.link_price_s:
            bandwidth = self.machine.link(subject).bandwidth_bytes_per_s
            return -base.link_price_s[subject] * amount / bandwidth
        return None

    def relaxed(self, machine: Machine, limits: dict[str, int]) -> Solution | None:
        """Return the solution of the linear relaxation; ``None`` where more than weights move."""
        task = problem(
            self._plan.workload, machine, Budget(limits), reserved_bytes=self._plan.reserved_bytes
        )
        if self._move_all or not task.links or task.arena_limit_bytes < 0:
            return None
        solution = relaxed_place(task, self._time_limit_s)
        return None if solution is None or solution.timed_out else solution

    def task(self) -> Problem:
        """Return the unchanged planning problem."""
        return problem(
            self._plan.workload,
            self.machine,
            Budget(self.limits),
            reserved_bytes=self._plan.reserved_bytes,
        )


def _moves_all(plan: Plan) -> bool:
    """Whether the plan moves, recomputes or sends away more than weights that stream through the arena."""
    site = plan.machine.compute_tier
    plain = (Compute, Fetch, Evict, Prefetch, Wait, Release)
    return (
        not all(isinstance(step, plain) for step in plan.steps)
        or any(op.site != site for op in plan.ops)
        or _changes_weights(plan)
    )


def _changes_weights(plan: Plan) -> bool:
    """Whether ops of the plan write weights, as those of a training step do."""
    kinds = {tensor.name: tensor.kind for tensor in plan.workload.tensors}
    return any(kinds[name] == TensorKind.WEIGHT for op in plan.workload.ops for name in op.writes)


# ---------------------------------------------------------------- one thing more


def _budgets(search: _Search, step_bytes: int | None) -> list[Variant]:
    """Return each tier with more memory than its budget."""
    variants = []
    for tier, limit_bytes in search.limits.items():
        step = step_bytes or _default_step(limit_bytes, GIB)
        limits = {**search.limits, tier: limit_bytes + step}
        machine = _with_room(search.machine, limits)
        variants.append(search.variant("budget", tier, step, machine=machine, limits=limits))
    return variants


def _default_step(value: float, whole: int) -> int:
    """Return a whole GiB or GB/s, or a part of ``value`` where that would be much beside it."""
    return whole if value >= 4 * whole else max(1, int(value) // _SMALL_SHARE)


def _with_room(machine: Machine, limits: dict[str, int]) -> Machine:
    """Return the machine with tiers that hold the budget."""
    places = (replace(p, size_bytes=max(p.size_bytes, limits[p.name])) for p in machine.places)
    return replace(machine, places=tuple(places))


def _links(search: _Search, step_bytes_per_s: float | None) -> list[Variant]:
    """Return each link, and each pipe that links share, with more bandwidth."""
    variants = []
    machine = search.machine
    for i, link in enumerate(machine.links):
        step = step_bytes_per_s or _default_step(link.bandwidth_bytes_per_s, 10**9)
        faster = replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s + step)
        links = (*machine.links[:i], faster, *machine.links[i + 1 :])
        changed = replace(machine, links=links)
        variants.append(search.variant("bandwidth", link.name, step, machine=changed))
    for i, pipe in enumerate(machine.pipes):
        step = step_bytes_per_s or _default_step(pipe.bandwidth_bytes_per_s, 10**9)
        wider = replace(pipe, bandwidth_bytes_per_s=pipe.bandwidth_bytes_per_s + step)
        changed = replace(machine, pipes=(*machine.pipes[:i], wider, *machine.pipes[i + 1 :]))
        variants.append(search.variant("bandwidth", pipe.name, step, machine=changed))
    return variants


def _second_drive(search: _Search) -> list[Variant]:
    """Return the machine with twice the drive: its links, and the pipes that no other link shares."""
    machine = search.machine
    drives = {place.name for place in machine.places if place.kind is PlaceKind.NVME}
    drive = [link for link in machine.links if drives & {link.source_tier, link.target_tier}]
    if not drive:
        return []
    added = max(link.bandwidth_bytes_per_s for link in drive)
    return [search.variant("drive", "nvme", added, machine=machine.with_drives(2))]


# ---------------------------------------------------------------- other budgets


def _next_budget(search: _Search) -> list[Variant]:
    """Return the smallest larger budget that saves a share worth having, as far as a few plans find it."""
    limit_bytes = search.limits[search.site]
    ceiling = _enough_bytes(search)
    if ceiling <= limit_bytes:
        return []
    best = _at(search, ceiling)
    if not _helps(search, best):
        return []
    low = limit_bytes
    for size_bytes in (align_up(int(limit_bytes * growth)) for growth in _GROWTH):
        if size_bytes >= ceiling:
            break
        tried = _at(search, size_bytes)
        if _helps(search, tried):
            best = tried
            break
        low = size_bytes
    for _ in range(_BISECTIONS):
        high = limit_bytes + int(best.amount)
        middle = align_up((low + high) // 2)
        if not low + PAGE_BYTES < middle < high - PAGE_BYTES:
            break
        tried = _at(search, middle)
        if _helps(search, tried):
            best = tried
        else:
            low = middle
    return [best]


def _enough_bytes(search: _Search) -> int:
    """Return the budget within which every weight stays."""
    task = search.task()
    return task.base_bytes + sum(weight.reserved_bytes for weight in task.weights)


def _at(search: _Search, size_bytes: int) -> Variant:
    limits = {**search.limits, search.site: size_bytes}
    machine = _with_room(search.machine, limits)
    amount = size_bytes - search.limits[search.site]
    return search.variant("next", search.site, amount, machine=machine, limits=limits)


def _helps(search: _Search, variant: Variant) -> bool:
    return variant.change_s is not None and variant.change_s <= -_HELPS * search.base_s


def _half_budget(search: _Search) -> list[Variant]:
    half = search.limits[search.site] // 2
    limits = {**search.limits, search.site: half}
    amount = half - search.limits[search.site]
    return [search.variant("half", search.site, amount, limits=limits)]
