"""Times a program's own ops on this processor, at their own shapes: what no roofline knows of a kernel.

An op is called as the runtime calls it, on made-up values: first in the program's order, then what that did
not reach alone. Its weights lie in memory that no cache holds, a different place at each call, since a plan's
weights come from memory; its other inputs are warm, since the op before has just written them. Equal ops of a
model, such as those of its layers, share one time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from gascompile.core.program import Program
from gascompile.cost_models.measure.compute import ColdWeights
from gascompile.cost_models.measure.rehearse import (
    made_up,
    mean_undisturbed,
    rehearse,
    storage_elements,
)
from gascompile.formats import ops as format_ops

_LARGE_BYTES = 1 << 20
"""Smaller weights stay in the caches beside everything else."""
_MOST_BYTES = 256 << 20
"""Of made-up inputs that are no weights: an op with more keeps its formula."""
_NUM_CALLS = 15  # at most
_CALLS_LIMIT_S = 0.06
"""For the calls of one op."""
_BY_ROWS = (
    torch.ops.aten.linear.default,
    torch.ops.aten.embedding.default,
    format_ops.LINEAR,
)
"""Ops whose weight may be replaced by fewer of its rows."""


def signature(node: fx.Node, program: Program) -> str | None:
    """Return what the seconds of an op depend on; ``None`` for one that cannot be called on made-up values."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return None
    if target.namespace != "aten" and target is not format_ops.LINEAR:
        return None
    parts = [str(target)]
    if target is format_ops.LINEAR:
        parts.append("plain" if format_ops.kernels_for() is None else "compiled")
    for leaf in pytree.tree_leaves((node.args, node.kwargs)):
        if not isinstance(leaf, fx.Node):
            parts.append(repr(leaf))
            continue
        value = leaf.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return None
        sizes = (*value.shape, *value.stride())
        if not all(isinstance(size, int) for size in sizes):
            return None
        weight = "weight " if _is_large_weight(leaf, program) else ""
        parts.append(f"{weight}{value.dtype}{tuple(value.shape)}{tuple(value.stride())}")
    return " ".join(parts)


def measure_ops(
    nodes: Iterable[fx.Node],
    program: Program,
    *,
    limit_s: float,
    in_place_of: Mapping[Any, Callable[..., Any]] = MappingProxyType({}),
) -> Mapping[str, float]:
    """Return the seconds of one call by signature, of as many of ``nodes`` as ``limit_s`` allows, in their order.

    Half of the time goes to runs of the whole program, which may find others than ``nodes`` too. Ops that
    refuse made-up values are left out. The state of torch's random numbers is kept. What ``in_place_of`` has for an op
    is called in its place.
    """
    if limit_s <= 0:
        return {}
    times_s: dict[str, float] = {}
    start = time.perf_counter()
    with torch.no_grad(), torch.random.fork_rng(devices=()):
        weights = ColdWeights()
        whole = rehearse(
            program,
            lambda node: signature(node, program),
            lambda node: _is_large_weight(node, program),
            weights,
            limit_s=limit_s / 2,
            in_place_of=in_place_of,
        )
        times_s.update(whole)
        for node in nodes:
            name = signature(node, program)
            if name is None or name in times_s:
                continue
            if time.perf_counter() > start + limit_s:
                break
            call = _Call.of(node, program, weights)
            if call is None:
                continue
            call.function = in_place_of.get(node.target, call.function)
            try:
                times_s[name] = call.time_s()
            except (RuntimeError, IndexError, ValueError, NotImplementedError):
                # Some ops look at values, and made-up ones are not theirs: they keep their formula.
                continue
    return times_s


class _Call:
    """One op on made-up inputs."""

    def __init__(self, node: fx.Node, weights: ColdWeights) -> None:
        assert callable(node.target)
        self.function: Callable[..., Any] = node.target
        self._weights = weights
        self._inputs: dict[fx.Node, torch.Tensor] = {}
        self._large: dict[fx.Node, torch.Tensor] = {}
        self._args: tuple[Any, ...] = node.args
        self._kwargs: dict[str, Any] = dict(node.kwargs)
        self.scale = 1.0

    @classmethod
    def of(cls, node: fx.Node, program: Program, weights: ColdWeights) -> _Call | None:
        """Return the call; ``None`` where its inputs take too much memory."""
        call = cls(node, weights)
        for source in node.all_input_nodes:
            value = source.meta["val"]
            if _is_large_weight(source, program):
                shape = call._shape_of_weight(node, value)
                if shape is None:
                    return None
                call._large[source] = torch.empty(shape, dtype=value.dtype, device="meta")
            else:
                if storage_elements(value) * value.element_size() > _MOST_BYTES:
                    return None
                call._inputs[source] = made_up(value)
        return call

    def _shape_of_weight(self, node: fx.Node, value: torch.Tensor) -> tuple[int, ...] | None:
        """Return the shape that fits into the block at least twice."""
        room_bytes = self._weights.size_bytes // 2
        size_bytes = value.numel() * value.element_size()
        if size_bytes <= room_bytes:
            return tuple(value.shape)
        if node.target not in _BY_ROWS or value.dim() != 2:
            return None
        rows = room_bytes // (value.shape[1] * value.element_size())
        if node.target is not torch.ops.aten.embedding.default:
            if len(self._args) > 2 and self._args[2] is not None:
                return None  # the bias has the weight's rows
            self.scale = value.shape[0] / rows
        return (int(rows), int(value.shape[1]))

    def time_s(self) -> float:
        """Return the typical seconds of a call."""
        self._call(0)
        times_s: list[float] = []
        stop = time.perf_counter() + _CALLS_LIMIT_S
        while len(times_s) < 3 or (len(times_s) < _NUM_CALLS and time.perf_counter() < stop):
            times_s.append(self._call(len(times_s) + 1))
        return mean_undisturbed(times_s) * self.scale

    def _call(self, number: int) -> float:
        values: dict[fx.Node, torch.Tensor] = dict(self._inputs)
        for node, shape in self._large.items():
            values[node] = self._weights.place(shape, number)
        args, kwargs = fx.node.map_arg((self._args, self._kwargs), values.__getitem__)
        start = time.perf_counter()
        self.function(*args, **kwargs)
        return time.perf_counter() - start


def _is_large_weight(node: fx.Node, program: Program) -> bool:
    name = program.bindings.get(node.name)
    if name is None or name in program.states:
        return False
    return program.bound[name].size_bytes >= _LARGE_BYTES
