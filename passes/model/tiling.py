"""Forms: the ways to divide a workload that are planned, and the choice among their plans.

Which forms there are depends on the workload alone, never on the budget, and a form is left out only
when a bound on its time says that it cannot win: so a larger budget is never slower. Forms of very many
weights are left out as well where what is known is close to what no form beats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from gascompile.core.errors import InfeasiblePlanError
from gascompile.core.machine import Machine
from gascompile.core.sizes import MIB
from gascompile.core.workload import Workload
from gascompile.cost_models.formulas.gathers import (
    gather_link,
    gather_tiers,
    gather_time_s,
)
from gascompile.passes.bounds.certify import Proof
from gascompile.passes.bounds.prove import quick_proof
from gascompile.passes.graph.divide import Division, divide, division_of
from gascompile.passes.model.effort import Effort
from gascompile.passes.model.problem import Problem
from gascompile.passes.model.ways import ways_of
from gascompile.passes.plan.feasible import feasible
from gascompile.passes.search.relaxed_place import relaxed_place
from gascompile.passes.search.schedule import Schedule
from gascompile.passes.search.strategies import MANY_WEIGHTS

_TILE_BYTES = (256 * MIB, 64 * MIB, 16 * MIB, 4 * MIB)
_MOST_TILES = 1536
"""Of all tiles of a form: what takes more is planned with fewer weights divided, the largest."""
_LARGE_FORM = 400
"""Weights of a form above which it is not planned for less than the gap. [Empirical] Forms of a Llama of 1.1B have 200
and of 70B 720 and more: the plan of the latter with 2,048 tokens took 1.9 s, and 10.8 s with all forms of up to 800."""
_ROW_GROUP = 16
"""Tiles have a multiple of so many rows, as matrix kernels like it."""
_WAITED = 0.005
"""Share of the compute time that gathering has to take before rows from a nearer tier are planned for, too."""
_LEAST_GATHER_BYTES = MIB
"""A smaller table is not worth the wait for its rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FormSolution:
    """The best schedule of one form, and what is proven about the form."""

    task: Problem
    schedule: Schedule
    proof: Proof


Solve = Callable[[Problem], FormSolution]


def forms(workload: Workload, machine: Machine) -> list[Workload]:
    """Return the forms of ``workload``: with rows gathered, whole, in large tiles, and in ever smaller ones.

    Where ops wait long for rows from the drive, those that gather come again with rows from RAM.

    A workload that nothing can be divided of has one form, itself.
    """
    table = frozenset(_tables(workload)) if gather_link(machine) else frozenset()
    divisions = [Division(gathered=table), Division()]
    if rows := _tile_rows(workload, _TILE_BYTES[0]):
        divisions.append(Division(tile_rows=rows))
    divisions += [
        Division(tile_rows=rows, gathered=table)
        for tile_bytes in _TILE_BYTES
        if (rows := _tile_rows(workload, tile_bytes))
    ]
    if table and _waits(workload, machine, table):
        divisions += [
            replace(division, gather_tier=tier)
            for tier in gather_tiers(machine)
            for division in divisions
            if division.gathered
        ]
    variants: list[Workload] = []
    for division in divisions:
        form = divide(workload, machine, division)
        if form not in variants:
            variants.append(form)
    return variants


def _waits(workload: Workload, machine: Machine, table: frozenset[str]) -> bool:
    """Whether ops wait so long for rows from the usual tier that another one may be worth its room."""
    sizes = (size for op in workload.ops for name, size in op.gathers.items() if name in table)
    waited_s = sum(gather_time_s(size, machine) for size in sizes)
    compute_s = sum(op.time_s.get(machine.compute_tier, 0.0) for op in workload.ops)
    return waited_s > _WAITED * compute_s


def same_form(workload: Workload, machine: Machine, other: Workload) -> Workload:
    """Return ``workload`` in the form that ``other`` has, so that both name the same tiles and parts."""
    return divide(workload, machine, division_of(other))


def best_form(tasks: Sequence[Problem], solve: Solve, effort: Effort) -> FormSolution:
    """Return the fastest solution of all forms; what is proven of it holds for all of them.

    Args:
        tasks: one per form, in the order in which they are tried; large ones with the lowest bound first.
        solve: plans one form.
        effort: until when the best solution known, once there is one, is returned, and how close to what no form
            beats a solution keeps large forms from being planned.

    Raises:
        InfeasiblePlanError: no form keeps the budget; names the smallest that any of them needs.
    """
    best: FormSolution | None = None
    small = min(len(task.weights) for task in tasks) < MANY_WEIGHTS
    # Of one small form alone the bound is proven later, with the plan at hand.
    proofs = {
        i: quick_proof(task, time_limit_s=0.0 if small and len(tasks) == 1 else effort.left_s())
        for i, task in enumerate(tasks)
    }
    refusals: list[InfeasiblePlanError] = []
    # Of forms that promise the same, the one in the smallest tiles is the easiest to plan well, if not too large.
    for i in sorted(proofs, key=lambda i: (_bound_s(proofs[i]), -i if small else i)):
        if best is not None:
            best_s = best.schedule.seconds
            bound_s = min(map(_bound_s, proofs.values()))
            is_close = best_s - bound_s <= effort.mip_gap * best_s
            is_large = len(tasks[i].weights) > _LARGE_FORM
            if _bound_s(proofs[i]) >= best_s or (is_large and is_close):
                continue
            if effort.left_s() <= 0:
                proofs[i] = replace(proofs[i], timed_out=True)
                continue
        try:
            if best is not None and small:
                proofs[i] = _screen(tasks[i], proofs[i], effort.left_s())
                if _bound_s(proofs[i]) >= best.schedule.seconds:
                    continue
            solution = solve(tasks[i])
        except InfeasiblePlanError as error:
            refusals.append(error)
            del proofs[i]
            continue
        proofs[i] = replace(solution.proof, bound_s=max(solution.proof.bound_s, proofs[i].bound_s))
        if best is None or solution.schedule.seconds < best.schedule.seconds:
            best = solution
    if best is None:
        raise min(refusals, key=lambda error: error.required_bytes)
    proof = replace(
        min(proofs.values(), key=lambda proof: proof.limit_s),
        bound_s=min(map(_bound_s, proofs.values())),
        timed_out=any(proof.timed_out for proof in proofs.values()),
    )
    return replace(best, proof=proof)


def _screen(task: Problem, proof: Proof, time_limit_s: float) -> Proof:
    """Return ``proof`` with the bound of the relaxed program: much less work than to plan the form."""
    feasible(task)
    bounds_s: list[float] = []
    for ways in ways_of(task):
        relaxation = relaxed_place(task, time_limit_s, ways)
        if relaxation is None:
            # What is wrong with the solver shows when the form is planned.
            return proof
        bounds_s.append(relaxation.bound_s)
    return replace(proof, bound_s=max(proof.bound_s, min(bounds_s)))


def _bound_s(proof: Proof) -> float:
    return max(proof.limit_s, proof.bound_s)


def _tables(workload: Workload) -> Iterator[str]:
    sizes = {tensor.name: tensor.size_bytes for tensor in workload.tensors}
    for op in workload.ops:
        for name, needed_bytes in op.gathers.items():
            if name in op.reads and max(needed_bytes, _LEAST_GATHER_BYTES) < sizes[name]:
                yield name


def _tile_rows(workload: Workload, tile_bytes: int) -> dict[str, int]:
    """Return the rows of a tile for the weights larger than ``tile_bytes``, the largest ones first."""
    sizes = {tensor.name: tensor.size_bytes for tensor in workload.tensors}
    rows_of: dict[str, int] = {}
    for op in workload.ops:
        rows_of.update(op.splits)
    by_size: dict[int, list[str]] = {}
    for name in rows_of:
        if sizes[name] > tile_bytes:
            by_size.setdefault(sizes[name], []).append(name)
    tile_rows: dict[str, int] = {}
    num_tiles = 0
    for size_bytes in sorted(by_size, reverse=True):
        for name in by_size[size_bytes]:
            tile_rows[name] = _rows(rows_of[name], size_bytes, tile_bytes)
            num_tiles += -(-rows_of[name] // tile_rows[name])
        if num_tiles > _MOST_TILES:
            return {
                name: rows for name, rows in tile_rows.items() if name not in by_size[size_bytes]
            }
    return tile_rows


def _rows(num_rows: int, size_bytes: int, tile_bytes: int) -> int:
    """Return the rows of each tile: as few tiles as ``tile_bytes`` allows, all about as large."""
    row_bytes = size_bytes // num_rows
    num_tiles = -(-num_rows // max(1, tile_bytes // row_bytes))
    rows = -(-num_rows // num_tiles)
    return min(num_rows, -(-rows // _ROW_GROUP) * _ROW_GROUP)
