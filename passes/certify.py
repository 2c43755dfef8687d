"""Certify: the physical limit of a problem and what is proven about a plan's time."""

from __future__ import annotations

from gascompile.ir import Certificate, Machine, SolverStatus


def certify(
    predicted_s: float,
    *,
    limit: tuple[float, str],
    bound_s: float,
    timed_out: bool,
    solve_s: float,
    mip_gap: float,
) -> Certificate:
    """Return the certificate of a plan.

    Args:
        predicted_s: what the replay says.
        limit: ``physical_limit``'s answer.
        bound_s: the solver's dual bound.
        timed_out: the solver's clock ran out before its gap closed.
        solve_s: seconds spent on planning.
        mip_gap: the gap up to which a plan counts as optimal.
    """
    limit_s, binding = limit
    # A bound meets the time it bounds up to the solver's tolerance.
    lower_s = min(max(limit_s, bound_s), predicted_s)
    gap = (predicted_s - lower_s) / predicted_s if predicted_s > 0 else 0.0
    status = SolverStatus.OPTIMAL if gap <= mip_gap else SolverStatus.FEASIBLE
    if timed_out and status is not SolverStatus.OPTIMAL:
        status = SolverStatus.TIMEOUT
    return Certificate(
        predicted_s=predicted_s,
        lower_bound_s=lower_s,
        limit_s=min(limit_s, predicted_s),
        gap=gap,
        status=status,
        solve_s=solve_s,
        binding=binding,
    )


def physical_limit(
    compute_s: float, weight_bytes: int, arena_bytes: int, machine: Machine
) -> tuple[float, str]:
    """Return the limit in seconds and what sets it: ``compute`` or a link's name.

    The arena holds at most ``arena_bytes`` of the ``weight_bytes`` that an iteration reads; the rest
    comes over the links, at best over all of them at once.
    """
    links = machine.links_into(machine.compute_tier)
    rate = sum(link.bandwidth_bytes_per_s for link in links)
    unavoidable = max(0, weight_bytes - max(0, arena_bytes))
    transfer_s = unavoidable / rate if links else 0.0
    if transfer_s > compute_s:
        return transfer_s, links[0].name
    return compute_s, "compute"
