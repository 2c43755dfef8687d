"""Account: what a plan's steps take of each tier and move over each link."""

from __future__ import annotations

from typing import NoReturn

from gascompile.core.errors import PlanVerificationError
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


def require_accounts(plan: Plan) -> None:
    """Return if each place and each link has one account, and nothing in one is less than nothing.

    Raises:
        PlanVerificationError: names the account.
    """
    for listed in (plan.places, plan.links):
        names = [one.name for one in listed]
        if len(set(names)) != len(names):
            _refuse(f"one of {', '.join(map(repr, names))} has two accounts in the plan")
    for place in plan.places:
        if min(place.reserved_bytes, place.beside_bytes) < 0:
            _refuse(
                f"the plan reserves {place.reserved_bytes} bytes of '{place.name}' and takes "
                f"{place.beside_bytes} beside tensors"
            )


def _refuse(message: str) -> NoReturn:
    raise PlanVerificationError(f"{message}; the plan is refused, make it again from its workload")
