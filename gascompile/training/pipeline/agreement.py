"""Agreement: what all ranks of a pipeline know of each other before they divide a model."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from gascompile.core.errors import InfeasiblePlanError
from gascompile.core.machine import Machine
from gascompile.core.workload import Workload
from gascompile.distributed.ranks import Ranks
from gascompile.passes.parallel.cut_stages import (
    CutProblem,
    StageCut,
    StageOps,
    StageRank,
    cut_stages,
)
from gascompile.training.pipeline.stage_problem import Staged, op_seconds, stage_ops

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """What a rank has for its stage."""

    site: str
    """Tier that computes."""
    budget_bytes: int
    stream_bytes_per_s: float
    """At which values come into memory, and leave it where they do."""
    latency_s: float
    """Of each of them."""

    @staticmethod
    def of(machine: Machine, limit_bytes: int) -> StageMemory:
        """Return what a machine has for a stage, of a budget of ``limit_bytes``."""
        site = machine.compute_tier
        links = [of for of in machine.links if site in (of.source_tier, of.target_tier)]
        return StageMemory(
            site=site,
            budget_bytes=max(limit_bytes, 1),
            stream_bytes_per_s=min((of.bandwidth_bytes_per_s for of in links), default=1.0),
            latency_s=max((of.latency_s for of in links), default=0.0),
        )


def agreed_cut(
    ranks: Ranks,
    staging: Staged,
    costs: tuple[Mapping[str, str], Workload, int],
    memory: StageMemory,
    counts: Sequence[int],
    *,
    has_backward: bool,
) -> tuple[StageCut, str]:
    """Return how the ops are divided, and that in words, the same on all ranks, which call this at the same time.

    Args:
        costs: weights, workload and vectors beside a weight, as ``stage_ops`` takes them.
        counts: numbers of micro-batches to choose from.

    Raises:
        InfeasiblePlanError: a rank's budget is too small for an op of any division.
        RankError: another rank has failed.
    """
    ops, times_s = stage_ops(staging, *costs), op_seconds(staging, costs[1], memory.site)
    problem = _agreed_problem(ranks, ops, times_s, memory, has_backward=has_backward)
    choice = cut_stages(problem, counts)
    if choice is None:
        place = max(range(staging.num_forward), key=ops.least_bytes.__getitem__)
        raise InfeasiblePlanError(
            tier=memory.site,
            limit_bytes=min(of.budget_bytes for of in problem.ranks),
            required_bytes=ops.least_bytes[place] // max(counts),
            op=staging.forward[place].name,
        )
    note = _in_words(problem, choice, "a step" if has_backward else "a call")
    _log.info("%s", note)
    return choice, note


def _agreed_problem(
    ranks: Ranks,
    ops: StageOps,
    times_s: Sequence[float],
    memory: StageMemory,
    *,
    has_backward: bool,
) -> CutProblem:
    """Return the problem with what each rank takes and has, the same on all ranks."""
    ladder, mesh = ranks.ladder().whole, ranks.mesh
    own = [*times_s, memory.budget_bytes, memory.stream_bytes_per_s, memory.latency_s]
    own += [ladder[0].time_s, ladder[-1].time_s]
    table = torch.zeros(mesh.num_replicas, mesh.num_stages, len(own), dtype=torch.float64)
    table[mesh.replica, mesh.stage] = torch.tensor(own, dtype=torch.float64)
    ranks.compare("what the ops of a model take", b"")
    ranks.exchange.add(table)
    # Of the ranks with the same stage, one is for all of them: the slowest, with the least memory.
    most, least = table.amax(0), table.amin(0)
    most[:, -5:-3] = least[:, -5:-3]
    rows = most.tolist()
    return CutProblem(
        ops=ops,
        ranks=[
            StageRank(
                times_s=row[:-5],
                budget_bytes=int(row[-5]),
                stream_bytes_per_s=row[-4],
                latency_s=row[-3],
            )
            for row in rows
        ],
        network_bytes_per_s=ladder[-1].size_bytes / max(row[-1] for row in rows),
        latency_s=max(row[-2] for row in rows),
        has_backward=has_backward,
    )


def _in_words(problem: CutProblem, choice: StageCut, what: str) -> str:
    """Return what was chosen, and what the ranks would take alone; ``what`` is run."""
    count = choice.num_batches
    times = ", ".join(f"{time_s * count:.4g}" for time_s in choice.stage_s)
    text = (
        f"{len(choice.stage_s)} stages of {count} micro-batch{'es' if count > 1 else ''} are predicted to take "
        f"{choice.time_s:.4g} s {what} ({times} s on each rank, which waits for others in {choice.alone_share:.0%} of "
        "it)"
    )
    alone = {
        rank: cut.time_s
        for rank, own in enumerate(problem.ranks)
        if (cut := cut_stages(replace(problem, ranks=[own]), [1])) is not None
    }
    if not alone:
        return f"{text}; no rank alone has the memory"
    best = min(alone, key=alone.__getitem__)
    text += f"; rank {best} alone would take {alone[best]:.4g} s"
    if alone[best] <= choice.time_s:
        text += ", so that the pipeline gives no speed-up"
    return text
