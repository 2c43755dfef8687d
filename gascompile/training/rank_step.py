"""Rank step: what several ranks do around each run of a training step, and nothing where there is one."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import fx, nn

from gascompile.bundles.content import require_same_files
from gascompile.bundles.reuse import CachedPlan
from gascompile.core import serial
from gascompile.core.content import content_of
from gascompile.core.errors import (
    DeviceError,
    GASCompileError,
    RankError,
    StorageError,
    UnsupportedOpError,
)
from gascompile.core.ranks import MICROSECOND
from gascompile.core.reports import RunReport
from gascompile.cost_models.measure.host import works_with
from gascompile.distributed.balance import Balance
from gascompile.distributed.clocks import RankClock, clock_of
from gascompile.distributed.finding import find_ranks
from gascompile.distributed.ladder import Ladder
from gascompile.distributed.ranks import Ranks
from gascompile.distributed.rows import RowSampler, has_no_rows, num_rows
from gascompile.distributed.together import TimedTogether
from gascompile.runtime.collectives.exchange import exchanging
from gascompile.runtime.memory.pages import Pages
from gascompile.training.capture.rank_loss import RankLoss
from gascompile.training.capture.synchronised_norm import require_synchronised
from gascompile.training.capture.traced_loss import LossFunction
from gascompile.training.division import Attempt, DivisionTrial, RankDivision, divide
from gascompile.training.planning.rank_overlap import gains_beside_ops
from gascompile.training.rank_draws import RankDraws
from gascompile.training.rank_network import known_network
from gascompile.training.rank_programs import (
    number_of_kind,
    number_of_ops,
    require_same_ops,
    sequence_of,
)
from gascompile.training.rank_runs import RankRun, RankRuns
from gascompile.training.rank_values import digest_of, memory_of
from gascompile.training.settings import Settings
from gascompile.training.state.rank_checkpoints import RankCheckpoints, own_bytes
from gascompile.training.state.replicas import ReplicaCost
from gascompile.training.state.train_state import States
from gascompile.training.step_cache import PlannedStep
from gascompile.training.unit import StepUnit

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from gascompile.training.pipeline.pipeline import Pipeline
    from gascompile.training.state.file_values import FileValues

_log = logging.getLogger(__name__)

Rows = Literal["auto", "equal"]
ROWS: tuple[Rows, ...] = ("auto", "equal")


class RankStep:
    """The ranks of one training step, its loss and the rows of each."""

    def __init__(self, ranks: Ranks, loss: RankLoss, rows: Rows) -> None:
        """Begin with equal rows, whatever their number."""
        self._ranks, self.loss, self._policy = ranks, loss, rows
        self._ladder: Ladder | None = None
        self._balance: Balance | None = None
        self._last_rows: list[int] = []
        self.pipeline: Pipeline | None = None
        self.division: RankDivision | None = None
        """Which parameters are divided among the ranks, and why; known from the first plan on."""
        self._marks: WeakKeyDictionary[fx.GraphModule, tuple[list[object], int]] = (
            WeakKeyDictionary()
        )
        self._draws = RankDraws(ranks)
        self._runs, self._waited_s = RankRuns(), 0.0
        self.timing = TimedTogether(ranks.votes, ranks.layout, lambda: ranks.num_compared)
        """Of ops, for plans."""

    def rows(self) -> list[int]:
        """Return how many rows each rank is to have in the next batch.

        Raises:
            ValueError: no batch has come yet.
        """
        if self._policy == "equal":
            raise ValueError(
                "rows='equal' takes it that ranks have as many; leave it out to balance them"
            )
        if self._balance is None:
            raise ValueError(
                "no batch has come yet: call prepare(batch) with this rank's first rows, or the step"
            )
        return list(self._balance.rows)

    @property
    def rank(self) -> int:
        """Return this rank's number."""
        return self._ranks.layout.rank

    def sampler(self, length: int, *, shuffle: bool, seed: int) -> RowSampler:
        """Return a batch sampler for a data set of ``length``; see ``RowSampler``."""
        return RowSampler(length, self.rows, self.rank, shuffle=shuffle, seed=seed)

    def share_values(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Let all ranks begin with rank 0's parameters and buffers, where some rank's are others.

        Raises:
            RankMismatchError: ranks have other models or optimizers.
        """
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        names = {id(tensor): name for name, tensor in tensors.items()}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                for key, value in sorted(optimizer.state.get(parameter, {}).items()):
                    tensors[f"{names.get(id(parameter), '')}:{key}"] = torch.as_tensor(value)
        described = [
            [name, str(t.dtype), list(t.shape), t.device.type] for name, t in tensors.items()
        ]
        groups = [
            [
                [names.get(id(parameter), "") for parameter in group["params"]],
                sorted(key for key in group if key != "params"),
            ]
            for group in optimizer.param_groups
        ]
        kind = type(optimizer).__qualname__
        facts = serial.digest([type(model).__qualname__, described, kind, groups]).encode()
        self._ranks.compare("the model or the optimizer", facts)
        whole = memory_of([t.detach() for t in tensors.values() if t.device.type == "cpu"])
        sizes = serial.digest([memory.numel() for memory in whole]).encode()
        sum_of = int.from_bytes(digest_of(whole)[:7], "little")
        sums = self._ranks.compare("how its tensors lie in memory", sizes, [sum_of])
        if any(row != sums[0] for row in sums):
            _log.info("ranks begin with other values: all take those of rank 0")
            self._ranks.send(whole)

    def require_same_files(self, values: FileValues | None, cache_dir: Path) -> None:
        """Return once it is known that all ranks begin with the same values from files.

        Raises:
            RankMismatchError: they do not.
            StorageError: a file cannot be read.
        """
        paths = [stamp.path for stamp in values.stamps] if values is not None else []
        require_same_files(paths, self._ranks.compare, cache_dir)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Take the other ranks along where something fails here."""
        with self._ranks.together():
            yield

    @contextlib.contextmanager
    def planning(self) -> Iterator[None]:
        """Let all ranks go on where one of them cannot plan: nothing has changed by then."""
        try:
            yield
        except (RankError, StorageError, DeviceError):
            raise
        except (GASCompileError, TypeError, ValueError) as error:
            self._ranks.refuse(error)
            raise

    def require_rows(self, batch: Any) -> None:
        """Refuse a batch without rows before ranks meet for it: the mean over them is no number.

        Raises:
            UnsupportedOpError: it has none, or nobody can say how many.
        """
        if self.pipeline is None and has_no_rows(batch):
            raise UnsupportedOpError(
                f"the batch of rank {self.rank} has no rows; give each rank one at least, as step.rows and "
                "step.sampler do, or leave an incomplete last batch out on all ranks"
            )
        if self._policy != "equal":
            num_rows(batch)

    @contextlib.contextmanager
    def one_by_one(self) -> Iterator[None]:
        """Let one rank of each host do first what the others then find done: to measure the machine, for one."""
        is_first = os.environ.get("LOCAL_RANK", str(self.rank)) == "0"
        with self.together():
            if not is_first:
                self.alike("the first rank of each host")
            yield
            if is_first:
                self.alike("the first rank of each host")

    def meet(
        self, unit: StepUnit, batch: Any, hyper: Sequence[torch.Tensor], states: States
    ) -> None:
        """Wait for all ranks before a run, compare what they are about to do, and weigh this rank's rows.

        Values that one rank alone has read in or written to since the last step, or each rank others, would make ranks
        drift apart: which and how often is compared, too.

        Raises:
            RankError: a rank calls something else, has other hyperparameters, or has failed.
        """
        drawn, is_equal = self._draws.of(unit.graph_module, batch), self._policy == "equal"
        own = drawn.rows if is_equal else num_rows(batch)
        options = [[str(tensor.dtype), serial.raw_digest(content_of(tensor))] for tensor in hyper]
        marked = self._marks.get(unit.graph_module)
        if marked is None:
            marked = sequence_of(unit.program), number_of_ops(unit.program)
            self._marks[unit.graph_module] = marked
        marks, ops = marked
        given = states.generation, states.written.number
        counts = [states.num_batches, *given, sorted(states.pending)]
        facts = [unit.trains, marks, options, sorted(states.counts.items()), counts]
        predicted = int(unit.plan.certificate.predicted_s / MICROSECOND)
        same = [ops, number_of_kind(batch)]
        numbers = [own, predicted, *same, *drawn.numbers, *self._runs.numbers]
        table = self._ranks.compare(
            "what the step does, its hyperparameters, the number of updates, or which values were set and how often",
            serial.digest(facts).encode(),
            numbers,
        )
        rows, predictions, ops_of, kinds, whats, states_of_all, *ran = zip(*table, strict=True)
        require_same_ops(ops_of, kinds)
        if min(rows) < 1:
            raise UnsupportedOpError(
                f"rank {rows.index(min(rows))} has no rows; give each rank one at least"
            )
        self.loss.weight.fill_(1 / len(rows) if is_equal else own / sum(rows))
        self._ranks.expect(max(predictions) * MICROSECOND)
        self._draws.agree([rows, whats, states_of_all])
        self._runs.told(ran, rows, trains=unit.trains)
        if self._policy == "auto" and unit.trains:
            self._learn(list(rows), [time * MICROSECOND for time in ran[0]])

    def _learn(self, rows: list[int], times_s: list[float]) -> None:
        known, before, self._last_rows = self._balance, self._last_rows, rows
        # One batch of another size is what an epoch leaves; a second one is what comes from now on.
        if known is None or sum(rows) == sum(before) != sum(known.rows):
            self._balance = Balance(rows)
        elif sum(before) == sum(known.rows) and known.learn(times_s, before):
            _log.info("rows per rank are %s from the next batch on", known.rows)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Let the ops of a run exchange values."""
        before_s = self._ranks.exchange.time_s
        with exchanging(self._ranks.exchange), self._ranks.in_a_step(), self._draws.running():
            yield
        self._waited_s = self._ranks.exchange.time_s - before_s

    def ran(self, unit: StepUnit, report: RunReport) -> None:
        """Take note of a training step that has run."""
        self._runs.ran(report, self._waited_s, unit.plan.machine.compute_tier)

    @property
    def runs(self) -> tuple[RankRun, ...]:
        """What the training step before the newest took on each rank; none before the second."""
        return self._runs.of_all

    def divided(
        self, attempt: Attempt, sizes: Mapping[str, int], path: Path, gap: float
    ) -> tuple[CachedPlan, PlannedStep, DivisionTrial]:
        """Return this rank's step under the division that all ranks choose, and that; see ``division.divide``."""
        ladder = self.ladder
        gains = partial(gains_beside_ops, busy=ladder.busy, late=ladder.late, gap=gap)
        division = divide(attempt, sizes, self._ranks.compare, path=path, gains=gains)
        self.division = division[2]
        _log.info("%s", self.division)
        return division[0], division[1], self.division.chosen

    def total(self, values: torch.Tensor, what: str) -> torch.Tensor:
        """Return the sum over the ranks of a dense tensor, which is used up; all ranks call it.

        Raises:
            RankError: one does something else, or has failed.
        """
        self._ranks.compare(what, b"")
        self._ranks.exchange.add(values)
        return values

    @property
    def ladder(self) -> Ladder:
        """Return what exchanges take."""
        assert self._ladder is not None, "plans come after keep_network"
        return self._ladder

    def keep_network(self, cache_dir: Path, pages: Pages | None, *, moves: bool) -> None:
        """Find out what exchanges take, for plans; see ``known_network``."""
        self._ladder = known_network(self._ranks, cache_dir, pages, moves=moves)

    @property
    def network(self) -> str:
        """Tells networks apart whose plans and predictions do not hold for each other."""
        return serial.digest(self._ladder)

    def clock(self) -> RankClock:
        """Return how far this rank's clock is ahead of rank 0's; all ranks call it."""
        return clock_of(self._ranks)

    def gathered(self, what: str, data: bytes) -> list[bytes]:
        """Return the bytes of all ranks; see ``Ranks.gather``."""
        return self._ranks.gather(what, data)

    def meet_for(self, what: str, facts: bytes) -> None:
        """Wait until all ranks are here, with the same facts.

        Raises:
            RankError: one does something else, or has failed.
        """
        self._ranks.compare(what, facts)

    def alike(self, what: str, tensors: Sequence[torch.Tensor] = ()) -> None:
        """Wait until all ranks are here, with the same values.

        Raises:
            RankError: one does something else, or has failed.
        """
        self._ranks.compare(what, digest_of(memory_of(tensors)))

    def checkpoints(self, folder: Path) -> RankCheckpoints:
        """Return the checkpoints in a folder, which all ranks ask for."""
        return RankCheckpoints(folder, self._ranks)

    def replica_cost(
        self, states: States, changing: frozenset[str], write_bytes_per_s: float
    ) -> ReplicaCost:
        """Return what it takes to send and write a rank's files once more; the slower end decides."""
        size_bytes = own_bytes(states, changing, self.rank)
        sent_s = self.ladder.seconds(size_bytes, divided=True)
        return ReplicaCost(
            size_bytes=size_bytes, time_s=max(sent_s, size_bytes / write_bytes_per_s)
        )

    def leave(self, error: BaseException | None = None) -> None:
        """Leave the ranks, which end with ``error`` where there is one; idempotent."""
        if error is not None:
            self._ranks.fail(error)
        self._ranks.close()


def joined(
    ranks: Ranks,
    model: nn.Module,
    loss_fn: LossFunction,
    optimizer: torch.optim.Optimizer,
    rows: Rows,
    settings: Settings,
) -> RankStep:
    """Return the step of several ranks, which have the same values from here on.

    Raises:
        RankMismatchError: ranks have other models, optimizers or options.
    """
    require_synchronised(model)
    step = RankStep(ranks, RankLoss(loss_fn, ranks.layout.size), rows)
    with step.together():
        facts = serial.digest([*settings.of_all, rows]).encode()
        step.meet_for(
            "options of the step: on_nan, accumulate, rows, or how gradients are clipped", facts
        )
        step.share_values(model, optimizer)
    return step


def ranks_for(
    mesh: DeviceMesh | None, *, unplanned_optimizer: bool, sites: str, plan: object
) -> Ranks | None:
    """Return the ranks that train together, if there are several.

    Raises:
        UnsupportedOpError: an option that several ranks do not plan.
    """
    ranks = find_ranks(mesh)
    options = {
        "unplanned_optimizer=True": unplanned_optimizer,
        f"sites={sites!r}": sites != "one",
        "plan=": plan is not None,
    }
    option = next((name for name, is_given in options.items() if is_given), None)
    if ranks is not None and option is not None:
        raise UnsupportedOpError(
            f"{option} is for one process, and torchrun has started several; leave it out, or run one"
        )
    if ranks is not None:
        works_with(ranks.processes)
    return ranks
