"""Interval recomputations: what recomputing tensors takes in the interval program, op by op.

An op makes all its results at once, so what is counted is not tensors but recomputations. The ends of the intervals
that an op's results can be recomputed in cut time into cells; z[o,c], in [0, 1], says whether op o runs again in
cell c:

    recomputed[j] <= sum of z[o,c] over the cells c of interval j
    z[o,c] <= sum of z'[o',d], d up to c, + all moved[o',d,t]    where o alone reads the one result of o'

The second row is for inputs that are dead by then: they are made anew, or were moved out and are moved back.
That they might have been kept instead is left out where they are no smaller than the one result of o: then
keeping that result takes no more room, and no time at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from gascompile.passes.bounds.interval_columns import Model
from gascompile.passes.bounds.linear_program import INFINITY


def interval_recompute_columns(model: Model, recomputable: Mapping[int, int]) -> None:
    """Add the columns of recomputations and the rows that bind them to what is recomputed.

    Args:
        model: takes the recomputations with the slots in which they may be; has its columns of decisions already.
        recomputable: op per interval that may be bridged by its recomputation.
    """
    members: dict[int, list[int]] = {}
    for j in model.recomputed:
        members.setdefault(recomputable[j], []).append(j)
    readers = _only_readers(model)
    for op, intervals in members.items():
        spans = {j: (model.plan.intervals[j].start, model.plan.intervals[j].end) for j in intervals}
        ends = sorted({end for span in spans.values() for end in span})
        cells = [(*cell, _add_recompute(model, op, *cell)) for cell in pairwise(ends)]
        for j, (start, end) in spans.items():
            inside = [z for low, high, z in cells if start <= low and high <= end]
            terms = [(model.recomputed[j], 1.0), *((z, -1.0) for z in inside)]
            model.program.add_row(-INFINITY, 0.0, terms)
        _add_inputs(model, readers, op, [(high, z) for _, high, z in cells])


def _only_readers(model: Model) -> Mapping[int, int]:
    """Return the op that reads a passing tensor, where there is just one and nothing else needs it."""
    task = model.plan.task
    users: dict[int, list[int]] = {}
    for op, reads in enumerate(task.reads):
        for tensor in (*reads, *task.writes[op]):
            if op not in task.writers.get(tensor, ()) or len(task.writers[tensor]) > 1:
                users.setdefault(tensor, []).append(op)
    return {
        tensor: ops[0]
        for tensor, ops in users.items()
        if len(ops) == 1 and not task.persistent[tensor] and not task.stays_to_end[tensor]
    }


def _add_recompute(model: Model, op: int, after: int, before: int) -> int:
    """Add the column of a recomputation between two runs."""
    z = model.program.add_variable(0.0, 1.0)
    seconds = model.plan.task.op_times_s[op] / model.unit_s
    model.recomputations.append((z, seconds, model.after(after), model.enter(before)))
    return z


def _add_inputs(
    model: Model, readers: Mapping[int, int], op: int, cells: list[tuple[int, int]]
) -> None:
    """Bind the recomputations of an op, given by where their cells end, to what brings its dead inputs back."""
    task = model.plan.task
    if len(task.writes[op]) != 1:
        return
    for tensor in task.reads[op]:
        source = task.writers.get(tensor, ())
        if (
            readers.get(tensor) != op
            or task.sizes[tensor] < task.sizes[task.writes[op][0]]
            or len(source) != 1
            or len(task.writes[source[0]]) != 1
        ):
            continue
        again = [(end, _add_recompute(model, source[0], op, end)) for end, _ in cells]
        moved = [
            column for end, _ in cells for column in _add_moves(model, tensor, end, len(cells))
        ]
        for number, (_, z) in enumerate(cells):
            back = [column for _, column in again[: number + 1]] + moved
            terms = [(z, 1.0), *((column, -1.0) for column in back)]
            model.program.add_row(-INFINITY, 0.0, terms)
        _add_inputs(model, readers, source[0], again)


def _add_moves(model: Model, tensor: int, before: int, num_cells: int) -> list[int]:
    """Add columns of a tensor that comes back after its last use, written out where that is once at most."""
    task, program = model.plan.task, model.program
    written = task.writers[tensor][0]
    size = task.sizes[tensor] / model.unit_bytes
    columns: list[int] = []
    for number, route in enumerate(task.routes):
        if route.link_out is None:
            continue
        column = program.add_variable(0.0, 1.0)
        columns.append(column)
        ready = model.written if num_cells == 1 else model.begun
        ready.setdefault((number, model.after(written)), []).append((column, size))
        model.due.setdefault((number, model.enter(before)), []).append((column, size))
        load_s = task.load_s(tensor, number) / model.unit_s
        model.transfers.setdefault(route.link_in, []).append((column, load_s))
        if num_cells == 1:
            store_s = task.store_s(tensor, number) / model.unit_s
            model.transfers.setdefault(route.link_out, []).append((column, store_s))
    return columns
