"""Interval selection: a changing choice of intervals that leave, with memory and room kept up to date."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from gascompile.passes.model.interval_layout import Key, RunLayout


class Selection:
    """Which intervals of a layout leave, and by which route."""

    def __init__(self, plan: RunLayout) -> None:
        self.plan = plan
        self.task = plan.task
        self.routes: dict[int, int] = {}
        self.memory = plan.kept.copy()
        """Bytes at each run if what leaves is away during its whole interval."""
        most = 2 * sum(plan.sizes)
        self._used = [
            np.zeros(max(1, plan.num_runs), dtype=np.int64) if route.room_bytes < most else None
            for route in self.task.routes
        ]
        """Bytes that each slow tier holds at each run, where it might not have room for all."""
        self._busy_s = [[0.0, 0.0] for _ in self.task.routes]
        """Per route what its links carry in and out, to choose among several."""
        self._of_tensor: dict[int, list[int]] = {}
        self._number: dict[int, list[int]] = {}
        for j, interval in enumerate(plan.intervals):
            self._number.setdefault(interval.tensor, []).append(j)

    def copy(self) -> Selection:
        """Return an independent copy."""
        other = copy.copy(self)
        other.routes = dict(self.routes)
        other.memory = self.memory.copy()
        other._used = [used.copy() if used is not None else None for used in self._used]
        other._busy_s = [busy_s.copy() for busy_s in self._busy_s]
        other._of_tensor = {tensor: numbers.copy() for tensor, numbers in self._of_tensor.items()}
        return other

    def within(self, plan: RunLayout) -> Selection:
        """Return a copy for a layout of the same runs with another limit."""
        other = self.copy()
        other.plan, other.task = plan, plan.task
        return other

    @property
    def fits(self) -> bool:
        """Whether what stays keeps the limit at each run."""
        return self.excess_bytes <= 0

    @property
    def excess_bytes(self) -> int:
        """By how much the fullest run is above the limit; negative below it."""
        most = _most(self.memory) if self.plan.num_runs else 0
        return most - self.task.limit_bytes

    def most(self, j: int) -> int:
        """Return the bytes of the fullest run during interval ``j``."""
        spans = [self.memory[a:b] for a, b in self.plan.spans(self.plan.intervals[j]) if a < b]
        return max(map(_most, spans), default=0)

    def add(self, j: int, route: int | None = None) -> bool:
        """Let interval ``j`` leave; return whether a route has room for it.

        Args:
            j: the interval; one that leaves already stays as it is.
            route: the wanted one; another is taken where it has no room or the tensor's home is elsewhere.
        """
        if j in self.routes:
            return True
        interval = self.plan.intervals[j]
        tensor = interval.tensor
        if self._at_an_end(j) and any(
            self.plan.intervals[k].wraps for k in self._of_tensor.get(tensor, ())
        ):
            return False
        clean = self.task.persistent[tensor] and not self.task.written[tensor]
        fixed = self.routes[self._of_tensor[tensor][0]] if self._of_tensor.get(tensor) else None
        order = [fixed] if clean and fixed is not None else self._by_load(tensor, route)
        for choice in order:
            if not self._has_room(j, choice):
                continue
            inner = not (interval.unused or interval.wraps)
            if interval.behind and self.task.routes[choice].link_out is None:
                continue
            first = clean and inner and not self._of_tensor.get(tensor)
            if first and not interval.behind and not self.task.workload.repeats:
                around = next(k for k in self._number[tensor] if self.plan.intervals[k].wraps)
                if around not in self.routes:
                    self._set(around, choice)
            if interval.wraps:
                for k in [k for k in self._of_tensor.get(tensor, ()) if self._at_an_end(k)]:
                    self.take_back(k)
            self._set(j, choice)
            return True
        return False

    def _at_an_end(self, j: int) -> bool:
        """Whether interval ``j`` is a part of the one around the ends of a list that runs once."""
        return self.plan.intervals[j].behind or self.plan.intervals[j].ahead

    def drop(self, j: int) -> bool:
        """Let interval ``j`` stay; return whether memory and its tensor's other intervals allow it."""
        interval = self.plan.intervals[j]
        if interval.unused or self.most(j) + self.task.sizes[interval.tensor] > (
            self.task.limit_bytes
        ):
            return False
        return self.take_back(j)

    def take_back(self, j: int) -> bool:
        """Let interval ``j`` stay whatever that does to memory; ``False`` if its tensor's home has to be away.

        In a list that runs once a clean tensor may rest in memory around its ends; it is then written out when it
        leaves for the first time, which takes a way out.
        """
        interval = self.plan.intervals[j]
        tensor = interval.tensor
        alone = len(self._of_tensor[tensor]) == 1
        clean = self.task.persistent[tensor] and not self.task.written[tensor]
        route = self.routes[j]
        at_ends = clean and interval.wraps and not self.task.workload.repeats
        if at_ends and not alone and self.task.routes[route].link_out is None:
            return False
        del self.routes[j]
        self._of_tensor[tensor].remove(j)
        self._account(j, route, -1)
        return True

    def fill(self, order: Iterable[tuple[int, int | None]]) -> bool:
        """Let intervals leave in ``order`` wherever memory is short; return whether that is enough."""
        limit = self.task.limit_bytes
        if self.excess_bytes > 0:
            for j, route in order:
                left = j not in self.routes and self.most(j) > limit and self.add(j, route)
                if left and self.excess_bytes <= 0:
                    break
        return self.fits

    def thin(self, order: Iterable[int]) -> None:
        """Let intervals stay in ``order`` wherever there is room."""
        for j in order:
            if j in self.routes:
                self.drop(j)

    def with_clean_resident(self) -> Selection:
        """Return the same with clean tensors in memory as a list that runs once begins, as far as there is room."""
        other = self.copy()
        for j, interval in enumerate(self.plan.intervals):
            tensor = interval.tensor
            clean = self.task.persistent[tensor] and not self.task.written[tensor]
            if clean and interval.wraps and j in other.routes and not other.drop(j):
                other._begin_resident(j)
        return other

    def _begin_resident(self, j: int) -> bool:
        """Let the tensor that is away around the ends leave behind its last use alone; return whether that fits."""
        tensor, route = self.plan.intervals[j].tensor, self.routes[j]
        before = self.copy()
        behind = [k for k in self._number[tensor] if self.plan.intervals[k].behind]
        if behind and self.take_back(j) and self.add(behind[0], route) and self.fits:
            return True
        self.routes, self.memory, self._used = before.routes, before.memory, before._used
        self._busy_s, self._of_tensor = before._busy_s, before._of_tensor
        return False

    def evict_unused(self) -> None:
        """Send away what no run accesses, the largest first, where there is room."""
        idle = [j for j, interval in enumerate(self.plan.intervals) if interval.unused]
        for j in sorted(idle, key=lambda j: -self.task.sizes[self.plan.intervals[j].tensor]):
            self.add(j, len(self.task.routes) - 1)

    def keyed(self) -> Mapping[Key, int]:
        """Return the routes by keys that other layouts understand."""
        return {self.plan.keys[j]: route for j, route in self.routes.items()}

    def _set(self, j: int, route: int) -> None:
        self.routes[j] = route
        self._of_tensor.setdefault(self.plan.intervals[j].tensor, []).append(j)
        self._account(j, route, 1)

    def _account(self, j: int, route: int, sign: int) -> None:
        interval = self.plan.intervals[j]
        size = self.task.sizes[interval.tensor]
        for start, end in self.plan.spans(interval):
            self.memory[start:end] -= sign * size
        used = self._used[route]
        if used is not None:
            first, last = self._held(j)
            used[first:last] += sign * size
        if len(self._busy_s) > 1 and not interval.unused:
            self._busy_s[route][0] += sign * self.task.load_s(interval.tensor, route)
            if self.task.written[interval.tensor]:
                self._busy_s[route][1] += sign * self.task.store_s(interval.tensor, route)

    def _held(self, j: int) -> tuple[int, int]:
        """Return the runs during which the slow tier holds a copy."""
        interval = self.plan.intervals[j]
        if self.task.persistent[interval.tensor]:
            return 0, max(1, self.plan.num_runs)
        last = self.plan.last_access[interval.tensor]
        since = interval.version[1] if interval.version[1] >= 0 else interval.start
        return since, max(last, min(interval.end, self.plan.num_runs))

    def _has_room(self, j: int, route: int) -> bool:
        all_used = self._used[route]
        if all_used is None:
            return True
        first, last = self._held(j)
        used = all_used[first:last]
        tensor = self.plan.intervals[j].tensor
        there = any(self.routes[k] == route for k in self._of_tensor.get(tensor, ()))
        if there and self.task.persistent[tensor]:
            return True
        most = _most(used) if len(used) else 0
        return most + self.task.sizes[tensor] <= self.task.routes[route].room_bytes

    def _by_load(self, tensor: int, wanted: int | None) -> list[int]:
        """Return the routes that ``tensor`` can take: the wanted one, then those that end first."""
        if len(self._busy_s) == 1:
            return [0] if self.task.can_take(tensor, 0) else []
        loads: list[tuple[bool, float, int]] = []
        for route in range(len(self.task.routes)):
            if self.task.can_take(tensor, route):
                load_s, store_s = self._busy_s[route]
                load_s += self.task.load_s(tensor, route)
                if self.task.written[tensor]:
                    store_s += self.task.store_s(tensor, route)
                loads.append((route != wanted, max(load_s, store_s), route))
        return [route for _, _, route in sorted(loads)]


def _most(sizes: npt.NDArray[np.int64]) -> int:
    """Return the largest of some numbers; numpy's maximum takes three times as long to call."""
    return int(sizes.item(sizes.argmax()))
