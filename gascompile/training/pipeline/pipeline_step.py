"""Pipeline step: what the ranks of a pipeline do around each run of a training step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch.utils import _pytree as pytree

from gascompile.core import serial
from gascompile.core.errors import RankMismatchError, UnsupportedOpError
from gascompile.core.ranks import MICROSECOND
from gascompile.core.reports import RunReport
from gascompile.core.value_digests import digest_of
from gascompile.distributed.ranks import Ranks
from gascompile.runtime.collectives.exchange import exchanging
from gascompile.training.capture.rank_loss import RankLoss
from gascompile.training.capture.traced_loss import LossFunction
from gascompile.training.pipeline.pipeline import Pipeline
from gascompile.training.rank_step import RankStep
from gascompile.training.settings import Settings
from gascompile.training.state.train_state import States
from gascompile.training.unit import StepUnit


class PipelineStep(RankStep):
    """The ranks of one training step, each of which runs a stage of the model on the rows of all."""

    def __init__(self, ranks: Ranks, loss_fn: LossFunction) -> None:
        """Have no stages yet."""
        super().__init__(ranks, RankLoss(loss_fn, ranks.layout.size), "equal")
        self.pipeline = self._pipeline = Pipeline(ranks)

    def rows(self) -> NoReturn:
        """Refuse: all ranks take the same batch.

        Raises:
            ValueError: always.
        """
        raise ValueError("the ranks are stages of a pipeline: all of them take the same batch")

    def meet(
        self, unit: StepUnit, batch: Any, hyper: Sequence[torch.Tensor], states: States
    ) -> None:
        """Wait for all ranks before a run, and compare what they are about to do, the batch included.

        Raises:
            RankError: a rank calls something else, has other hyperparameters or another batch, or has failed.
            UnsupportedOpError: the micro-batches' losses are means over unequal numbers of targets.
        """
        stage = self._pipeline.staged[unit.program.program.graph_module]
        options = [tensor.tolist() for tensor in hyper]
        given = states.generation, states.written.number
        counts = [states.num_batches, *given, sorted(states.counts.items())]
        leaves = pytree.tree_leaves(batch)
        shapes = [list(of.shape) for of in leaves if isinstance(of, torch.Tensor)]
        facts = [unit.trains, stage.facts, options, counts, shapes]
        predicted = int(unit.plan.certificate.predicted_s / MICROSECOND)
        number = int(serial.digest(digest_of(leaves))[:15], 16)
        ignored = stage.counter(leaves) if stage.counter is not None else []
        table = self._ranks.compare(
            "the stages, hyperparameters, the number of updates, which values were set, or the sizes of the batch",
            serial.digest(facts).encode(),
            [predicted, number, _number_of(ignored)],
        )
        self._require_same_batch([row[1] for row in table])
        if any(row[2] != table[0][2] or not row[2] for row in table):
            with self.planning():
                raise UnsupportedOpError(
                    f"micro-batches have {[sum(of) for of in ignored]} targets that the loss ignores, or other ranks "
                    "have others, so that its mean over all rows is not the mean of theirs: let each have as many, "
                    "divide by a fixed number in the loss, or train in one process"
                )
        # Each waits for all others: a step takes what all stages of a pipeline take.
        mesh = self._ranks.mesh
        times = [row[0] for row in table]
        firsts = range(0, len(times), mesh.num_stages)
        slowest = max(sum(times[first : first + mesh.num_stages]) for first in firsts)
        self._ranks.expect(slowest * MICROSECOND)

    def _require_same_batch(self, numbers: Sequence[int]) -> None:
        """Refuse batches that differ between the stages of a pipeline; all ranks know of it."""
        size = self._ranks.mesh.num_stages
        for rank, number in enumerate(numbers):
            first = rank - rank % size
            if number != numbers[first]:
                raise RankMismatchError(
                    f"rank {rank} and rank {first} differ in the batch, which is the same on all stages of a "
                    "pipeline: pass each of them the same rows",
                    rank=rank,
                )

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Let the ops of a run send and receive."""
        with exchanging(self._ranks.exchange), self._ranks.in_a_step():
            yield

    def ran(self, unit: StepUnit, report: RunReport) -> None:
        """Learn nothing: rows are not divided."""


def _number_of(ignored: Sequence[Sequence[int]]) -> int:
    """Return what is equal where all micro-batches of all ranks ignore as many targets; 0 where some differ."""
    if any(of != ignored[0] for of in ignored):
        return 0
    return int(serial.digest(ignored[:1])[:15], 16) or 1


def require_plain(settings: Settings) -> None:
    """Refuse options that pipelines do not plan.

    Raises:
        UnsupportedOpError: names it.
    """
    if settings.states != "fp32":
        raise UnsupportedOpError(
            f"states={settings.states!r} is not planned for a pipeline; leave it out"
        )
    if settings.accumulate > 1:
        raise UnsupportedOpError(
            f"accumulate={settings.accumulate}: a pipeline divides its batch into micro-batches by itself; pass "
            "all rows of an update as one batch"
        )
    if settings.on_nan == "locate":
        raise UnsupportedOpError("on_nan='locate' looks at the ops of one process; leave it out")
