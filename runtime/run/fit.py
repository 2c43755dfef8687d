"""Whether a session is the one that a plan was made for."""

from __future__ import annotations

from gascompile.core.errors import PlanMismatchError, UnsupportedOpError
from gascompile.core.op_sites import plan_sites
from gascompile.core.plan import Plan
from gascompile.runtime.memory.pinned import HOST
from gascompile.runtime.run.session import Session
from gascompile.runtime.transfer.residents import resident_addresses


def require_fit(session: Session, plan: Plan) -> None:
    """Return if ``session`` has the memory, the residents and the processors that ``plan`` says.

    Raises:
        PlanMismatchError: its arena is smaller, or a resident lies elsewhere.
        UnsupportedOpError: ops run where this runtime runs none.
    """
    tier = plan.machine.compute_tier
    known = {tier} if session.device.is_host else {tier, HOST}
    elsewhere = next((op for op in plan.ops if op.site not in known), None)
    if elsewhere is not None:
        raise UnsupportedOpError(
            f"the plan runs op '{elsewhere.name}' on '{elsewhere.site}'; this runtime runs ops on "
            f"{' and '.join(sorted(known))}: plan with op times for these alone"
        )
    sites = plan_sites(plan)
    if sites is not None and (beside := sites.beside(plan, has_store=session.store is not None)):
        raise UnsupportedOpError(
            f"the plan moves '{beside}' out of memory and back beside ops on several sites, which this runtime does "
            "for updates of what rests there alone; plan with op times for one site"
        )
    needed = plan.arena_bytes.get(tier, 0)
    if needed > session.arena.size_bytes:
        raise PlanMismatchError(
            f"the plan needs an arena of {needed} bytes, the session has {session.arena.size_bytes}; "
            "plan both for the same budget"
        )
    for name, address in resident_addresses(plan).items():
        if session.addresses.get(name) != address:
            raise PlanMismatchError(
                f"the plan keeps '{name}' at address {address}, the session at "
                f"{session.addresses.get(name)}; plan with the session's resident weights"
            )
