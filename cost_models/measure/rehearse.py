"""Times a program's ops in their order, on made-up values: each with the caches as the op before leaves them."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from gascompile.core.errors import NanLossError
from gascompile.core.program import Program, last_readers
from gascompile.cost_models.measure.compute import ColdWeights

_MOST_BYTES = 256 << 20
"""Of inputs and of any one result: a program with more is not rehearsed."""
_MOST_PASSES = 50
"""Through the program: more say nothing new."""
_DISTURBED = 3.0
"""Times the median: a call of so long was interrupted."""
_REFUSALS = (
    NanLossError,
    ArithmeticError,
    AssertionError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Some ops look at values, and made-up ones are not theirs."""

Signature = Callable[[fx.Node], str | None]


def rehearse(
    program: Program,
    signature: Signature,
    is_large: Callable[[fx.Node], bool],
    weights: ColdWeights,
    *,
    limit_s: float,
    in_place_of: Mapping[Any, Callable[..., Any]],
) -> Mapping[str, float]:
    """Return the mean seconds of a call by signature, of the ops reached within ``limit_s``.

    The program runs again and again, fifty times or until then; its first pass, which takes memory for the first time,
    counts only where there is no other. Large weights lie in ``weights``, each in another place than the one before.
    An op with a weight that does not fit in twice, or one that refuses made-up values, is passed over.
    """
    if not _is_small(program, is_large):
        return {}
    rehearsal = _Rehearsal(program, signature, is_large, weights)
    rehearsal.in_place_of = in_place_of
    stop = time.perf_counter() + limit_s
    first = rehearsal.run(stop)
    times_s: dict[str, list[float]] = defaultdict(list)
    passes = 1
    while passes < _MOST_PASSES and time.perf_counter() < stop:
        passes += 1
        for name, calls_s in rehearsal.run(stop).items():
            times_s[name] += calls_s
    return {name: mean_undisturbed(times_s.get(name) or first_s) for name, first_s in first.items()}


def mean_undisturbed(times_s: list[float]) -> float:
    """Return the mean of ``times_s`` without the calls that something else interrupted.

    A run adds up the calls of its ops, so it takes their mean, not their median.
    """
    median_s = sorted(times_s)[len(times_s) // 2]
    kept = [time_s for time_s in times_s if time_s <= _DISTURBED * median_s]
    return sum(kept) / len(kept)


def made_up(value: torch.Tensor, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return a tensor on ``device`` with the shape and strides of ``value``: ones, zeros where they may be indices."""
    is_index = not (value.dtype.is_floating_point or value.dtype.is_complex)
    fill = 0 if is_index else 1
    flat = torch.full((storage_elements(value),), fill, dtype=value.dtype, device=device)
    return flat.as_strided(value.shape, value.stride())


def made_up_result(node: fx.Node) -> Any:
    """Return what stands for a node's value, whose sizes are known."""
    return pytree.tree_map_only(torch.Tensor, made_up, node.meta.get("val"))


def timed_call(
    node: fx.Node, inputs: Mapping[fx.Node, Any], function: Callable[..., Any] | None = None
) -> tuple[Any, float] | None:
    """Run an op on what it reads; return its result and its seconds, ``None`` where it refuses made-up values.

    ``function`` is called in its place, if there is one.
    """
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), inputs.__getitem__)
    call = function or node.target
    assert callable(call)
    start_s = time.perf_counter()
    try:
        value = call(*args, **kwargs)
    except _REFUSALS:
        return None
    return value, time.perf_counter() - start_s


def storage_elements(value: torch.Tensor) -> int:
    """Return how many elements reach from the storage's start to the end of ``value``, whose sizes are known.

    The storage itself may be that of a longer, dynamic tensor and have no number.
    """
    if not value.numel():
        return 0
    last = sum((size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True))
    return int(last) + 1


class _Rehearsal:
    """A program with made-up inputs; what ops make is dropped after its last reader."""

    def __init__(
        self,
        program: Program,
        signature: Signature,
        is_large: Callable[[fx.Node], bool],
        weights: ColdWeights,
    ) -> None:
        self._weights = weights
        self._given: dict[fx.Node, torch.Tensor] = {}
        self._large: dict[fx.Node, torch.Tensor] = {}
        for node in program.graph_module.graph.nodes:
            value = node.meta.get("val")
            if node.op == "placeholder" and isinstance(value, torch.Tensor):
                if is_large(node):
                    self._large[node] = torch.empty(value.shape, dtype=value.dtype, device="meta")
                else:
                    self._given[node] = made_up(value)
            elif node.op == "placeholder":
                self._given[node] = value
        self._ops = [(node, signature(node)) for node in program.op_nodes()]
        self._frees = last_readers(node for node, _ in self._ops)
        self._place = 0
        self.in_place_of: Mapping[Any, Callable[..., Any]] = {}

    def run(self, stop: float) -> dict[str, list[float]]:
        """Return the seconds of the calls until the program or the time ends."""
        values: dict[fx.Node, Any] = dict(self._given)
        times_s: dict[str, list[float]] = defaultdict(list)
        for node, name in self._ops:
            if time.perf_counter() > stop:
                break
            time_s = self._call(node, values)
            if name is not None and time_s is not None:
                times_s[name].append(time_s)
            for source in self._frees.get(node, ()):
                values.pop(source, None)
        return times_s

    def _call(self, node: fx.Node, values: dict[fx.Node, Any]) -> float | None:
        """Run an op; ``None`` where its result had to be made up too."""
        inputs = {source: self._input(source, values) for source in node.all_input_nodes}
        if not any(isinstance(value, _Missing) for value in inputs.values()):
            called = timed_call(node, inputs, self.in_place_of.get(node.target))
            if called is not None:
                values[node], time_s = called
                return time_s
        values[node] = made_up_result(node)
        return None

    def _input(self, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
        large = self._large.get(node)
        if large is None:
            return values[node]
        if 2 * large.numel() * large.element_size() > self._weights.size_bytes:
            return _Missing()
        self._place += 1
        return self._weights.place(large, self._place)


class _Missing:
    """A weight that there is no room for."""


def _is_small(program: Program, is_large: Callable[[fx.Node], bool]) -> bool:
    """Return whether all sizes are known and made-up values of them take little memory."""
    given_bytes = 0
    for node in program.graph_module.graph.nodes:
        for value in pytree.tree_leaves(node.meta.get("val")):
            if isinstance(value, torch.SymInt):
                return False
            if not isinstance(value, torch.Tensor):
                continue
            if not all(isinstance(size, int) for size in (*value.shape, *value.stride())):
                return False
            size_bytes = storage_elements(value) * value.element_size()
            if node.op == "placeholder" and not is_large(node):
                given_bytes += size_bytes
            elif node.op == "call_function" and size_bytes > _MOST_BYTES:
                return False
    return given_bytes <= _MOST_BYTES
