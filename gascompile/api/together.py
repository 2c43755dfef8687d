"""Plans of several calls of one model that share its weights, one arena and one budget.

The first is planned with as much of the budget left free as the others' larger activations need. Each of the others is
then planned onto the arena and the resident weights of the first, so that they take turns without reading those anew.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from gascompile.api.compile import Job
from gascompile.api.device_budget import graphs_room_bytes, placed_bytes
from gascompile.api.unit import Unit
from gascompile.bundles.reuse import CachedPlan
from gascompile.capture.calls import RangedCall, normalize_call
from gascompile.capture.to_program import Capture
from gascompile.core import serial
from gascompile.core.errors import FormatError, InfeasiblePlanError, StorageError
from gascompile.core.program import Program
from gascompile.core.workload import TensorKind, Workload
from gascompile.passes.model.liveness import liveness

if TYPE_CHECKING:
    from gascompile.passes.graph.annotate import Annotation

_log = logging.getLogger("gascompile")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """How plans share a budget; remembered, so that a second start captures nothing."""

    FORMAT: ClassVar[str] = "gascompile.together/1"

    choice: int
    """Which of the lists of calls that were tried fits the budget."""
    reserved_bytes: tuple[int, ...]
    """What each plan leaves to the others."""


@dataclass(frozen=True, kw_only=True)
class _Stage(Job):
    """A job for one of the calls, which captures it once."""

    prefix: str
    """Sets the constants of this program apart from those of the others."""
    kwargs: dict[str, Any]
    captures: list[Capture] = field(default_factory=list)
    annotations: list[tuple[Program, tuple[Any, ...], Annotation]] = field(default_factory=list)
    """Made once for each list of sites: several choices and the plan itself ask for them."""

    def capture(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], entry: CachedPlan | None = None
    ) -> Capture:
        """Trace the model unless that has been done."""
        if not self.captures:
            self.captures.append(_prefixed(Job.capture(self, args, kwargs, entry), self.prefix))
        return self.captures[0]

    @property
    def may_wait_half_way(self) -> bool:
        """Whether weights of the first call may; the others find them at the homes that they have for it."""
        return self.arena_of is None

    def unit(self) -> Unit:
        """Return the verified plan, from the cache where it is there."""
        return self.prepare((), self.kwargs)

    def annotated(self, program: Program, sites: Sequence[str] = ()) -> Annotation:
        """Return the costs of a program, from before where they were asked for."""
        asked = (self.config.other_products, *sites)
        for known, before, annotation in self.annotations:
            if known is program and before == asked:
                return annotation
        self.annotations.append((program, asked, Job.annotated(self, program, sites)))
        return self.annotations[-1][-1]

    def workload(self) -> Workload:
        """Return the planning problem of this program."""
        entry = self.entry((), self.kwargs, self.open_checkpoint()) if not self.captures else None
        return self.annotated(self.capture((), self.kwargs, entry).program).workload


def plan_together(
    job: Job,
    choices: Sequence[Sequence[RangedCall]],
    *,
    taken_bytes: Sequence[int] = (),
    again: bool = False,
) -> tuple[int, tuple[Unit, ...]]:
    """Return the plans of the first list of calls that fits the budget, and its number.

    Args:
        job: the model and its budget.
        choices: lists of calls, which begin with the same call: the one that runs most often.
        taken_bytes: of the budget, for others than the plans of each list; nothing by default.
        again: divide the budget anew, as runs have taught more about the memory of ops.

    Raises:
        InfeasiblePlanError: none fits; names the smallest budget for the last.
        CaptureError: the model cannot be traced.
    """
    job = replace(job, in_arena=True)
    taken = [*taken_bytes] or [0] * len(choices)
    first = _stage(job, choices[0][0], 0)
    prints = first.fingerprint((), first.kwargs, first.open_checkpoint())
    shapes = [[repr(call.dynamic_shapes) for call in calls] for calls in choices]
    memo = job.config.cache_dir / "generation" / f"{serial.digest([prints, shapes, taken])}.json"
    known = None if again else _recall(memo)
    if known is not None and known.choice < len(choices):
        others = [_stage(job, call, i) for i, call in enumerate(choices[known.choice][1:], 1)]
        units = _units([first, *others], known.reserved_bytes)
        return known.choice, _made_again(units, job, choices[known.choice], taken[known.choice])
    stages: dict[int, _Stage] = {}
    for choice, calls in enumerate(choices):
        now = [first]
        for i, call in enumerate(calls[1:], 1):
            # The same call in a later list is captured once.
            now.append(stages.setdefault(id(call), _stage(job, call, i)))
        try:
            reserved_bytes = _shares(now, taken[choice])
            units = _units(now, reserved_bytes)
        except InfeasiblePlanError:
            if choice == len(choices) - 1:
                raise
            continue
        _remember(memo, Shares(choice=choice, reserved_bytes=reserved_bytes))
        return choice, _made_again(units, job, calls, taken[choice])
    raise AssertionError("the last choice returns or raises")


def _made_again(
    units: tuple[Unit, ...], job: Job, calls: Sequence[RangedCall], taken_bytes: int
) -> tuple[Unit, ...]:
    """Return plans that know how to be made again."""

    def again() -> tuple[Unit, ...]:
        return plan_together(job, [calls], taken_bytes=[taken_bytes], again=True)[1]

    for unit in units:
        unit.again = again
    return units


def _stage(job: Job, call: RangedCall, number: int) -> _Stage:
    shared = job.parts() | {"dynamic_shapes": call.dynamic_shapes}
    kwargs = normalize_call(job.model, (), call.kwargs)[1]
    return _Stage(**shared, prefix=f"call{number}." if number else "", kwargs=kwargs)


def _units(stages: Sequence[_Stage], reserved_bytes: Sequence[int]) -> tuple[Unit, ...]:
    units: list[Unit] = []
    for stage, left_bytes in zip(stages, reserved_bytes, strict=True):
        base = units[0].bundle.plan if units else None
        reserved = stage.reserved_bytes + left_bytes
        units.append(replace(stage, reserved_bytes=reserved, arena_of=base).unit())
    for unit in units:
        unit.beside = tuple(units)
    return tuple(units)


def _shares(stages: Sequence[_Stage], taken_bytes: int) -> tuple[int, ...]:
    """Return what each plan leaves free for the others: their activations, and states it does not know."""
    workloads = [stage.workload() for stage in stages]
    alive = [liveness(workload) for workload in workloads]
    states: dict[str, int] = {}
    for workload in workloads:
        states |= {t.name: t.size_bytes for t in workload.tensors if t.kind is TensorKind.STATE}
    machine, budget = stages[0].machine, stages[0].budget
    # A job adds its own inputs.
    own_bytes = [
        live.peak_bytes + placed_bytes(workload, machine)
        for live, workload in zip(alive, workloads, strict=True)
    ]
    needed_bytes = taken_bytes + sum(states.values()) + max(own_bytes)
    # The others find what is kept in the first one's arena: they, too, leave the room that its graphs take.
    room_bytes = graphs_room_bytes(workloads[0], machine, budget)
    return tuple(
        needed_bytes - live.state_bytes - own + (room_bytes if number else 0)
        for number, (live, own) in enumerate(zip(alive, own_bytes, strict=True))
    )


def _prefixed(captured: Capture, prefix: str) -> Capture:
    """Return ``captured`` with its constants renamed."""
    if not prefix or not captured.constants:
        return captured
    new = {name: f"{prefix}{name}" for name in captured.constants}
    program = captured.program
    program = replace(
        program,
        bindings={node: new.get(name, name) for node, name in program.bindings.items()},
        bound={new.get(name, name): spec for name, spec in program.bound.items()},
        states=frozenset(new.get(name, name) for name in program.states),
    )
    constants = {new[name]: tensor for name, tensor in captured.constants.items()}
    return replace(captured, program=program, constants=constants)


def _recall(memo: Path) -> Shares | None:
    if not memo.exists():
        return None
    try:
        return serial.load(Shares, memo)
    except (FormatError, StorageError) as error:
        _log.warning("%s cannot be used (%s); planning again", memo, error)
        return None


def _remember(memo: Path, shares: Shares) -> None:
    try:
        serial.write_atomic(memo, serial.dumps(shares))
    except StorageError as error:
        _log.warning("the split of the budget is not kept: %s", error)
