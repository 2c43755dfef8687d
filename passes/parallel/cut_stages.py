"""Cut stages: which contiguous ops of a step each rank of a pipeline gets, and in how many micro-batches it runs.

Alpa's recurrence: a step of ``B`` micro-batches takes what one takes through all stages, and ``B - 1`` times the
slowest. Both grow with each stage, so the best beginnings of every length by these two figures make the best whole:
the search is exact. Ranks keep their order, and each gets one op at least.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

_CALL_S = 6e-6
"""What it takes to call an op from a plan, beside the op: micro-batches call all ops again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRank:
    """What one rank takes for the ops, and what it has."""

    times_s: Sequence[float]
    """Of each op for all rows of a step, with the part of the backward pass that is its own."""
    budget_bytes: int
    stream_bytes_per_s: float
    """At which values leave memory and come back."""
    latency_s: float
    """Of each of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOps:
    """Ops that follow each other, as far as their division matters."""

    weight_bytes: Sequence[int]
    """Trained parameters that an op is the first to read."""
    num_weights: Sequence[int]
    """Number of these parameters."""
    kept_bytes: Sequence[int]
    """What an op's results for all rows take until the backward pass."""
    least_bytes: Sequence[int]
    """What has to be in memory at once for an op of a micro-batch, at least; for all rows."""
    sent_bytes: Sequence[int]
    """What is sent both ways for all rows where a stage begins with this op."""
    num_states: int
    """Vectors of a parameter's size beside it, in a step: its gradient and the moments."""
    is_cut: Sequence[bool]
    """Whether a stage may begin with an op."""
    num_calls: Sequence[int]
    """Ops that are called for each, those of the backward pass included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCut:
    """A division of ops among ranks."""

    begins: tuple[int, ...]
    """First op of each stage."""
    num_batches: int
    """Micro-batches of a step."""
    stage_s: tuple[float, ...]
    """Seconds of each stage for one micro-batch, forward and backward."""

    @property
    def time_s(self) -> float:
        """Seconds of a step."""
        return sum(self.stage_s) + (self.num_batches - 1) * max(self.stage_s)

    @property
    def alone_share(self) -> float:
        """Part of the ranks' time in which they wait for each other."""
        busy = self.num_batches * sum(self.stage_s)
        return 1 - busy / (len(self.stage_s) * self.time_s) if self.time_s else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CutProblem:
    """Ops, ranks, and the network between neighbours."""

    ops: StageOps
    ranks: Sequence[StageRank]
    network_bytes_per_s: float
    latency_s: float
    has_backward: bool = True

    def stage_s(self, rank: int, begin: int, end: int, num_batches: int) -> float | None:
        """Return the seconds of a stage for one micro-batch; ``None`` where its rank has too little memory."""
        ops, of = self.ops, self.ranks[rank]
        own = slice(begin, end)
        if max(ops.least_bytes[own]) / num_batches > of.budget_bytes:
            return None
        weights = sum(ops.weight_bytes[own])
        flying = min(num_batches, len(self.ranks) - rank) if self.has_backward else 1
        kept = flying * sum(ops.kept_bytes[own]) / num_batches
        always = weights * (2 if self.has_backward else 1)
        # What does not fit leaves memory and comes back once a step; weights and gradients in every pass.
        passes = 2 if self.has_backward else 1
        count = sum(ops.num_weights[own])

        def moves_s(size_bytes: float, whole_bytes: float, num_values: int) -> float:
            share = size_bytes / whole_bytes if whole_bytes else 0.0
            return size_bytes / of.stream_bytes_per_s + share * num_values * of.latency_s

        again = max(always - of.budget_bytes, 0)
        again_s = passes * moves_s(again, always, count)
        whole = weights * (1 + ops.num_states) + kept
        rest = min(max(whole - of.budget_bytes, 0), whole - always)
        once_s = 2 * moves_s(rest, whole, count * (1 + ops.num_states))
        compute_s = sum(of.times_s[own]) / num_batches + sum(ops.num_calls[own]) * _CALL_S
        sent_s = 0.0
        if begin:
            sent_s = passes * self.latency_s
            sent_s += ops.sent_bytes[begin] / num_batches / self.network_bytes_per_s
        return max(compute_s, again_s + once_s / num_batches) + sent_s


def cut_stages(problem: CutProblem, num_batches: Sequence[int]) -> StageCut | None:
    """Return the fastest division of the ops of a step among the ranks; ``None`` where no rank has the memory.

    Args:
        problem: what is divided.
        num_batches: numbers of micro-batches to choose from; of equal ones the first.
    """
    cuts = [cut for count in num_batches if (cut := _cut(problem, count)) is not None]
    return min(cuts, key=lambda cut: cut.time_s, default=None)


_Beginning = tuple[float, float, tuple[int, ...], tuple[float, ...]]
"""Sum and maximum of the stages' seconds, where they begin, and the seconds."""


def _cut(problem: CutProblem, count: int) -> StageCut | None:
    num_ops, size = len(problem.ops.num_calls), len(problem.ranks)
    ends = [i for i in range(1, num_ops) if problem.ops.is_cut[i]] + [num_ops]
    fronts: dict[int, list[_Beginning]] = {0: [(0.0, 0.0, (), ())]}
    for rank in range(size):
        grown: dict[int, list[_Beginning]] = {}
        for end in ends if rank < size - 1 else ends[-1:]:
            front: list[_Beginning] = []
            for begin, before in fronts.items():
                if begin >= end:
                    continue
                time_s = problem.stage_s(rank, begin, end, count)
                if time_s is None:
                    continue
                front += [
                    (total + time_s, max(most, time_s), (*begins, begin), (*times, time_s))
                    for total, most, begins, times in before
                ]
            if front:
                grown[end] = _best(front)
        fronts = grown
    whole = fronts.get(num_ops, ())
    if not whole:
        return None
    best = min(whole, key=lambda item: item[0] + (count - 1) * item[1])
    return StageCut(begins=best[2], num_batches=count, stage_s=best[3])


def _best(front: list[_Beginning]) -> list[_Beginning]:
    """Return those that no other beats in both the sum and the maximum."""
    front.sort(key=lambda item: item[:2])
    least = accumulate((item[1] for item in front), min, initial=float("inf"))
    return [item for item, before in zip(front, least, strict=False) if item[1] < before]
