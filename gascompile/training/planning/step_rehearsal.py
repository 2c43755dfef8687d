"""Step rehearsal: a step's program in its order on made-up values, to find what each kind of its ops takes.

Few values are in memory at a time; what a step has had for long is made up some ops before the one that reads it. A
kind that comes often is known after a few of its ops; where there is time for it, the program is gone through again for
those that come once, and for those whose calls differ.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from gascompile.core.program import last_readers
from gascompile.cost_models.measure.rehearse import (
    made_up_result,
    mean_undisturbed,
    storage_elements,
    timed_call,
)
from gascompile.runtime.memory.pages import Pages

_NUM_RUNS = 4
"""Of a kind; the first takes memory that the others find taken."""
_ENOUGH_S = 0.05
"""In a kind: one that took so long is not run again. [Empirical] Two of GPT-2's kinds of 30 ms agree as four do."""
_LONG_S = 0.2
"""[Empirical] From here on what a first run takes beside the op, new pages and the kernel's choice, is lost in it."""
_AHEAD = 8
"""Ops before the one that reads a made-up value: less finds it in the caches, where a step does not. [Empirical] Of two
ranks of a small Llama, 1 MiB per weight, updates took 1.6 times as long in steps as on values that were just made."""
_CACHED_BYTES = 8 << 20
"""What is larger does not stay in caches as it is made up."""
_CALL_S = 6e-6
"""What it takes to call an op from a plan, beside the op."""
_FEW_RUNS, _MOST_PASSES = 2, 4
"""Beside its first, of a kind: with fewer it is looked for again, in so many passes. [Empirical] An op that comes once
differs from one pass to the next by a fifth on a busy host."""
_UNSTEADY, _MATTERS_S = 1.25, 1e-3
"""Times the shortest call of a kind: a longer one was in a moment that others had slowed down, and the kind is looked
for again, unless nobody will notice."""


@dataclass(frozen=True, slots=True)
class OpCost:
    """Figures of one kind of op."""

    time_s: float
    scratch_bytes: int
    """Beside its operands and results; 0 where the process has no page memory to see it by."""


class StepRehearsal:
    """A program on made-up values, of which few are in memory at a time."""

    def __init__(
        self,
        kinds: Mapping[fx.Node, str | None],
        wanted: set[str],
        most_bytes: int,
    ) -> None:
        self._kinds, self._wanted, self._most_bytes = kinds, wanted, most_bytes
        self._ahead_bytes = min(_CACHED_BYTES, most_bytes // _AHEAD)
        self._times_s: dict[str, list[float]] = defaultdict(list)
        self._scratch_bytes: dict[str, int] = defaultdict(int)
        self._values: dict[fx.Node, Any] = {}
        """In the order of their last use."""
        self._frees = last_readers(kinds)

    def run(self, pages: Pages | None, *, more_s: float) -> dict[str, OpCost]:
        """Return what was found by kind, after ``more_s`` of passes beside the first."""
        self._pass(pages, lambda kind: not self._is_known(kind))
        until_s = time.perf_counter() + more_s
        for _ in range(_MOST_PASSES - 1):
            asked = {kind for kind in self._wanted if self._is_doubtful(kind)}
            if not asked or time.perf_counter() >= until_s:
                break
            self._pass(pages, asked.__contains__, until_s)
        return {
            kind: OpCost(mean_undisturbed(seconds[1:] or seconds), self._scratch_bytes[kind])
            for kind, seconds in self._times_s.items()
            if seconds
        }

    def _pass(
        self, pages: Pages | None, asks: Callable[[str], bool], until_s: float = math.inf
    ) -> None:
        """Run the ops whose kinds are asked for."""

        def is_asked(kind: str | None) -> bool:
            return kind is not None and kind in self._wanted and asks(kind)

        ahead = islice(self._kinds.items(), _AHEAD, None)
        passed: set[fx.Node] = set()
        for node, kind in self._kinds.items():
            later, of_later = next(ahead, (node, None))
            if is_asked(of_later):
                self._make_up(later, passed)
            passed.add(node)
            if kind is not None and is_asked(kind) and time.perf_counter() < until_s:
                inputs = {source: self._input(source) for source in node.all_input_nodes}
                self._evict(set(inputs))
                cost = self._call(node, inputs, pages)
                if cost is None:
                    self._wanted.discard(kind)
                else:
                    self._times_s[kind].append(cost.time_s)
                    most_bytes = max(self._scratch_bytes[kind], cost.scratch_bytes)
                    self._scratch_bytes[kind] = most_bytes
            for source in self._frees.get(node, ()):
                self._values.pop(source, None)
        self._values.clear()

    def _is_known(self, kind: str) -> bool:
        """Tell whether more runs of a kind would only take time."""
        times_s = self._times_s[kind]
        if len(times_s) == 1:
            return times_s[0] >= _LONG_S
        return len(times_s) >= _NUM_RUNS or sum(times_s) >= _ENOUGH_S

    def _is_doubtful(self, kind: str) -> bool:
        """Tell whether a kind is to be looked for in one more pass."""
        first_s, *later_s = self._times_s[kind] or [0.0]
        if len(later_s) < _FEW_RUNS:
            return first_s < _LONG_S
        return _MATTERS_S < _UNSTEADY * min(later_s) < max(later_s)

    def _call(
        self, node: fx.Node, inputs: Mapping[fx.Node, Any], pages: Pages | None
    ) -> OpCost | None:
        self._values.pop(node, None)
        before = pages.mark() if pages else 0
        called = timed_call(node, inputs)
        if called is None:
            return None
        value, time_s = called
        made_bytes = (pages.live_bytes - before) if pages else 0
        scratch_bytes = (pages.peak_bytes - before - made_bytes) if pages else 0
        self._values[node] = value
        return OpCost(time_s + _CALL_S, max(scratch_bytes, 0))

    def _make_up(self, reader: fx.Node, passed: set[fx.Node]) -> None:
        """Make up what an op further on reads that a step has by now: what is given, or was made by ``passed``."""
        for source in reader.all_input_nodes:
            has_it = source not in self._kinds or source in passed
            if has_it and source not in self._values and _size_bytes(source) <= self._ahead_bytes:
                self._values[source] = made_up_result(source)

    def _input(self, node: fx.Node) -> Any:
        value = self._values.pop(node, None)
        if value is None:
            value = made_up_result(node)
        self._values[node] = value
        return value

    def _evict(self, kept: set[fx.Node]) -> None:
        """Let go of what was not used for longest until what is left fits."""
        sizes: dict[int, int] = {}
        for value in self._values.values():
            sizes.update(_storages(value))
        total = sum(sizes.values())
        for node in [n for n in self._values if n not in kept]:
            if total <= self._most_bytes:
                return
            going = dict(_storages(self._values.pop(node)))
            still = {address for value in self._values.values() for address, _ in _storages(value)}
            total -= sum(size for address, size in going.items() if address not in still)


def _size_bytes(node: fx.Node) -> int:
    tensors = pytree.tree_leaves(node.meta.get("val"))
    return sum(
        storage_elements(tensor) * tensor.element_size()
        for tensor in tensors
        if isinstance(tensor, torch.Tensor)
    )


def _storages(value: Any) -> Iterator[tuple[int, int]]:
    for tensor in pytree.tree_leaves(value):
        if isinstance(tensor, torch.Tensor):
            storage = tensor.untyped_storage()
            yield storage.data_ptr(), storage.nbytes()
