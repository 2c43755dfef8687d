"""Account: what a plan's steps take of each tier and move over each link."""

from __future__ import annotations

from gascompile.core.plan import Plan
from gascompile.cost_models.simulate.byte_ranges import refuse
from gascompile.cost_models.simulate.replay import link_bytes
from gascompile.cost_models.simulate.walk import Walk


def account(plan: Plan) -> tuple[dict[str, int], dict[str, int]]:
    """Return the peak bytes per tier and the bytes moved per link; the plan's own claims are not read.

    Raises:
        PlanVerificationError: a step breaks a rule of the walk.
    """
    held = dict(Walk(plan).run().peak)
    for name, size_bytes in (*plan.arena_bytes.items(), *plan.beside_bytes.items()):
        held[name] = held.get(name, 0) + size_bytes
    moved = link_bytes(plan.steps, plan.workload.ops, plan.machine)
    return held, {link.name: moved.get(link.name, 0) for link in plan.machine.links}


def require_accounts(plan: Plan) -> None:
    """Return if each place and each link has one account, and nothing in one is less than nothing.

    Raises:
        PlanVerificationError: names the account.
    """
    for listed in (plan.places, plan.links):
        names = [one.name for one in listed]
        if len(set(names)) != len(names):
            refuse(f"one of {', '.join(map(repr, names))} has two accounts in the plan")
    for place in plan.places:
        if min(place.reserved_bytes, place.beside_bytes) < 0:
            refuse(
                f"the plan reserves {place.reserved_bytes} bytes of '{place.name}' and takes "
                f"{place.beside_bytes} beside tensors"
            )
