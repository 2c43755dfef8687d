"""A compiled model of several ranks: plans of the first one, one arena for those of a host, and calls in step.

Ranks meet before whatever all of them have to do, so that one that does something else, or fails, is found.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar
from weakref import WeakKeyDictionary

import torch

from gascompile.api.compile import Job
from gascompile.api.compiled import CompiledModel
from gascompile.api.looked_up import LookedUp
from gascompile.api.planning import Args, Kwargs
from gascompile.api.runner import Runner
from gascompile.api.started import started
from gascompile.api.unit import Unit
from gascompile.bundles.content import content_of
from gascompile.bundles.files import Weights
from gascompile.capture.calls import Call
from gascompile.core import serial
from gascompile.core.errors import UnsupportedOpError
from gascompile.core.machine import Machine
from gascompile.core.plan import Plan
from gascompile.core.program import Program, program_marks
from gascompile.core.steps import Offload
from gascompile.cost_models.measure.host import works_with
from gascompile.runtime.collectives.local_ranks import LocalRanks
from gascompile.runtime.memory.lasting_accounts import moves_lasting
from gascompile.runtime.run.executor import Executor
from gascompile.runtime.transfer.routing import drive_of

if TYPE_CHECKING:
    from gascompile.distributed.ranks import Ranks

Made = TypeVar("Made")
_VALUES = (bool, int, float, complex, str, type(None))


@dataclass(frozen=True, kw_only=True)
class RankedJob(Job):
    """A job of several ranks of a host: rank 0 plans, the others have its plans."""

    ranks: LocalRanks
    shares_memory = True

    def look_up(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> LookedUp:
        """Return the plan for one input signature, if the caches of all ranks have the same one."""
        looked_up = super().look_up(args, kwargs)
        known = (
            looked_up.unit if looked_up.unit is not None and _is_shareable(looked_up.unit) else None
        )
        number = int(_digest(known)[:15], 16) if known is not None else -1
        prints = serial.digest(dict(looked_up.entry.prints))
        told = self.ranks.meet("the model, its inputs, the budget or options", prints, (number,))
        agreed = number >= 0 and all(row == [number] for row in told)
        return replace(looked_up, unit=known if agreed else None)

    def fingerprint(self, *given: Any) -> dict[str, str]:
        """Return the digest of every input of the plan, by part; those of one process are other plans."""
        prints = super().fingerprint(*given)
        return prints | {"sharing": serial.digest([prints["sharing"], "local ranks"])}

    def place(self, program: Program, prints: Mapping[str, str]) -> Plan:
        """Return rank 0's plan for what all ranks have captured."""
        self.ranks.meet("the captured program", serial.digest(program_marks(program)))
        raw = self.ranks.from_first(
            "the plan", lambda: serial.dumps(super(RankedJob, self).place(program, prints)).encode()
        )
        return serial.from_json(Plan, serial.parse_json(raw, where="the plan of rank 0"))


class RunnerInStep(Runner):
    """Runs calls that all ranks make in the same order, and does nothing that is of one process."""

    plans_again = False
    _ranks: LocalRanks | Ranks

    def call(self, args: Args, kwargs: Kwargs, taken_bytes: int = 0) -> Any:
        """Run the model; all ranks do."""
        run = partial(super().call, args, kwargs, taken_bytes)
        return run() if self._is_planning else self._turn.take(partial(self._in_step, run))

    def _in_step(self, run: Callable[[], Any]) -> Any:
        """Return what ``run`` returns; the other ranks hear of what it raises."""
        raise NotImplementedError

    def close(self) -> None:
        """Free this rank's part of the memory; all ranks do."""
        super().close()
        self._ranks.close()

    def measure_error(self, *_given: Any) -> NoReturn:
        """Refuse: it runs two plans in sessions of their own."""
        refuse("the error of a form of weights is measured by one process")

    def save(self, *_given: Any) -> NoReturn:
        """Refuse: a bundle's plan is for one process."""
        refuse("a bundle is saved by one process")

    def together(self, *_given: Any) -> NoReturn:
        """Refuse: several plans on one arena are made for one process."""
        refuse("what generates tokens by several plans is for one process")


class RankedRunner(RunnerInStep):
    """Runs calls of a model on the ranks of a host, each with rows of its own."""

    _ranks: LocalRanks

    def __init__(self, ranks: LocalRanks, **given: Any) -> None:
        """Open the first plan, on all ranks; ``given`` is as ``Runner`` takes it."""
        self._ranks = ranks
        self._digests: WeakKeyDictionary[Unit, str] = WeakKeyDictionary()
        super().__init__(ranks=ranks, **given)

    def _in_step(self, run: Callable[[], Any]) -> Any:
        return _noticed(self._ranks, run)

    def _unit_for(self, call: Call) -> Unit:
        if not self._is_planning:
            self._ranks.meet("the inputs of a call", _signature(call))
        return super()._unit_for(call)

    def _activate(self, unit: Unit) -> Executor:
        if unit not in self._digests:
            _require_shareable(unit)
            self._digests[unit] = _digest(unit)
        has = self._open.has(unit)
        told = self._ranks.meet("the plan of a call", self._digests[unit], (int(has),))
        self._ranks.expect(unit.bundle.plan.certificate.predicted_s)
        if [1] * self._ranks.size == [row[0] for row in told]:
            return self._open.use(unit)
        self._open.close()
        self._require_same(unit.bundle.weights)
        return self._open.open(unit)

    def _require_same(self, weights: Weights) -> None:
        """Return once it is known that the weights of all ranks are the same bytes."""
        paths = dict.fromkeys(e.path for of in weights.sources.values() for e in of.extents)
        numbers = {path: number for number, path in enumerate(sorted(paths, key=_name_of))}
        places = [
            [name, of.dtype, list(of.shape), list(of.stride)]
            + [[numbers[e.path], e.offset, e.size_bytes] for e in of.extents]
            for name, of in sorted(weights.sources.items())
        ]
        files = [os.stat(path) for path in numbers]
        own = [[f.st_dev, f.st_ino, f.st_size, f.st_mtime_ns] for f in files]
        number = int(serial.digest(own)[:15], 16)
        what = "where weights lie in their files"
        told = self._ranks.meet(what, serial.digest(places), (number,))
        if any(row != told[0] for row in told):
            contents = [content_of(path, self._cache_dir) for path in numbers]
            self._ranks.meet("the content of the weight files", serial.digest(contents))


def compiled_over(
    ranks: LocalRanks,
    make: Callable[..., Job],
    budget: Any,
    machine: Any,
    given: tuple[tuple[Any, ...], Mapping[str, Any]] | None,
) -> CompiledModel:
    """Return the compiled model of this rank, while the others of its host make theirs.

    Args:
        ranks: of this host.
        make: makes a job of a budget and a machine.
        budget: as ``compile`` takes it; what a machine holds is divided among the ranks.
        machine: as ``compile`` takes it.
        given: the arguments of a call to plan for now.
    """
    works_with(process.number for process in ranks.processes)

    def run() -> CompiledModel:
        return started(_job(ranks, make, budget, machine), given, partial(RankedRunner, ranks))

    return _noticed(ranks, run)


def _noticed(ranks: LocalRanks, run: Callable[[], Made]) -> Made:
    """Return what ``run`` returns; the others hear of what it raises."""
    ranks.begin()
    try:
        return run()
    except BaseException as error:
        ranks.fail(error)
        raise


def _job(ranks: LocalRanks, make: Callable[..., Job], budget: Any, machine: Any) -> RankedJob:
    made: list[Job] = []

    def first() -> bytes:
        made.append(make(budget=budget, machine=machine))
        return serial.dumps(made[0].machine).encode()

    # Measured by one: several at once would measure each other.
    raw = ranks.from_first("the machine", first)
    here = serial.from_json(Machine, serial.parse_json(raw, where="the machine of rank 0"))
    job = made[0] if made else make(budget=budget, machine=here)
    require_of_ranks(job, "several ranks of a host share weights in RAM")
    tier = here.tiers[here.compute_tier]
    if tier.name not in dict(job.budget.sizes):
        whole = job.budget.with_size(tier.name, tier.size_bytes // ranks.size)
        job = replace(job, budget=whole)
    drive = drive_of(os.stat(job.checkpoint_path or _made(job.config.cache_dir)).st_dev)
    told = ranks.meet("drives", numbers=(int(serial.digest(drive)[:15], 16),))
    return RankedJob(
        **job.parts()
        | {
            "machine": _with_drives(here, len({row[0] for row in told})),
            "in_arena": True,
            # Ranges of sizes are guessed from the calls of one process.
            "dynamic_shapes": False if job.dynamic_shapes is None else job.dynamic_shapes,
        },
        ranks=ranks,
    )


def require_of_ranks(job: Job, why: str) -> None:
    """Refuse what several ranks do not do, and ``why`` not on a device; raises ``UnsupportedOpError``."""
    if job.machine.compute_backend != "cpu":
        refuse(why)
    if job.config.weights == "auto":
        refuse("forms of weights are chosen by what one process measures: name one")


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _with_drives(machine: Machine, count: int) -> Machine:
    """Return ``machine`` with the drives of all ranks as one, where each rank reads from its own."""
    link = machine.checkpoint_link()
    if link is None or count < 2:
        return machine
    drives = machine.with_drives(count, (link.source_tier,))
    return replace(drives, name=f"{machine.name}, {count} drives")


def _digest(unit: Unit) -> str:
    return serial.digest(replace(unit.bundle.plan, fingerprint={}))


def _is_shareable(unit: Unit) -> bool:
    plan = unit.bundle.plan
    return not moves_lasting(plan) and not any(isinstance(step, Offload) for step in plan.steps)


def _require_shareable(unit: Unit) -> None:
    if not _is_shareable(unit):
        refuse("the plan moves activations or states out of memory: give a larger budget")


def _signature(call: Call) -> str:
    """Return what has to be equal in the calls of all ranks: all but the values of tensors."""
    leaves = [
        [list(leaf.shape), str(leaf.dtype)]
        if isinstance(leaf, torch.Tensor)
        else repr(leaf)
        if isinstance(leaf, _VALUES)
        else type(leaf).__name__
        for leaf in call.leaves
    ]
    return serial.digest([leaves, str(call.spec)])


def _name_of(path: str) -> str:
    return os.path.basename(path)


def refuse(what: str) -> NoReturn:
    """Raise ``UnsupportedOpError``: one process alone does it."""
    raise UnsupportedOpError(f"{what}; run the model by one process (mesh=False)")
