"""Schedule: in which order a rank runs legs of micro-batches, by the schedules of ``torch.distributed.pipelining``."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace
from typing import Any

from torch.distributed.pipelining.schedules import Schedule1F1B, ScheduleGPipe

from gascompile.passes.parallel.legs import Action


def orders(num_stages: int, num_batches: int, *, has_backward: bool) -> list[list[Action]]:
    """Return the actions of each rank: forward and backward in turn, which keeps the fewest activations.

    With fewer micro-batches than stages torch has no such schedule, and all forward legs come first.
    """
    if not has_backward:
        ranks = range(num_stages)
        return [[Action(leg=rank, batch=i) for i in range(num_batches)] for rank in ranks]
    kind: Any = Schedule1F1B if num_batches >= num_stages else ScheduleGPipe
    # The order depends on these two numbers alone; an instance would need stages that torch runs.
    numbers: Any = SimpleNamespace(_num_stages=num_stages, _n_microbatches=num_batches)
    table = kind._get_pipeline_order(numbers)
    return [_numbered(table[rank], rank, num_stages) for rank in range(num_stages)]


def _numbered(row: list[Any], rank: int, num_stages: int) -> list[Action]:
    """Return a rank's legs; those of a kind take micro-batches in order, which torch 2.13 counts from 1 on the last."""
    legs = {"F": (rank, count()), "B": (2 * num_stages - 1 - rank, count())}
    kinds = [action.computation_type.value for action in row if action is not None]
    return [Action(leg=legs[k][0], batch=next(legs[k][1])) for k in kinds if k in legs]
