"""What a first call begins before its plan is whole: weights that stay are loaded while kernels are compiled.

Compilers take seconds of one processor, in which the drive, which most of a first run waits for, would be idle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gascompile.api.open_units import OpenUnits
from gascompile.api.unit import Unit
from gascompile.capture.calls import Call
from gascompile.core.errors import PlanMismatchError
from gascompile.runtime.memory.lasting_accounts import moves_lasting


@contextmanager
def started_ahead(of: OpenUnits, *, is_alone: bool) -> Iterator[Callable[[Unit], None]]:
    """Give the body a function that opens the session of a new plan; if the body raises, that is closed again.

    Args:
        of: the plans that hold memory. Where one does, there is no room for another's.
        is_alone: whether nobody else uses the budget, or has to open the plan at the same time.
    """
    has_room = is_alone and of.session is None

    def begin(unit: Unit) -> None:
        plan = unit.bundle.plan
        # A session that moves states takes them from the model, which is still looked at.
        if has_room and plan.machine.compute_backend == "cpu" and not moves_lasting(plan):
            of.begin(unit)

    try:
        yield begin
    except BaseException:
        if has_room:
            of.close()
        raise


def require_made_for(unit: Unit, call: Call) -> Unit:
    """Return a plan; raise ``PlanMismatchError`` where it does not fit the call that it was made for."""
    if (why_not := unit.misfit(call.leaves, call.spec)) is not None:
        raise PlanMismatchError(
            f"{why_not.reason}, though it was made for this call: its arguments change as a container of theirs is "
            "taken apart. Pass tensors in lists or dicts, or copies of them that are contiguous"
        )
    return unit
