"""A schedule as one function of Python, its slots as local variables: what small ops are called with costs least so.

The loop over steps takes some 0.3 us per op for its own bookkeeping, and more for arguments in lists; a function
written out takes a tenth. It is made where a schedule runs again and again, and does the same in the same order, but
for views of what lasts, which are taken once, and for late updates, which run in one call after all else.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import CodeType, TracebackType
from typing import Any

import torch

from gascompile.runtime.run.calls import Changing, Joined, joined
from gascompile.runtime.run.schedule import RunSchedule, RunStep, Value

_RUNS_BEFORE = 2
"""A schedule that runs more often is written out as a function, which takes 12 us per step to make."""
_SHORT_STEP_S = 2e-4
"""[Empirical] Of steps that take longer on average, what the loop itself takes does not show."""
_VIEWS = {torch.t, torch.transpose, torch.permute, torch.unsqueeze, torch.select, torch.detach}
"""Functions that return a view for any strides."""
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

    def ran(
        self, schedule: RunSchedule, time_s: float, lasting: Callable[[], frozenset[int]]
    ) -> None:
        """Take note of a run; a schedule without meters that runs often, each step in little time, is written out.

        ``lasting`` returns the ``id`` of constants whose storages stay what they are. It is not kept: who runs this
        goes with its last user, and what lies on a device with it.
        """
        if schedule is not self._latest:
            self._latest, self._num_runs, self._found = schedule, 0, None
        self._num_runs += 1
        is_wanted = self._num_runs == _RUNS_BEFORE and not schedule.site
        is_wanted = is_wanted and time_s < _SHORT_STEP_S * len(schedule.steps)
        if is_wanted and all(step.meter is None for step in schedule.steps):
            self._found = written_out(schedule, lasting())

    def clear(self) -> None:
        """Let go of what schedules hold."""
        self._latest = self._found = None


def written_out(schedule: RunSchedule, lasting: frozenset[int] = frozenset()) -> Straight:
    """Return the function of a schedule none of whose steps has a meter.

    Args:
        schedule: what it does.
        lasting: ``id`` of constants whose memory is that of one storage for as long as the function is called.
    """
    writer = _Writer(schedule, lasting)
    late = writer.late()
    kept = frozenset(slot for steps in late.values() for step in steps for slot in step.trait.reads)
    for step in schedule.steps:
        if not late or not step.is_late:
            writer.step(step, kept)
    writer.at_once(late)
    return writer.finish()


class _Writer:
    def __init__(self, schedule: RunSchedule, lasting: frozenset[int]) -> None:
        self._schedule = schedule
        made = Counter(step.result for step in schedule.steps)
        self._slots = list(schedule.slots)
        self._begin = [slot for _, slot in schedule.inputs]
        self._begin += [slot for slot in sorted(made) if schedule.slots[slot] is not None]
        self._local = set(made).union(self._begin)
        self._names = _Names(self._slots, self._local)
        fixed = {
            i
            for i, value in enumerate(self._slots)
            # What is out of memory at this time has no views.
            if id(value) in lasting and i not in self._local and value.untyped_storage().nbytes()
        }
        self._fold(fixed, {i for i, count in made.items() if count == 1})
        self._symbols: list[Value] = [
            _Slot(self._names.slot(i), i) for i in range(len(self._slots))
        ]
        self._turned = self._turned_twice()
        self._lines: list[str] = []
        self._steps: list[RunStep] = []
        """Of each line."""

    def _fold(self, fixed: set[int], once: set[int]) -> None:
        """Take views of what lasts now: they stay what they are."""
        free = once - set(self._schedule.outputs)
        for step in self._schedule.steps:
            reads = step.trait.reads
            if (
                step.function in _VIEWS
                and step.result in free
                and reads
                and fixed.issuperset(reads)
            ):
                self._slots[step.result] = step.function(*step.gather(self._slots))
                fixed.add(step.result)
                self._local.discard(step.result)

    def _turned_twice(self) -> set[int]:
        """Return the slots of matrices that are transposed only to be transposed again, and these."""
        readers: dict[int, list[RunStep]] = {}
        for step in self._schedule.steps:
            for slot in step.trait.reads:
                readers.setdefault(slot, []).append(step)
        turned: set[int] = set()
        for step in self._schedule.steps:
            then = readers.get(step.result, [])
            is_pair = step.function is torch.t and len(then) == 1 and then[0].function is torch.t
            if is_pair and step.result not in turned and step.result not in self._schedule.outputs:
                turned.update((step.result, then[0].result))
        return turned & self._local

    def late(self) -> dict[tuple[Joined, tuple[str, ...]], list[RunStep]]:
        """Return the steps that run after all others, by what they share; nothing where one of them cannot."""
        groups: dict[tuple[Joined, tuple[str, ...]], list[RunStep]] = {}
        for step in self._schedule.steps:
            if step.is_late:
                kind = (
                    joined(step.function.function) if isinstance(step.function, Changing) else None
                )
                arguments = step.gather(self._symbols)
                if kind is None or len(arguments) <= max(kind.each, *kind.shared):
                    return {}
                others = {*range(len(arguments))} - {kind.each, *kind.shared}
                if any(arguments[i].number in self._local for i in others):
                    return {}
                shared = tuple(arguments[i].text for i in kind.shared)
                groups.setdefault((kind, shared), []).append(step)
        return groups

    def step(self, step: RunStep, kept: frozenset[int]) -> None:
        """Write a step, which frees nothing that is ``kept`` for later ones."""
        if step.result not in self._local:
            return
        arguments = step.gather(self._symbols)
        call = ", ".join(map(self._names.text, arguments))
        if step.result not in self._turned:
            call = f"{self._names.constant(step.function)}({call})"
        self._line(step, f"v{step.result} = {call}", (s for s in step.frees if s not in kept))

    def at_once(self, late: Mapping[tuple[Joined, tuple[str, ...]], list[RunStep]]) -> None:
        """Write the steps that run after all others."""
        for (kind, shared), steps in late.items():
            calls = [step.function for step in steps if isinstance(step.function, Changing)]
            names = tuple(name for call in calls for name in call.names)
            changed = self._names.constant(calls[0].store.changed)
            self._line(steps[0], f"{changed}({self._names.constant(names)})")
            arguments = [step.gather(self._symbols) for step in steps]
            left_out = {kind.each, *kind.shared}
            rows = [
                tuple(None if i in left_out else self._slots[a.number] for i, a in enumerate(row))
                for row in arguments
            ]
            each = ", ".join(row[kind.each].text for row in arguments)
            call = f"{self._names.constant(kind.prepare(rows))}([{each}], {', '.join(shared)})"
            self._line(steps[0], call)

    def _line(self, step: RunStep, statement: str, frees: Iterable[int] = ()) -> None:
        freed = " = ".join((*(f"v{slot}" for slot in frees if slot in self._local), "None"))
        self._lines.append(_lines((statement, freed)))
        self._steps.append(step)

    def finish(self) -> Straight:
        """Return the function."""
        begin = (f"v{i} = values[{i}]; values[{i}] = None" for i in self._begin)
        outputs = (f"values[{i}] = v{i}" for i in self._schedule.outputs if i in self._local)
        lines = ["def run(values):", _lines(begin, "pass"), *self._lines, _lines(outputs, "pass")]
        space: dict[str, Any] = self._names.space
        exec(compile("\n".join(lines), "<steps of a plan>", "exec"), space)  # noqa: S102 - names of slots alone
        run = space.pop("run")
        return Straight(run, tuple(self._steps), run.__code__)


def _lines(statements: Any, *otherwise: str) -> str:
    lines = [s for s in statements if s != "None"] or [*otherwise]
    return f"    {'; '.join(lines)}"


class _Slot:
    """Stands for the value of a slot where arguments are fetched."""

    __slots__ = ("number", "text")

    def __init__(self, text: str, number: int) -> None:
        self.text, self.number = text, number


class _Names:
    """What the function knows by which name: slots are local variables, constants global ones."""

    def __init__(self, slots: list[Value], local: set[int]) -> None:
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
