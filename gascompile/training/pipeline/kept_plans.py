"""Kept plans: those of stages, found again by all that they are made of.

What a stage does is cut anew in each process, as all ranks agree on it; its plan is what a search takes its time for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gascompile.core import serial
from gascompile.core.errors import FormatError, PlanVerificationError, StorageError
from gascompile.core.plan import Plan
from gascompile.core.workload import Workload
from gascompile.passes.verify.walk import verify


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptPlan:
    """A plan of a stage, as it is kept."""

    made_of: str
    """The digest of all that it is made of: a file may come to lie under the name of another."""
    plan: Plan


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
    with contextlib.suppress(StorageError, FormatError, PlanVerificationError):
        kept = serial.from_json(KeptPlan, serial.read_json(path))
        verify(kept.plan)
        if kept.made_of == digest:
            return kept.plan
    plan = make()
    # Without a place to keep it, the next job plans again.
    with contextlib.suppress(StorageError):
        serial.write_atomic(path, serial.dumps(KeptPlan(made_of=digest, plan=plan)))
    return plan
