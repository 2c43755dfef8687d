"""Update sites: which updates run where their moments rest, while the tier that computes goes on.

What goes elsewhere is tried: shares of the updates, from the first ones of an iteration on, as the others have less
time behind them. For each the rest is planned as always: its updates take no time, what they alone touch is not there,
and what they share with other ops is as clean as a weight. Then their moves are added, and the replay decides:

* the gradient goes out before the update, which waits for it alone; its room is free when the copy is through;
* the parameter gives its room up before, and comes back once the update is done, or where the next iteration wants it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from gascompile.core.errors import InfeasiblePlanError
from gascompile.core.machine import Machine
from gascompile.core.op_sites import op_sites
from gascompile.core.steps import Compute, Offload, Recompute, Release, Reload, Step, Wait
from gascompile.core.workload import PERSISTENT, OpSpec, Workload
from gascompile.cost_models.formulas.contention import contended
from gascompile.cost_models.simulate.events import running_sums, steady_seconds
from gascompile.cost_models.simulate.replay import compile_events
from gascompile.passes.intervals.update_groups import UpdateGroup, sites_of, update_groups
from gascompile.passes.model.intervals import IntervalPlan

SHARES = (1.0, 0.75, 0.5, 0.25, 0.125)
"""Shares of the time of all updates elsewhere."""
_MARGINS = (1.0, 1.3, 2.0)
"""Of the time until an update is done: how much later than expected a parameter is asked for."""
_LAST = math.inf


Planner = Callable[[Workload, Mapping[str, int], Sequence[str]], IntervalPlan]
"""Plans a workload whose ops run on one tier within limits per tier, some tensors staying where they are."""


def update_sites(
    workload: Workload,
    machine: Machine,
    limits_bytes: Mapping[str, int],
    best: IntervalPlan | None,
    planned: Planner,
    fits: Callable[[IntervalPlan], bool],
) -> IntervalPlan | None:
    """Return the fastest plan found with updates elsewhere; ``None`` when none beats ``best``.

    Args:
        workload: of a training step.
        machine: whose processors may run updates.
        limits_bytes: budget per tier.
        best: the plan with all ops on the tier that computes; ``None`` where there is none.
        planned: plans what a choice leaves.
        fits: whether a plan keeps the budget and all rules.
    """
    fastest_yet: IntervalPlan | None = None
    for tier in _other_sites(workload, machine):
        for chosen in _trials(update_groups(workload, machine, tier)):
            trial = _Trial(workload, machine, tier, chosen, best.seconds if best else 0.0)
            fastest = fastest_yet or best
            limit_s = fastest.seconds if fastest else math.inf
            fastest_yet = trial.plan(limits_bytes, limit_s, planned, fits) or fastest_yet
    return fastest_yet


def _other_sites(workload: Workload, machine: Machine) -> Iterator[str]:
    """Yield the tiers that updates can run on, where iterations follow each other."""
    own = machine.compute_tier
    links = {(link.source_tier, link.target_tier) for link in machine.links}
    for tier in machine.tiers if workload.repeats else ():
        is_near = {(own, tier), (tier, own)} <= links
        if tier != own and is_near and any(tier in op.time_s for op in workload.ops):
            yield tier


def _trials(groups: Sequence[UpdateGroup]) -> Iterator[tuple[UpdateGroup, ...]]:
    """Yield the groups that go elsewhere, most first."""
    sums = running_sums([group.time_s for group in groups])
    counts = dict.fromkeys(bisect_left(sums, share * sums[-1] * (1 - 1e-9)) for share in SHARES)
    yield from (tuple(groups[:count]) for count in counts if count)


class _Trial:
    """One choice of updates that run elsewhere."""

    def __init__(
        self,
        workload: Workload,
        machine: Machine,
        tier: str,
        groups: tuple[UpdateGroup, ...],
        expected_s: float,
    ) -> None:
        self._workload, self._machine, self._tier = workload, machine, tier
        self._own, self._groups = machine.compute_tier, groups
        self._sites = sites_of(workload, groups, self._own, tier)
        self._sizes = {tensor.name: tensor.size_bytes for tensor in workload.tensors}
        self._shared = {name: group for group in groups for name in group.shared}
        times_s = [
            op.time_s[self._own] if site == self._own else 0.0
            for op, site in zip(workload.ops, self._sites, strict=True)
        ]
        clock = running_sums(times_s)
        stretch = max(expected_s / clock[-1], 1.0) if clock[-1] else 1.0
        self._clock = [time_s * stretch for time_s in clock]
        """When each op begins, about."""
        self._out = machine.link(f"{self._own}->{tier}")
        self._through = {group.gradient: 0 for group in groups}
        """Op by which each gradient is elsewhere, about."""
        self._done_s: dict[str, float] = {}
        """When each parameter is changed, about."""
        self._expect()

    def _expect(self) -> None:
        last = len(self._workload.ops) - 1
        link_s = busy_s = 0.0
        for group in self._groups:
            link_s = max(link_s, self._clock[group.ops[0]])
            link_s += self._out.transfer_time_s(group.size_bytes)
            through = bisect_left(self._clock, link_s, 0, last)
            self._through[group.gradient] = min(max(through, group.ops[-1] + 1), last)
            busy_s = max(busy_s, link_s) + group.time_s
            self._done_s.update(dict.fromkeys(group.shared, busy_s))

    def plan(
        self,
        limits_bytes: Mapping[str, int],
        limit_s: float,
        planned: Planner,
        fits: Callable[[IntervalPlan], bool],
    ) -> IntervalPlan | None:
        """Return the best plan for the choice that keeps the budget, if it takes less than ``limit_s``."""
        taken_bytes = sum(group.lasting_bytes + group.size_bytes for group in self._groups)
        room_bytes = limits_bytes.get(self._tier, self._machine.tiers[self._tier].size_bytes)
        if taken_bytes > room_bytes:
            return None
        left_bytes = {**limits_bytes, self._tier: room_bytes - taken_bytes}
        try:
            rest = planned(self._rest(), left_bytes, list(self._through))
        except InfeasiblePlanError:
            return None
        homes = {**rest.homes}
        for group in self._groups:
            homes |= dict.fromkeys((*group.shared, *group.apart), self._tier)
        best: IntervalPlan | None = None
        for margin in (*_MARGINS, _LAST):
            steps = self._merged(rest.steps, margin)
            seconds = self._seconds(steps)
            plan = replace(rest, steps=steps, homes=homes, sites=self._sites, seconds=seconds)
            if seconds < (best.seconds if best is not None else limit_s) and fits(plan):
                best = replace(plan, strategy=f"{rest.strategy}_updates", bound_s=0.0)
        return best

    def _rest(self) -> Workload:
        """Return what is left to plan: gradients that stay until they are through, parameters that nobody writes."""
        gradient_of = {i: group.gradient for group in self._groups for i in group.ops}
        due: dict[int, list[str]] = defaultdict(list)
        for gradient, op in self._through.items():
            due[op].append(gradient)
        apart = {name for group in self._groups for name in group.apart}

        def rest(number: int, op: OpSpec) -> OpSpec:
            if (gradient := gradient_of.get(number)) is not None:
                # Written, so that nothing makes it again in between.
                op = replace(op, reads=(gradient,), writes=(gradient,), patches={})
                op = replace(op, time_s={self._own: 0.0}, workspace_bytes=0)
            reads = tuple(dict.fromkeys((*op.reads, *due[number])))
            return replace(op, reads=reads, time_s={self._own: op.time_s[self._own]})

        return replace(
            self._workload,
            ops=tuple(rest(i, op) for i, op in enumerate(self._workload.ops)),
            tensors=tuple(t for t in self._workload.tensors if t.name not in apart),
        )

    def _seconds(self, steps: tuple[Step, ...]) -> float:
        ops, machine = self._workload.ops, self._machine
        lasting = {t.name for t in self._workload.tensors if t.kind in PERSISTENT}
        where = op_sites(ops, self._sites, machine, lasting)
        times_s = [op.time_s[site] for op, site in zip(ops, self._sites, strict=True)]
        times_s = contended(ops, times_s, self._sites, machine)
        return steady_seconds(compile_events(steps, times_s, machine, repeats=True, sites=where))

    # ------------------------------------------------------------ the moves of updates elsewhere

    def _merged(self, steps: Sequence[Step], margin: float) -> tuple[Step, ...]:
        """Return the steps with those of the updates; parameters come back no sooner than ``margin`` allows."""
        more: dict[int, list[Step]] = defaultdict(list)
        kept = self._without_stale(steps, margin, more)
        for group in self._groups:
            first, gradient, size = group.ops[0], group.gradient, group.size_bytes
            more[first] += [
                Offload(op=first, tensor=gradient, link=self._out.name, size_bytes=size),
                Wait(op=first, tensor=gradient, site=self._tier),
            ]
            through = self._through[gradient]
            # Behind the last op there is only the end.
            at = through if through > group.ops[-1] else through + 1
            more[at].insert(0, Wait(op=at, tensor=gradient))
        merged: list[Step] = []
        for step in kept:
            if isinstance(step, Compute):
                merged += more.pop(step.op, ())
            merged.append(step)
        return (*merged, *more.pop(len(self._workload.ops), ()))

    def _without_stale(
        self, steps: Sequence[Step], margin: float, more: dict[int, list[Step]]
    ) -> list[Step]:
        """Return the steps without moves that would bring an old value back, and add to ``more`` what replaces them."""
        link = f"{self._tier}->{self._own}"
        used: dict[str, list[int]] = {name: [] for name in self._shared}
        for i, step in enumerate(steps):
            if isinstance(step, (Compute, Recompute)):
                op = step.op if isinstance(step, Compute) else step.source
                is_here = isinstance(step, Recompute) or self._sites[op] == self._own
                for name in self._workload.ops[op].reads if is_here else ():
                    if name in used:
                        used[name].append(i)
        behind: dict[str, list[Step]] = {name: [] for name in self._shared}
        ahead: dict[str, list[Step]] = {name: [] for name in self._shared}
        kept: list[Step] = []
        for i, step in enumerate(steps):
            name = getattr(step, "tensor", "")
            if name in used:
                if i > used[name][-1]:
                    behind[name].append(step)
                    goes = isinstance(step, Release) and step.op <= self._shared[name].ops[0]
                    kept += [step] if goes else []
                    continue
                if i < used[name][0]:
                    ahead[name].append(step)
            if name in used and isinstance(step, Reload):
                kept.append(replace(step, link=link))
            else:
                kept.append(step)
        for name, group in self._shared.items():
            first = steps[used[name][0]]
            self._bring_back(name, group, behind[name], ahead[name], first, margin, more)
        return kept

    def _bring_back(
        self,
        name: str,
        group: UpdateGroup,
        behind: Sequence[Step],
        ahead: Sequence[Step],
        first: Step,
        margin: float,
        more: dict[int, list[Step]],
    ) -> None:
        """Add what a parameter does around its update.

        Args:
            name: of the parameter.
            group: of its update.
            behind: its moves behind its last use.
            ahead: its moves ahead of its first one.
            first: that one.
            margin: of the time until it may come back.
            more: gets the steps, by the op before which they stand.
        """
        size, end, at = self._sizes[name], len(self._workload.ops), group.ops[0]
        if not any(isinstance(step, Release) and step.op <= at for step in behind):
            more[at].insert(0, Release(op=at, tensor=name))
        if any(isinstance(step, Reload) for step in ahead):
            return
        asked = next((step.op for step in behind if isinstance(step, Reload)), 0)
        done_s = self._done_s[name]
        ready = end
        if margin is not _LAST:
            begun_s = self._clock[at]
            ready = bisect_left(self._clock, begun_s + margin * (done_s - begun_s), 0, end)
        back = max(asked, ready, group.ops[-1] + 1)
        more[back].append(
            Reload(op=back, tensor=name, link=f"{self._tier}->{self._own}", size_bytes=size)
        )
        if not any(isinstance(step, Wait) for step in ahead):
            more[first.op].append(Wait(op=first.op, tensor=name))
