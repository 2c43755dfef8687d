"""Account: what a plan's steps take of each tier and move over each link."""

from __future__ import annotations

from gascompile.core.plan import Plan
from gascompile.core.steps import Offload, Prefetch, Reload
from gascompile.core.workload import TensorKind
from gascompile.cost_models.formulas.gathers import gather_link_bytes
from gascompile.passes.verify.heap import heap, heap_tensors


def account(plan: Plan) -> tuple[dict[str, int], dict[str, int]]:
    """Return the peak bytes per tier and the bytes moved per link; the plan's own claims are not read.

    Raises:
        PlanVerificationError: a step breaks a rule of the heap, or names a link that does not exist.
    """
    site = plan.machine.compute_tier
    held = heap(plan)
    apart = heap_tensors(plan)
    for name, tensor in plan.tensors.items():
        if tensor.kind == TensorKind.WEIGHT and tensor.home != site and name not in apart:
            held[tensor.home] = held.get(tensor.home, 0) + tensor.size_bytes
    held[site] += plan.arena_bytes.get(site, 0)
    for name, size_bytes in plan.beside_bytes.items():
        held[name] = held.get(name, 0) + size_bytes
    moved = {link.name: 0 for link in plan.machine.links}
    for step in plan.steps:
        if isinstance(step, (Prefetch, Offload, Reload)):
            moved[step.link] += step.size_bytes
    for link, size_bytes in gather_link_bytes(plan.workload.ops, plan.machine).items():
        moved[link] += size_bytes
    return held, moved
