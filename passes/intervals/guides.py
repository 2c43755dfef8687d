"""Guides: interval programs whose solutions are rounded, solved by another thread while the search goes on.

A solver lets go of Python's lock. So the next program is begun before it is asked for, with as much work as is left by
then: what is found does not depend on which of the two is faster.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import islice

from gascompile.passes.bounds.interval_program import Relaxation, interval_program
from gascompile.passes.bounds.prove_all import BOUND_SLOTS
from gascompile.passes.intervals.recompute import IntervalRecompute, recompute_ops
from gascompile.passes.intervals.search import Search, selection_of
from gascompile.passes.model.interval_layout import RunLayout, layout

_GUIDES = (
    (60, 0.2, 0.7),
    (120, 0.2, 1.0),
    (120, 0.0, 0.5),
    (60, 0.3, 1.0),
    (120, 0.05, 0.1),
    (60, 0.1, 1.0),
    (120, 0.0, 0.05),
    (60, 0.05, 0.35),
    (60, 0.05, 1.0),
    (60, 0.2, 0.35),
    (60, 0.05, 0.15),
    (60, 0.1, 0.5),
)
"""Slots, and shares of memory left free and of bandwidth used, in programs whose solutions are rounded.

Whole tensors hold their memory during a transfer and wait for each other, of which the program knows nothing.
[Empirical] Each is the best of a grid for some training step of 8 to 60 layers or of GPT-2, commonest first.
"""
_LEAD = 0.1
"""Lead of copies back in roundings, in units of the time that the slowest link fills memory in."""
_RECOMPUTED = 0.2
"""Share of a recomputation in a relaxed solution from which on it is done."""


class Guides:
    """The programs of one search. Close it: what is not begun by then is not solved."""

    def __init__(self, search: Search, recomputes: Mapping[int, IntervalRecompute]) -> None:
        self._search = search
        self._recomputes = recomputes
        self._sources = {
            j: search.task.repeatable[search.base.intervals[j].tensor] for j in recomputes
        }
        self._solver = ThreadPoolExecutor(1, thread_name_prefix="gascompile-solver")
        self._proof: Future[Relaxation] | None = None
        self._rest = iter(_GUIDES)
        self._begun: deque[Future[Relaxation]] = deque()

    def close(self) -> None:
        """Begin no more; what is being solved ends by itself, with its work."""
        self._solver.shutdown(wait=False, cancel_futures=True)

    def begin_proof(self) -> None:
        """Begin the program that bounds all plans, unless it is begun."""
        if self._proof is None:
            # To bound all plans, what this search keeps in its place takes no memory, and views no time.
            task = self._search.task.without_views()
            plan = layout(replace(task, limit_bytes=task.limit_bytes + task.fixed_bytes))
            self._proof = self._begin(plan, recompute_ops(plan), BOUND_SLOTS)

    def proof(self) -> Relaxation:
        """Return the solution of the program that bounds all plans.

        Raises:
            SolverError: the solver ended in a state that is not understood.
        """
        self.begin_proof()
        assert self._proof is not None, "it is begun"
        return self._search.relaxed(self._proof.result())

    def begin(self, count: int) -> None:
        """Begin so many programs with less memory and bandwidth."""
        search = self._search
        for num_slots, margin, factor in islice(self._rest, count):
            plan = replace(search.base, task=search.task.tightened(margin, factor))
            self._begun.append(self._begin(plan, self._sources, num_slots))

    def consider(self, count: int) -> None:
        """Consider the roundings of so many programs with less memory and bandwidth, as far as there are more.

        Raises:
            SolverError: the solver ended in a state that is not understood.
        """
        for _ in range(count):
            if self._search.finished:
                return
            if not self._begun:
                self.begin(1)
            if not self._begun:
                return
            guide = self._search.relaxed(self._begun.popleft().result())
            if not self._begun and not self._search.finished:
                self.begin(1)
            self.round(guide)

    def round(self, guide: Relaxation) -> None:
        """Consider what a program mostly does with each interval."""
        search, recomputes = self._search, self._recomputes
        if not guide.leave:
            return
        dropped = frozenset(
            pair
            for j, share in guide.recomputed.items()
            if share >= _RECOMPUTED and j in recomputes
            for pair in recomputes[j].dropped
        )
        target = layout(search.task, dropped) if dropped else search.base
        shares = {search.base.keys[j]: share for j, share in guide.leave.items()}
        rounded = selection_of(target, shares)
        for lead_s in (None, _LEAD * search.task.fill_s):
            search.try_once("program", rounded, lead_s)

    def _begin(
        self, plan: RunLayout, recomputable: Mapping[int, int], num_slots: int
    ) -> Future[Relaxation]:
        return self._solver.submit(
            interval_program,
            plan,
            recomputable,
            num_slots=num_slots,
            time_limit_s=self._search.left_s,
            max_pivots=self._search.pivots_left,
        )
