"""What each tier holds over time and by use: the changes that the walk tells of, at the times of the steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gascompile.core.plan import Plan
from gascompile.core.steps import Compute, Recompute, Release
from gascompile.core.workload import TensorKind
from gascompile.cost_models.simulate.walk import Walk

WEIGHTS, STREAMED, ACTIVATIONS = "weights", "streamed weights", "activations"
STATES, WORKSPACE = "states", "workspace"
USES = (STATES, WEIGHTS, STREAMED, ACTIVATIONS, WORKSPACE)
"""In the order in which a picture stacks them: what never changes at the bottom."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCurve:
    """Bytes held by one tier: from ``times_s[i]`` on it holds the ``i``-th number of each use."""

    times_s: tuple[float, ...]
    bytes_by_use: Mapping[str, tuple[int, ...]]

    @property
    def total_bytes(self) -> tuple[int, ...]:
        """All uses together, at each of the times."""
        columns = self.bytes_by_use.values()
        return tuple(sum(column[i] for column in columns) for i in range(len(self.times_s)))

    @property
    def peak_bytes(self) -> int:
        """The most that is held at once."""
        return max(self.total_bytes, default=0)


def memory_curves(
    plan: Plan, times_s: Sequence[tuple[float, float]], seconds: float
) -> dict[str, MemoryCurve]:
    """Return the curve of each tier over one iteration; uses that never occur are left out.

    Args:
        plan: whose steps are walked.
        times_s: when each step begins and ends.
        seconds: of the iteration.

    Raises:
        PlanVerificationError: a step breaks a rule of the walk.
    """
    recorder = _Recorder(plan)
    walk = Walk(plan, recorder.change)
    walk.begin()
    recorder.mark_all(0.0)
    for i, (step, (begun_s, ended_s)) in enumerate(zip(plan.steps, times_s, strict=True)):
        # A move takes and gives back when what stands before it is through, an op takes when it begins.
        recorder.now_s = begun_s if isinstance(step, (Compute, Recompute)) else ended_s
        walk.start(i, step)
        recorder.now_s = ended_s
        walk.end(i, step)
    recorder.now_s = seconds
    walk.finish()
    recorder.mark_all(seconds)
    return recorder.curves()


class _Recorder:
    """What each tier holds by use, written down at every change once a first mark is made."""

    def __init__(self, plan: Plan) -> None:
        self._tensors, self._own = plan.tensors, plan.machine.compute_tier
        self._leaving = {step.tensor for step in plan.steps if isinstance(step, Release)}
        """What does not stay in the tier that computes."""
        self._held = {tier: dict.fromkeys(USES, 0) for tier in plan.machine.tiers}
        self._times: dict[str, list[float]] = {tier: [] for tier in self._held}
        self._columns: dict[str, dict[str, list[int]]] = {
            tier: {use: [] for use in USES} for tier in self._held
        }
        self.now_s: float | None = None
        """Of the step; none before the iteration."""

    def change(self, tier: str, name: str, size_bytes: int) -> None:
        """Count what a tensor, or workspace, takes of a tier more."""
        self._held[tier][self._use(tier, name)] += size_bytes
        if self.now_s is not None:
            self._mark(tier, self.now_s)

    def mark_all(self, now_s: float) -> None:
        """Write down what every tier holds."""
        for tier in self._held:
            self._mark(tier, now_s)

    def curves(self) -> dict[str, MemoryCurve]:
        """Return what has been written down."""
        return {
            tier: MemoryCurve(
                times_s=tuple(times),
                bytes_by_use={u: tuple(c) for u, c in self._columns[tier].items() if any(c)},
            )
            for tier, times in self._times.items()
        }

    def _mark(self, tier: str, now_s: float) -> None:
        self._times[tier].append(now_s)
        for use, size_bytes in self._held[tier].items():
            self._columns[tier][use].append(size_bytes)

    def _use(self, tier: str, name: str) -> str:
        if not name:
            return WORKSPACE
        tensor = self._tensors[name]
        if tensor.kind == TensorKind.WEIGHT:
            stays = name not in self._leaving if tier == self._own else tier == tensor.home
            return WEIGHTS if stays else STREAMED
        return STATES if tensor.kind == TensorKind.STATE else ACTIVATIONS
