"""Verify: replay a plan without the solver and refuse what breaks a budget or a dependency.

The plan's numbers are not trusted: sizes, peaks, link bytes and predicted seconds are derived again
from the workload, the machine and the steps. What the steps may do is said by the one walk over them,
``cost_models.simulate.walk``.
"""

from __future__ import annotations

import math
from itertools import pairwise

from gascompile.core.errors import PlanVerificationError
from gascompile.core.plan import Plan
from gascompile.core.sizes import PAGE_BYTES, format_size, reserve_bytes
from gascompile.core.steps import (
    Compute,
    Evict,
    Fetch,
    Offload,
    Prefetch,
    Recompute,
    Release,
    Reload,
    Wait,
    fetched_to,
    is_push,
)
from gascompile.core.tiles import parse_tile
from gascompile.core.workload import TensorKind
from gascompile.cost_models.formulas.energy import plan_energy
from gascompile.cost_models.formulas.gathers import gather_link, gathered
from gascompile.cost_models.simulate.byte_ranges import refuse
from gascompile.cost_models.simulate.replay import replay_plan
from gascompile.cost_models.simulate.touches import heap_tensors
from gascompile.passes.bounds.certify import EVERYTHING, WEIGHTS
from gascompile.passes.bounds.least_time import least_time
from gascompile.passes.model.liveness import liveness
from gascompile.passes.verify.account import account, require_accounts

_TOLERANCE = 1e-6
"""Share by which numbers of a file may differ from those derived again: sums of another order, written and read."""


def verify(plan: Plan) -> None:
    """Return if ``plan`` can run as it claims.

    Raises:
        PlanVerificationError: names the first offending step or number.
    """
    try:
        liveness(plan.workload)
    except ValueError as error:
        raise PlanVerificationError(f"the plan's workload is inconsistent: {error}") from error
    _check_sizes(plan)
    _check_tensors(plan)
    _check_ops(plan)
    _check_gathers(plan)
    _check_program_order(plan)
    _check_moves(plan)
    _check_accounts(plan)
    _check_certificate(plan)
    _check_energy(plan)


def _check_sizes(plan: Plan) -> None:
    names = [tensor.name for tensor in plan.workload.tensors]
    if len(set(names)) != len(names):
        refuse("two tensors of the workload have the same name")
    for tensor in plan.workload.tensors:
        if tensor.size_bytes < 0:
            refuse(f"tensor '{tensor.name}' has the size {tensor.size_bytes}")


def _check_tensors(plan: Plan) -> None:
    """Check that every tensor is where it may be; residents of a shared arena may be another's."""
    site = plan.machine.compute_tier
    specs = {tensor.name: tensor for tensor in plan.workload.tensors}
    if missing := sorted(specs.keys() - plan.tensors.keys()):
        refuse(f"the plan does not say where tensor '{missing[0]}' lives")
    sources = {link.source_tier for link in plan.machine.links if link.target_tier == site}
    offsite = {op.site for op in plan.ops}
    for name, tensor in plan.tensors.items():
        spec = specs.get(name)
        if spec is None and (tensor.kind != TensorKind.WEIGHT or tensor.address is None):
            refuse(f"the plan places tensor '{name}', which the workload does not have")
        if spec and (spec.size_bytes, spec.kind) != (tensor.size_bytes, tensor.kind):
            refuse(
                f"tensor '{name}' is a {spec.kind} of {spec.size_bytes} bytes in the workload, "
                f"a {tensor.kind} of {tensor.size_bytes} in the plan"
            )
        persists = tensor.kind in (TensorKind.WEIGHT, TensorKind.STATE)
        if tensor.home != site and not persists:
            refuse(f"{tensor.kind} '{name}' lives in tier '{tensor.home}' instead of '{site}'")
        if tensor.home not in (site, *sources, *offsite):
            refuse(f"no link leads from tier '{tensor.home}', the home of '{name}', to '{site}'")
        if tensor.address is not None and (tensor.kind, tensor.home) != (TensorKind.WEIGHT, site):
            refuse(f"tensor '{name}' with home '{tensor.home}' has the address {tensor.address}")


def _check_ops(plan: Plan) -> None:
    if len(plan.ops) != len(plan.workload.ops):
        refuse(f"the plan has {len(plan.ops)} ops, its workload {len(plan.workload.ops)}")
    for op, spec in zip(plan.ops, plan.workload.ops, strict=True):
        if op.name != spec.name:
            refuse(f"op '{spec.name}' of the workload is called '{op.name}' in the plan")
        if op.site not in plan.machine.tiers or op.site not in spec.time_s:
            refuse(f"op '{op.name}' runs on '{op.site}', for which the workload has no time")
        if not _close(op.time_s, spec.time_s[op.site]):
            refuse(
                f"op '{op.name}' takes {op.time_s} s in the plan, {spec.time_s[op.site]} s in the workload"
            )


def _check_gathers(plan: Plan) -> None:
    """Check that the rows an op reads by itself are rows of a weight, and that a link brings them."""
    weights = {t.base for t in map(parse_tile, plan.tensors) if t is not None}
    weights |= {name for name, t in plan.tensors.items() if t.kind == TensorKind.WEIGHT}
    for spec in plan.workload.ops:
        for name, size_bytes in gathered(spec).items():
            if name not in weights or size_bytes < 0:
                refuse(f"op '{spec.name}' gathers {size_bytes} bytes of '{name}', no weight")
            if size_bytes and gather_link(plan.machine, spec.gather_tier) is None:
                refuse(f"op '{spec.name}' gathers rows of '{name}', but no link brings them")
            if spec.gather_tier and plan.tensors[name].home != spec.gather_tier:
                refuse(f"op '{spec.name}' gathers rows of '{name}' where it does not lie")


def _check_program_order(plan: Plan) -> None:
    upcoming = 0
    for i, step in enumerate(plan.steps):
        if step.op != upcoming:
            refuse(f"step {i} names op {step.op}, but stands before op {upcoming}", i)
        if isinstance(step, Compute):
            upcoming += 1
    if upcoming != len(plan.ops):
        refuse(f"the steps run {upcoming} of {len(plan.ops)} ops")


def _check_moves(plan: Plan) -> None:
    """Check each prefetch against its tensor's home, size and link, and every address."""
    site = plan.machine.compute_tier
    on_heap, middle = heap_tensors(plan), fetched_to(plan.steps)
    arena_bytes = plan.arena_bytes.get(site, 0)
    links = {link.name: link for link in plan.machine.links}
    for name, tensor in plan.tensors.items():
        if tensor.address is not None:
            _check_address(name, tensor.address, tensor.size_bytes, arena_bytes, -1)
    for i, step in enumerate(plan.steps):
        # What goes half the way is checked where the arenas in between are walked.
        if isinstance(step, (Compute, Recompute, Fetch, Evict)) or _is_heap_step(step, on_heap):
            continue
        moved = plan.tensors.get(step.tensor)
        if isinstance(step, (Offload, Reload)) or step.address is None:
            refuse(f"step {i} moves '{step.tensor}', which is not on the heap", i)
        if moved is None or moved.kind != TensorKind.WEIGHT or moved.home == site:
            refuse(f"step {i} moves '{step.tensor}', which is not a streamed weight", i)
        _check_address(step.tensor, step.address, moved.size_bytes, arena_bytes, i)
        if isinstance(step, Prefetch):
            link = links.get(step.link)
            source = middle[step.tensor] if is_push(step, middle) else moved.home
            if link is None or (link.source_tier, link.target_tier) != (source, site):
                refuse(
                    f"step {i} reads '{step.tensor}' over '{step.link}', but it goes from "
                    f"'{source}' to '{site}'",
                    i,
                )
            if step.size_bytes != moved.size_bytes:
                refuse(
                    f"step {i} reads {step.size_bytes} bytes of '{step.tensor}', "
                    f"which has {moved.size_bytes}",
                    i,
                )


def _is_heap_step(step: Prefetch | Wait | Release | Offload | Reload, heap: frozenset[str]) -> bool:
    return step.address is None and step.tensor in heap


def _check_address(name: str, address: int, size_bytes: int, arena_bytes: int, step: int) -> None:
    if address < 0 or address % PAGE_BYTES:
        refuse(f"'{name}' has the address {address}, which is no multiple of {PAGE_BYTES}", step)
    if address + reserve_bytes(size_bytes) > arena_bytes:
        refuse(
            f"'{name}' at {address} takes {reserve_bytes(size_bytes)} bytes and ends beyond "
            f"the arena of {arena_bytes}",
            step,
        )


def _check_accounts(plan: Plan) -> None:
    """Check peaks and link bytes against what the steps take and move, and the peaks against the budget."""
    site = plan.machine.compute_tier
    arenas = {site, *fetched_to(plan.steps).values()}
    if set(plan.arena_bytes) != arenas:
        wanted = " and ".join(f"'{name}'" for name in sorted(arenas))
        refuse(f"the plan has arenas in {sorted(plan.arena_bytes)} instead of {wanted} alone")
    require_accounts(plan)
    reserved = {place.name: place.reserved_bytes for place in plan.places}
    held, moved = account(plan)
    if dict(plan.peak_bytes) != held:
        refuse(f"the plan claims peaks of {dict(plan.peak_bytes)} bytes, its steps need {held}")
    for tier, size_bytes in held.items():
        limit = plan.budget_bytes.get(tier, 0) - reserved.get(tier, 0)
        if size_bytes > limit:
            refuse(
                f"tier '{tier}' would hold {format_size(size_bytes)} ({size_bytes} bytes), "
                f"its budget leaves {format_size(limit)} ({limit} bytes)"
            )
    if dict(plan.link_bytes) != moved:
        refuse(f"the plan claims to move {dict(plan.link_bytes)} bytes, its steps move {moved}")


def _check_certificate(plan: Plan) -> None:
    certificate = plan.certificate
    numbers = (
        certificate.predicted_s,
        certificate.lower_bound_s,
        certificate.lower_bound_all_s,
        certificate.limit_s,
        certificate.gap,
        certificate.solve_s,
    )
    if not all(math.isfinite(number) and number >= 0 for number in numbers):
        refuse(f"the certificate holds {numbers}")
    seconds = replay_plan(plan).seconds
    if not _close(seconds, certificate.predicted_s):
        refuse(f"the plan predicts {certificate.predicted_s} s, its replay takes {seconds} s")
    limit_s, _ = least_time(plan.workload, plan.machine, plan.budget_bytes)
    in_order = (limit_s, certificate.limit_s, certificate.lower_bound_s, certificate.predicted_s)
    if any(a > b * (1 + _TOLERANCE) for a, b in pairwise(in_order)):
        refuse(f"limit, lower bound and prediction are not in order: {in_order}")
    if certificate.lower_bound_all_s > certificate.lower_bound_s * (1 + _TOLERANCE):
        refuse(
            f"the bound of everything, {certificate.lower_bound_all_s} s, is above that of {certificate.holds_over}"
        )
    if certificate.holds_over not in {WEIGHTS, EVERYTHING}:
        refuse(f"the certificate holds over '{certificate.holds_over}', which no bound does")
    gap = (
        (certificate.predicted_s - certificate.lower_bound_s) / certificate.predicted_s
        if certificate.predicted_s
        else 0.0
    )
    if abs(gap - certificate.gap) > _TOLERANCE:
        refuse(f"the certificate claims a gap of {certificate.gap}, its numbers give {gap}")
    names = {"compute", *(link.name for link in plan.machine.links)}
    if certificate.binding not in names:
        refuse(f"the certificate names the resource '{certificate.binding}', which does not exist")


def _check_energy(plan: Plan) -> None:
    """Check the joules that a plan claims; older ones claim none."""
    claimed, modelled = plan.energy, plan_energy(plan)
    if claimed is None or (modelled is not None and _close(claimed.joules, modelled.joules)):
        return
    refuse(f"the plan claims {claimed.joules} joules, its machine's model gives {modelled}")


def _close(a: float, b: float) -> bool:
    return abs(a - b) <= _TOLERANCE * max(abs(a), abs(b))
