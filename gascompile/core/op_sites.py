"""Op sites: where the ops of a plan run, and which of its moves carry values between processors.

Each site is a stream: it runs its ops one after the other, in their order in the plan, whatever the others are
at. What an op elsewhere reads or writes *crosses*, by a copy that goes beside what its link is at, as compute
waits for it. One out of the tier that computes starts when that has come to the step, and both sites wait for its
end: memory is free then. One into that tier starts when both have come to the step, and that tier alone waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gascompile.core.machine import Machine
from gascompile.core.plan import Plan
from gascompile.core.steps import Compute, Offload, Prefetch, Recompute, Release, Reload, Step
from gascompile.core.workload import OpSpec


@dataclass(frozen=True, slots=True)
class OpSites:
    """Where ops run, where some do elsewhere than on the tier that computes."""

    own: str
    of: tuple[str, ...]
    """The site of each op."""
    others: tuple[str, ...]
    """Sites besides ``own``, in the order of the machine's tiers; site ``k`` has the clock ``k + 1``."""
    crossing: frozenset[str]
    """Tensors that ops elsewhere read or write."""

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

    def other_moves(self, plan: Plan) -> list[str]:
        """Return what else a plan's steps move or make again outside of the arena: nothing that crosses."""
        found = []
        for step in plan.steps:
            if isinstance(step, Recompute):
                found.append(plan.ops[step.source].name)
            elif (
                not isinstance(step, Compute)
                and step.address is None
                and not self.is_crossing(step)
            ):
                found.append(step.tensor)
        return found

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


def op_sites(ops: Sequence[OpSpec], sites: Sequence[str], machine: Machine) -> OpSites | None:
    """Return where ops run; ``None`` where all do on the tier that computes."""
    own = machine.compute_tier
    others = tuple(tier for tier in machine.tiers if tier != own and tier in set(sites))
    if not others:
        return None
    crossing = {
        name
        for op, site in zip(ops, sites, strict=True)
        if site != own
        for name in (*op.reads, *op.writes)
    }
    return OpSites(own, tuple(sites), others, frozenset(crossing))


def plan_sites(plan: Plan) -> OpSites | None:
    """Return where the ops of a plan run; ``None`` where all do on the tier that computes."""
    return op_sites(plan.workload.ops, [op.site for op in plan.ops], plan.machine)
