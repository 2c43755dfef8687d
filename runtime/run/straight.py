"""A schedule as one function of Python, its slots as local variables: what small ops are called with costs least so.

The loop over steps takes some 0.3 us per op for its own bookkeeping, and more for arguments in lists; a function
written out takes a tenth. It is made where a schedule runs again and again, and does the same in the same order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import CodeType, TracebackType
from typing import Any

from gascompile.runtime.run.schedule import RunSchedule, RunStep, Value

_RUNS_BEFORE = 2
"""A schedule that runs more often is written out as a function, which takes 12 us per step to make."""
_SHORT_STEP_S = 2e-4
"""[Empirical] Of steps that take longer on average, what the loop itself takes does not show."""
_LINES_BEFORE = 2
"""Of the function: its name, and the inputs."""


@dataclass(frozen=True, slots=True)
class Straight:
    """A schedule that is written out. Called with the slots, it fills those of the outputs."""

    run: Callable[[list[Value]], None]
    steps: tuple[RunStep, ...]
    code: CodeType

    def where(self, error: BaseException, values: list[Value]) -> int:
        """Return the op that raised ``error``, and fill ``values`` with what was alive then."""
        frame, line = _frame_of(error.__traceback__, self.code)
        if frame is None:
            return self.steps[0].op if self.steps else 0
        for name, value in frame.items():
            if name.startswith("v") and name[1:].isdigit():
                values[int(name[1:])] = value
        number = min(max(line - 1 - _LINES_BEFORE, 0), len(self.steps) - 1)
        return self.steps[number].op


class WrittenOut:
    """The schedule that runs again and again, as a function once that pays."""

    def __init__(self) -> None:
        """Know none yet."""
        self._latest: RunSchedule | None = None
        self._num_runs = 0
        self._found: Straight | None = None

    def of(self, schedule: RunSchedule) -> Straight | None:
        """Return what to run in the place of the steps of a schedule, if that is there."""
        return self._found if schedule is self._latest else None

    def ran(self, schedule: RunSchedule, time_s: float) -> None:
        """Take note of a run; a schedule without meters that runs often, each step in little time, is written out."""
        if schedule is not self._latest:
            self._latest, self._num_runs, self._found = schedule, 0, None
        self._num_runs += 1
        is_wanted = self._num_runs == _RUNS_BEFORE and not schedule.site
        is_wanted = is_wanted and time_s < _SHORT_STEP_S * len(schedule.steps)
        if is_wanted and all(step.meter is None for step in schedule.steps):
            self._found = written_out(schedule)

    def clear(self) -> None:
        """Let go of what schedules hold."""
        self._latest = self._found = None


def written_out(schedule: RunSchedule) -> Straight:
    """Return the function of a schedule none of whose steps has a meter."""
    made = {step.result for step in schedule.steps}
    begin = [slot for _, slot in schedule.inputs]
    begin += [slot for slot in sorted(made) if schedule.slots[slot] is not None]
    local = made.union(begin)
    names = _Names(schedule.slots, local)
    symbols: list[Value] = [_Slot(names.slot(i)) for i in range(len(schedule.slots))]
    lines = [
        "def run(values):",
        _lines((f"v{i} = values[{i}]; values[{i}] = None" for i in begin), "pass"),
    ]
    for step in schedule.steps:
        arguments = ", ".join(map(names.text, step.gather(symbols)))
        call = f"v{step.result} = {names.constant(step.function)}({arguments})"
        frees = (f"v{slot}" for slot in step.frees if slot in local)
        lines.append(_lines((call, " = ".join((*frees, "None")))))
    lines.append(_lines((f"values[{i}] = v{i}" for i in schedule.outputs if i in local), "pass"))
    space: dict[str, Any] = names.space
    exec(compile("\n".join(lines), "<steps of a plan>", "exec"), space)  # noqa: S102 - names of slots alone
    run = space.pop("run")
    return Straight(run, schedule.steps, run.__code__)


def _lines(statements: Any, *otherwise: str) -> str:
    found = [s for s in statements if s != "None"] or [*otherwise]
    return f"    {'; '.join(found)}"


class _Slot:
    """Stands for the value of a slot where arguments are fetched."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text


class _Names:
    """What the function knows by which name: slots are local variables, constants global ones."""

    def __init__(self, slots: tuple[Value, ...], local: set[int]) -> None:
        self._slots, self._local = slots, local
        self._numbers = itertools.count()
        self.space: dict[str, Any] = {}

    def slot(self, number: int) -> str:
        if number in self._local:
            return f"v{number}"
        return self.constant(self._slots[number])

    def constant(self, value: Value) -> str:
        if value is None:
            return "None"
        name = f"k{next(self._numbers)}"
        self.space[name] = value
        return name

    def text(self, argument: Value) -> str:
        """Return the expression of an argument with slots inside lists, slices and dicts."""
        if isinstance(argument, _Slot):
            return argument.text
        if type(argument) is list:
            return f"[{', '.join(map(self.text, argument))}]"
        if type(argument) is tuple:
            return f"({', '.join(map(self.text, argument))}{',' if len(argument) == 1 else ''})"
        if isinstance(argument, Mapping):
            items = (f"{key!r}: {self.text(value)}" for key, value in argument.items())
            return f"{{{', '.join(items)}}}"
        if isinstance(argument, slice):
            bounds = (argument.start, argument.stop, argument.step)
            return f"slice({', '.join(map(self.text, bounds))})"
        return self.constant(argument)


def _frame_of(traceback: TracebackType | None, code: CodeType) -> tuple[dict[str, Any] | None, int]:
    while traceback is not None:
        if traceback.tb_frame.f_code is code:
            return traceback.tb_frame.f_locals, traceback.tb_lineno
        traceback = traceback.tb_next
    return None, 0
