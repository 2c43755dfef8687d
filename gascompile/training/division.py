"""Division: which parameters the ranks of a step keep in parts alone, by what they are all predicted to take.

Every rank plans the same few divisions for its own rows and budget, and all take the one whose slowest rank is the
fastest, with gradients summed beside ops or not: of two ranks of which one waits where the other goes on, both wait.
Which are planned hangs on the parameters alone, so that more memory is never a slower step. The choice is kept: the
next job of the same ranks asks for its plan alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from gascompile.bundles.reuse import CachedPlan
from gascompile.core import serial
from gascompile.core.errors import FormatError, InfeasiblePlanError, StorageError
from gascompile.core.ranks import MICROSECOND
from gascompile.core.sizes import format_size
from gascompile.training.optimizers.slots import Stage
from gascompile.training.step_cache import PlannedStep

Stages = Mapping[str, Stage]
"""How divided parameters are gathered, by name; others are whole."""
Made = tuple[CachedPlan, PlannedStep]
"""A step, and its place in the cache."""
Attempt = Callable[[Stages, bool], Made]
"""Plans a step under a division, for this rank; with gradients summed beside ops, if told so."""
Compare = Callable[[str, bytes, Sequence[int]], list[list[int]]]
"""Returns each rank's numbers, once all are there with the same facts."""
STAGES: tuple[Stage, ...] = ("kept", "again")
_WHAT = "which parameters are divided"
_ELEMENT_BYTES = 4  # of float32
_DIGITS = 15  # of a digest, which are compared as a number
_SAME, _SAME_S = 1e-3, 1e-3
"""Of a step, and of a second: by so much two plans differ where neither is better."""
_WORTH = 0.1
"""Of a step, is what a division has to gain over whole parameters: [Empirical] ranks of one host that divided for a
predicted percent took 15 percent longer, as gathers there cost more than is known."""
forced: Callable[[Mapping[str, int]], Stages] | None = None
"""Takes the place of the choice, for tests: returns a division by the elements of what can be divided."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DivisionTrial:
    """A division that was planned."""

    stages: Stages
    time_s: float | None
    """Of the slowest rank's step; ``None`` where a rank's budget is too small."""
    beside: bool = False
    """Gradients are summed beside ops."""

    def is_faster(self, other: DivisionTrial) -> bool:
        """Return whether it beats another by more than the seconds of two equal steps may differ by."""
        if self.time_s is None or other.time_s is None:
            return self.time_s is not None
        least = _SAME if other.stages or not self.stages else _WORTH
        return self.time_s < min(other.time_s * (1 - least), other.time_s - _SAME_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDivision:
    """What was chosen, and what was tried beside it."""

    chosen: DivisionTrial
    whole: DivisionTrial
    """With whole parameters on all ranks."""
    sizes: Mapping[str, int]
    """Elements of the parameters that can be divided."""
    num_tried: int

    def __str__(self) -> str:
        """Return what is divided and why, in a sentence."""
        stages = self.chosen.stages
        if not stages:
            tried = f"{self.num_tried} divisions were planned"
            return f"parameters are whole on every rank, {_in_words(self.whole)}; {tried}"
        size = format_size(_ELEMENT_BYTES * sum(self.sizes[name] for name in stages))
        num_again = sum(stage == "again" for stage in stages.values())
        beside = "" if self.whole.stages else f"; with whole parameters, {_in_words(self.whole)}"
        return (
            f"each rank keeps a part of {len(stages)} parameters of {size} in all, {num_again} of them gathered for "
            f"the backward pass again, {_in_words(self.chosen)}{beside}"
        )


def _in_words(trial: DivisionTrial) -> str:
    if trial.time_s is None:
        return "which a rank has no budget for"
    how = ", with exchanges beside ops" if trial.beside else ""
    return f"which is predicted to take {trial.time_s:.4g} s a step{how}"


def divide(
    attempt: Attempt,
    sizes: Mapping[str, int],
    compare: Compare,
    *,
    path: Path,
    gains: Callable[[PlannedStep], bool] = lambda _: False,
) -> tuple[CachedPlan, PlannedStep, RankDivision]:
    """Return this rank's step under the division that all ranks choose.

    Args:
        attempt: plans a step.
        sizes: elements of the parameters that can be divided, the same on all ranks.
        compare: with the other ranks.
        path: where the choice is kept, of all that a plan of this rank depends on.
        gains: whether a step may become faster where gradients are summed beside ops.

    Raises:
        InfeasiblePlanError: this rank's budget is too small, whatever is divided.
        RankError: another rank's is, or it has failed.
    """
    kept = _kept(path, sizes) if forced is None else None
    number = int(serial.digest(kept)[:_DIGITS], 16) if kept is not None else -1
    told = compare("which division was chosen before", b"", [number])
    if kept is not None and all(row == [number] for row in told):
        return (*attempt(kept.chosen.stages, kept.chosen.beside), kept)
    search = _Search(attempt, compare, gains)
    whole, best, made = search.run(sizes)
    place, step = search.required(best, made)
    division = RankDivision(chosen=best, whole=whole, sizes=sizes, num_tried=search.num_tried - 1)
    if forced is None:
        # Without a place to keep it, the next job chooses again.
        with contextlib.suppress(StorageError):
            serial.write_atomic(path, serial.dumps(division))
    return place, step, division


def _kept(path: Path, sizes: Mapping[str, int]) -> RankDivision | None:
    """Return the choice of an earlier job, if it had as much to divide."""
    with contextlib.suppress(StorageError, FormatError):
        kept = serial.from_json(RankDivision, serial.read_json(path))
        return kept if kept.sizes == sizes else None
    return None


class _Search:
    def __init__(
        self, attempt: Attempt, compare: Compare, gains: Callable[[PlannedStep], bool]
    ) -> None:
        self._attempt, self._compare, self._gains = attempt, compare, gains
        self.num_tried = 0
        self._errors: list[InfeasiblePlanError] = []

    def run(self, sizes: Mapping[str, int]) -> tuple[DivisionTrial, DivisionTrial, Made | None]:
        """Return what came of whole parameters, the best that was found, and this rank's step under it."""
        whole, made = self._tried({} if forced is None else forced(sizes))
        best = whole
        for stages in _divisions(sizes) if forced is None else ():
            trial, other = self._tried(stages)
            if trial.is_faster(best):
                best, made = trial, other
        return whole, best, made

    def required(self, best: DivisionTrial, made: Made | None) -> Made:
        """Return this rank's step under the best division, where there is one.

        Raises:
            InfeasiblePlanError: this rank's budget is too small, whatever is divided.
            RankError: another rank's is.
        """
        if best.time_s is None or made is None:
            if self._errors:
                raise min(self._errors, key=lambda error: error.required_bytes)
            # The rank whose budget is too small is about to say so.
            self._compare("a plan that all ranks have room for", b"", ())
            raise AssertionError("no rank has said that its budget is too small")
        return made

    def _tried(self, stages: Stages) -> tuple[DivisionTrial, Made | None]:
        """Plan a division on all ranks; once more beside ops, where that may gain a rank something."""
        self.num_tried += 1
        trial, made, gains = self._planned(stages, beside=False)
        if trial.time_s is None or not gains:
            return trial, made
        other, made_beside, _ = self._planned(stages, beside=True)
        return (other, made_beside) if other.is_faster(trial) else (trial, made)

    def _planned(self, stages: Stages, *, beside: bool) -> tuple[DivisionTrial, Made | None, bool]:
        made, own = None, [0, 0]
        try:
            made = self._attempt(stages, beside)
            time_s = made[1].plan.certificate.predicted_s
            own = [int(time_s / MICROSECOND) + 1, int(not beside and self._gains(made[1]))]
        except InfeasiblePlanError as error:
            self._errors.append(error)
        facts = serial.digest([sorted(stages.items()), beside]).encode()
        times, gains = zip(*self._compare(_WHAT, facts, own), strict=True)
        slowest_s = max(times) * MICROSECOND if min(times) else None
        return DivisionTrial(stages=stages, time_s=slowest_s, beside=beside), made, any(gains)


def _divisions(sizes: Mapping[str, int]) -> Iterator[Stages]:
    """Yield divisions of all that can be divided, and of the larger half of it, gathered in either way."""
    names = sorted(sizes, key=lambda name: (-sizes[name], name))
    for some in (names, _larger_half(names, sizes)):
        for stage in STAGES if some else ():
            yield dict.fromkeys(some, stage)


def _larger_half(names: Sequence[str], sizes: Mapping[str, int]) -> list[str]:
    """Return the first of ``names``, the largest, that have half of all elements, and not all of them."""
    sums = list(accumulate(sizes[name] for name in names))
    count = next((number for number, size in enumerate(sums, 1) if 2 * size >= sums[-1]), 0)
    return list(names[: min(count, len(names) - 1)])
