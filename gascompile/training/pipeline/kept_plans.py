"""Kept plans: those of stages, found again by all that they are made of.

What a stage does is cut anew in each process, as all ranks agree on it; its plan is what a search takes its time for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

from gascompile.core import serial
from gascompile.core.errors import FormatError, PlanVerificationError, StorageError
from gascompile.core.plan import Plan
from gascompile.core.workload import Workload
from gascompile.passes.verify.walk import verify


def kept_plan(
    cache_dir: Path, workload: Workload, others: Sequence[object], make: Callable[[], Plan]
) -> Plan:
    """Return the plan that is kept of a workload, or a new one, which is kept.

    Args:
        cache_dir: where it is kept.
        workload: of a stage.
        others: all else that the plan depends on.
        make: makes it.
    """
    digest = serial.digest([workload, *others])
    path = cache_dir / "ranks" / f"stage-{digest[:32]}.json"
    with contextlib.suppress(OSError, FormatError, PlanVerificationError):
        plan = serial.from_json(Plan, serial.parse_json(path.read_bytes(), where=str(path)))
        verify(plan)
        if [op.name for op in plan.ops] == [op.name for op in workload.ops]:
            return plan
    plan = make()
    # Without a place to keep it, the next job plans again.
    with contextlib.suppress(StorageError):
        serial.write_atomic(path, serial.dumps(plan))
    return plan
