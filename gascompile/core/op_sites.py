"""Op sites: where the ops of a plan run, and which of its moves carry values between processors.

Each site is a stream: it runs its ops one after the other, in their order in the plan, whatever the others are
at. What an op elsewhere reads or writes *crosses*, by a copy that goes beside what its link is at, as compute
waits for it. One out of the tier that computes starts when that has come to the step, and both sites wait for its
end: memory is free then. One into that tier starts when both have come to the step, and that tier alone waits.

Ops elsewhere may change what lasts, such as parameters, where it rests. What these read crosses behind what its link is
at, as nobody has to wait for it at once: they wait for it by themselves. Who brings back what they have changed waits
for them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from gascompile.core.machine import Machine
from gascompile.core.plan import Plan
from gascompile.core.steps import Compute, Offload, Prefetch, Recompute, Release, Reload, Step
from gascompile.core.workload import PERSISTENT, OpSpec


@dataclass(frozen=True, slots=True)
class OpSites:
    """Where ops run, where some do elsewhere than on the tier that computes."""

    own: str
    of: tuple[str, ...]
    """The site of each op."""
    others: tuple[str, ...]
    """Sites besides ``own``, in the order of the machine's tiers; site ``k`` has the clock ``k + 1``."""
    crossing: frozenset[str]
    """Tensors that ops elsewhere read or write, but for what lasts."""
    changed: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """Of each op elsewhere that changes what lasts, what that is."""
    queued: frozenset[str] = frozenset()
    """What these read: it crosses in its link's turn."""

    def clock(self, op: int) -> int:
        """Return the number of the clock that an op goes by; 0 is that of the tier that computes."""
        site = self.of[op]
        return 0 if site == self.own else 1 + self.others.index(site)

    def is_crossing(self, step: Step) -> bool:
        """Return whether a step is of a move between sites."""
        return (
            not isinstance(step, (Compute, Recompute, Prefetch, Release))
            and step.address is None
            and step.tensor in self.crossing
        )

    def beside(self, plan: Plan, *, has_store: bool) -> str:
        """Return something that a plan moves or makes again outside of the arena, and that does not cross, if any.

        Where a store holds what lasts, as in training steps, that is something an op elsewhere makes; such ops may
        change what the store has on their site, and do nothing else.
        """
        if has_store:
            strange = (i for i in range(len(self.of)) if self.clock(i) and i not in self.changed)
            return next((plan.ops[i].name for i in strange), "")
        for step in plan.steps:
            if isinstance(step, Recompute):
                return plan.ops[step.source].name
            if (
                not isinstance(step, Compute)
                and step.address is None
                and not self.is_crossing(step)
            ):
                return step.tensor
        return ""

    def partner(self, step: Offload | Reload, machine: Machine) -> int:
        """Return the clock at the other end of a move between sites, negative for one that comes from there.

        It is 0 for a move that is none between sites.
        """
        link, is_out = machine.link(step.link), isinstance(step, Offload)
        end = link.target_tier if is_out else link.source_tier
        if not self.is_crossing(step) or end not in self.others:
            return 0
        clock = 1 + self.others.index(end)
        return clock if is_out else -clock


def op_sites(
    ops: Sequence[OpSpec],
    sites: Sequence[str],
    machine: Machine,
    lasting: Collection[str] = (),
) -> OpSites | None:
    """Return where ops run; ``None`` where all do on the tier that computes.

    Args:
        ops: of an iteration.
        sites: of each.
        machine: whose tiers they are.
        lasting: tensors that outlive iterations.
    """
    own = machine.compute_tier
    others = tuple(tier for tier in machine.tiers if tier != own and tier in set(sites))
    if not others:
        return None
    away = {i: op for i, (op, site) in enumerate(zip(ops, sites, strict=True)) if site != own}
    crossing = {name for op in away.values() for name in (*op.reads, *op.writes)}
    changed = {
        i: names
        for i, op in away.items()
        if (names := tuple(name for name in dict.fromkeys(op.writes) if name in lasting))
    }
    return OpSites(
        own,
        tuple(sites),
        others,
        frozenset(crossing.difference(lasting)),
        changed,
        frozenset(name for i in changed for name in ops[i].reads).difference(lasting),
    )


def plan_sites(plan: Plan) -> OpSites | None:
    """Return where the ops of a plan run; ``None`` where all do on the tier that computes."""
    sites = [op.site for op in plan.ops]
    return op_sites(plan.workload.ops, sites, plan.machine, lasting_of(plan))


def lasting_of(plan: Plan) -> frozenset[str]:
    """Return the tensors of a plan that outlive iterations."""
    return frozenset(t.name for t in plan.workload.tensors if t.kind in PERSISTENT)
