"""Certify: the physical limit of a problem and what is proven about a plan's time."""

from __future__ import annotations

from dataclasses import dataclass

from gascompile.ir import Certificate, Machine, SolverStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What no plan of a problem can beat."""

    limit_s: float
    """The physical limit."""
    binding: str
    """What sets it: ``compute`` or a link's name."""
    bound_s: float
    """The solver's dual bound, where it was asked."""
    timed_out: bool
    """The clock ended the search for a better bound."""


def certify(predicted_s: float, proof: Proof, *, solve_s: float, mip_gap: float) -> Certificate:
    """Return the certificate of a plan.

    Args:
        predicted_s: what the replay says.
        proof: what no plan can beat.
        solve_s: seconds spent on planning.
        mip_gap: the gap up to which a plan counts as optimal.
    """
    # Where plan and bound meet, they differ by rounding.
    limit_s = min(proof.limit_s, predicted_s)
    lower_s = min(max(limit_s, proof.bound_s), predicted_s)
    gap = (predicted_s - lower_s) / predicted_s if predicted_s > 0 else 0.0
    status = SolverStatus.OPTIMAL if gap <= mip_gap else SolverStatus.FEASIBLE
    if proof.timed_out and status is not SolverStatus.OPTIMAL:
        status = SolverStatus.TIMEOUT
    return Certificate(
        predicted_s=predicted_s,
        lower_bound_s=lower_s,
        limit_s=limit_s,
        gap=gap,
        status=status,
        solve_s=solve_s,
        binding=proof.binding,
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
