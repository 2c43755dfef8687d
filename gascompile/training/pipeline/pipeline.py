"""Pipeline: ranks that each run a stage of a model, and how they agree on the stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx
from torch.utils import _pytree as pytree

from gascompile.core import serial
from gascompile.core.errors import CaptureError, UnsupportedOpError
from gascompile.core.program import marks_of
from gascompile.core.ranks import StageLayout
from gascompile.core.workload import Workload
from gascompile.distributed.ranks import Ranks
from gascompile.distributed.rows import num_rows
from gascompile.distributed.stage_ops import receive
from gascompile.passes.parallel.cut_stages import StageCut
from gascompile.passes.parallel.legs import outstanding_bytes, placeholders
from gascompile.passes.parallel.stage_clock import waits
from gascompile.passes.parallel.stage_graph import Cut
from gascompile.training.capture.joint import Joint
from gascompile.training.pipeline.agreement import StageMemory, agreed_cut
from gascompile.training.pipeline.provable import (
    Counter,
    ignored_counter,
    require_provable,
    split_rows,
    what_differs,
    why_whole,
)
from gascompile.training.pipeline.schedule import orders
from gascompile.training.pipeline.stage_joint import Placed, late_bytes, placed, stage_joint
from gascompile.training.pipeline.stage_problem import (
    Staged,
    holders_of,
    staged_of,
)
from gascompile.training.planning.rank_means import require_mean
from gascompile.training.planning.row_draws import with_more_rows

_MOST_BATCHES = 16  # micro-batches; of 2 stages then 1/17 of the time is idle
_MOST_CALLS = 8000
"""Ops of a rank's program: solvers and runs walk all of them."""
forced: Callable[[int, int], tuple[Sequence[int], int]] | None = None
"""Takes the place of the choice, for tests: returns where stages begin and the number of micro-batches, by the number
of ops and of stages."""
Costs = Callable[[Joint], Workload]
"""Returns the seconds and bytes of a step's ops on this rank's machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineStage:
    """What this rank runs."""

    joint: Joint
    layout: StageLayout
    reserved_bytes: int
    """Of the budget, for what is sent and not yet received."""
    facts: list[object]
    """What has to be the same on all ranks."""
    rows: int
    """Of a micro-batch; 0 where the batch is one."""
    counter: Counter | None
    """Counts targets that a loss ignores."""
    cut: Cut


class Pipeline:
    """One rank of a pipeline."""

    def __init__(self, ranks: Ranks) -> None:
        """Know nothing of the model yet."""
        self._ranks = ranks
        self.mesh = ranks.mesh
        self.rank, self.size = ranks.mesh.stage, ranks.mesh.num_stages
        self.who: Placed | None = None
        """Who has which parameters, from the first plan on."""
        self.choice: StageCut | None = None
        """How the step was divided."""
        self.note = self.whole = ""
        """Why a batch is one micro-batch, where it cannot be several."""
        self.staged: WeakKeyDictionary[fx.GraphModule, PipelineStage] = WeakKeyDictionary()
        """Of each program what it was made from."""

    def __str__(self) -> str:
        """Return what was chosen, in a sentence."""
        why = f"; the batch is one micro-batch: {self.whole}" if self.whole else ""
        return f"{self.note}{why}" or "nothing is planned yet"

    def stage(
        self,
        capture: Callable[[Any], Joint],
        batch: Any,
        costs: Costs,
        memory: StageMemory,
        *,
        trains: bool,
        every: Callable[[Joint], Sequence[str]],
        num_states: int,
    ) -> PipelineStage:
        """Return what this rank runs for a kind of batch.

        Args:
            capture: of a loss over a batch.
            batch: of all rows.
            costs: of ops.
            memory: of this rank.
            trains: False for the loss alone, which then is computed of all rows at once.
            every: names of what the optimizer may update, of a captured step.
            num_states: vectors beside a parameter.

        Raises:
            InfeasiblePlanError: a rank's budget is too small for an op of any division.
            RankError: another rank has failed.
            UnsupportedOpError: what a pipeline would compute otherwise; names it.
        """
        joint = capture(batch) if trains else replace(capture(batch), gradients={})
        require_provable(joint)
        self._ranks.compare("the captured step", serial.digest(_marks(joint)).encode())
        if self.mesh.num_replicas > 1:
            self._require_mean(capture, joint, batch)
        counts = self._counts(joint, batch) if trains else [1]
        staging = staged_of(joint, every(joint))
        divided = partial(self._divided, joint, staging, costs, memory)
        stages, count = divided(counts, num_states)
        while count > 1:
            part, rows = split_rows(batch, count)
            small = self._captured(capture, part)
            if small is not None and _are_alike(staging, own := staged_of(small, every(small))):
                self.whole = what_differs(joint, small, num_rows(batch), count)
                if not self.whole:
                    return self._made(small, own, stages, count, rows, batch, every(small), trains)
                counts = [1]
            counts = [number for number in counts if number != count]
            stages, count = divided(counts, num_states)
        return self._made(joint, staging, stages, 1, 0, batch, every(joint), trains)

    def _require_mean(self, capture: Callable[[Any], Joint], joint: Joint, batch: Any) -> None:
        """Refuse a loss that is no mean over the rows of all pipelines, and warn of one of which that is not known."""

        def more(of: Any) -> tuple[Any, Joint]:
            wide = with_more_rows(of)
            return wide, capture(wide)

        is_first = self.rank == 0 and self.mesh.replica == 0
        require_mean(joint, batch, more, warns=is_first, counts_ignored=True)

    def _captured(self, capture: Callable[[Any], Joint], part: Any) -> Joint | None:
        """Return the step of a micro-batch, ``None`` where it cannot be traced though all rows can."""
        found: Joint | None = None
        self.whole = "the model runs other ops for a micro-batch than for all rows"
        try:
            found = capture(part)
            require_provable(found)
        except CaptureError as error:
            self.whole = f"a micro-batch cannot be traced ({error})"
        marks = _marks(found) if found is not None else None
        self._ranks.compare("a micro-batch's step", serial.digest(marks).encode())
        return found

    def _made(
        self,
        joint: Joint,
        staging: Staged,
        stages: Sequence[int],
        count: int,
        rows: int,
        batch: Any,
        every: Sequence[str],
        trains: bool,
    ) -> PipelineStage:
        legs = staging.legs(stages, self.size, holders_of(staging.forward, stages))
        if self.who is None:
            self.who = placed(legs, joint, every)
        inputs = zip(joint.inputs, pytree.tree_leaves(batch), strict=True)
        divided = {n: rows for n, x in inputs if rows and isinstance(x, torch.Tensor) and x.dim()}
        schedule = orders(self.size, count, has_backward=trains)
        cut = Cut(legs=legs, orders=schedule, num_batches=count, rows=divided)
        counter = None
        if count > 1 or self.mesh.num_replicas > 1:
            counter = ignored_counter(joint, rows or num_rows(batch))
        numbers = [legs.leg_of[node] for node in staging.ops]
        facts = [numbers, count, sorted(self.who.owners.items()), _marks(joint)]
        flying = outstanding_bytes(legs, schedule, self.rank)
        replicas = self.mesh.num_replicas
        own = stage_joint(joint, cut, self.who, self.rank, num_replicas=replicas)
        return PipelineStage(
            joint=own,
            layout=self.who.layout(self.rank, self.mesh.replica),
            reserved_bytes=flying + late_bytes(own),
            facts=facts,
            rows=rows,
            counter=counter,
            cut=cut,
        )

    def with_waits(self, workload: Workload, stage: PipelineStage, site: str) -> Workload:
        """Return a stage's workload in which it waits for others as long as these are predicted to take.

        Args:
            workload: of this rank.
            stage: it is of.
            site: tier that computes.

        Raises:
            RankError: another rank has failed.
        """
        legs, actions = stage.cut.legs, stage.joint.actions
        nodes = stage.joint.graph_module.graph.nodes
        coming = {node.name for node in nodes if node.target is receive}
        tables = torch.zeros(self.mesh.num_replicas, 2 * self.size, dtype=torch.float64)
        table = tables[self.mesh.replica]
        for op in workload.ops:
            action = actions.get(op.name)
            if action is not None and not action.batch and op.name not in coming:
                table[action.leg] += op.time_s[site]
        self._ranks.compare("what the stages of a step take", b"")
        self._ranks.exchange.add(tables)
        seconds = partial(self._ranks.ladder().seconds, divided=False)
        # Pipelines wait for the slowest one before updates.
        waiting = waits(legs, stage.cut.orders, tables.amax(0).tolist(), seconds)
        left = dict(waiting.before_s)
        # What comes after the legs comes when the last rank is done with them.
        end_s = max(waiting.ends_s) - waiting.ends_s[self.rank]
        ops = []
        for op in workload.ops:
            wait_s = 0.0
            if op.name in coming and op.name in actions:
                wait_s = left.pop(actions[op.name], 0.0)
            elif op.name in coming:
                wait_s, end_s = end_s, 0.0
            time_s = op.time_s[site] + wait_s
            ops.append(replace(op, time_s={**op.time_s, site: time_s}) if wait_s else op)
        return replace(workload, ops=tuple(ops))

    def _counts(self, joint: Joint, batch: Any) -> list[int]:
        """Return numbers of micro-batches to choose from."""
        try:
            rows = num_rows(batch)
        except UnsupportedOpError as error:
            self.whole = str(error)
            return [1]
        self.whole = why_whole(joint, rows) if rows > 1 else "it has one row"
        if self.whole:
            return [1]
        calls = len(joint.graph_module.graph.nodes) // self.size + 1
        most = max(min(_MOST_BATCHES, _MOST_CALLS // calls), 1)
        return [n for n in range(1, most + 1) if rows % n == 0]

    def _divided(
        self,
        joint: Joint,
        staging: Staged,
        costs: Costs,
        memory: StageMemory,
        counts: Sequence[int],
        num_states: int,
    ) -> tuple[list[int], int]:
        """Return the stage of each op of the forward pass, and the number of micro-batches."""
        if self.who is not None:
            stages = _as_before(joint, staging, self.who)
            count = self.choice.num_batches if self.choice is not None else 1
            return stages, count if count in counts else max(n for n in counts if n <= count)
        size = staging.num_forward
        if size < self.size:
            raise UnsupportedOpError(f"a model of {size} ops cannot be {self.size} stages")
        if forced is not None:
            begins, count = forced(size, self.size)
            self.note = f"stages begin at ops {list(begins)}, {count} micro-batches, as was asked"
            return stages_of(begins, size), max(n for n in counts if n <= count)
        workload = costs(joint)
        names = {p: name for p, name in joint.bound.items() if name in joint.gradients}
        of_ops = names, workload, num_states
        choice, self.note = agreed_cut(
            self._ranks, staging, of_ops, memory, counts, has_backward=True
        )
        self.choice = choice
        return stages_of(choice.begins, size), choice.num_batches


def _marks(joint: Joint) -> list[object]:
    """Return what has to be equal in the captures of all ranks."""
    marks = marks_of(joint.graph_module.graph)
    return [*marks, sorted(joint.bound.items()), sorted(joint.gradients)]


def stages_of(begins: Sequence[int], size: int) -> list[int]:
    """Return the stage of each of ``size`` ops, by the first op of each stage."""
    return [sum(begin <= place for begin in begins) - 1 for place in range(size)]


def _are_alike(first: Staged, second: Staged) -> bool:
    """Return whether two captures have the same ops, so that stages of the one are those of the other."""
    one, other = ([str(node.target) for node in of.forward] for of in (first, second))
    return one == other


def _as_before(joint: Joint, staging: Staged, who: Placed) -> list[int]:
    """Return the stages of another step's ops, by who has the parameters that they read.

    Raises:
        UnsupportedOpError: it reads them in another order.
    """
    own, stage, last = set(staging.ops), 0, len(who.held) - 1
    stages = []
    for node in staging.forward:
        names = {joint.bound[s.name] for s in placeholders(node, own) if s.name in joint.bound}
        needed = names & who.owners.keys()
        able = [s for s in range(stage, last + 1) if needed <= who.held[s]]
        if not able:
            raise UnsupportedOpError(
                f"'{min(needed)}' is read in another order than in the step that was planned first, by which stages "
                "have it; close the step and compile one for this batch"
            )
        stage = able[0]
        stages.append(stage)
    stages[-1] = last
    return stages
