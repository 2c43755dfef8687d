"""Optimizer updates as ops that call the optimizer's own class, on a range of a parameter or on all of it.

Each op has an optimizer of its class that stands in for the user's: it is given the range as its only parameter,
with the states and the options of today, and takes a step. What it computes is what the class computes, without
hooks. States that a class makes at its first step are made by it, and copied to where they are kept.
"""

from __future__ import annotations

import importlib
import inspect
import math
import threading
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final

import torch

from gascompile.cost_models.formulas.kernel_workspace import wide_sums_bytes
from gascompile.training.optimizers.class_rules import KERNELS, ClassRule
from gascompile.training.optimizers.known_classes import RULES
from gascompile.training.optimizers.update_ops import (
    PIECE,
    nothing,
    part_of,
    pieces,
    range_of,
)
from gascompile.training.optimizers.update_ops import workspace_bytes as plain_workspace_bytes

MOST_STATES = 3  # moments of a parameter, which ops have arguments for
_PRODUCTS_BYTES = 64 << 10
"""[Empirical] Products of small matrices in bfloat16 take 40 KiB whatever their size."""
_library = torch.library.Library("gascompile_updates", "FRAGMENT")


class StandIn:
    """An optimizer of a rule's class without parameters of its own; one per rule and thread."""

    _of_thread: ClassVar[threading.local] = threading.local()

    def __init__(self, rule: ClassRule) -> None:
        """Make one; its module is imported where it is not."""
        kind = getattr(importlib.import_module(rule.module), rule.kind)
        # Some classes take matrices alone.
        self._optimizer = kind([torch.empty(1, 1)])
        (self.group,) = self._optimizer.param_groups
        for name in KERNELS:
            if name in self.group:
                self.group[name] = rule.fused and name == "fused"
        # Beneath the profiler's ranges and the hooks that all optimizers share.
        self._step: Callable[[Any], object] = inspect.unwrap(
            kind.step, stop=lambda step: not getattr(step, "hooked", False)
        )
        self._counts = rule.counts

    @classmethod
    def of(cls, rule: ClassRule) -> StandIn:
        """Return the one of this thread."""
        of_rule: dict[str, StandIn] = cls._of_thread.__dict__
        if rule.name not in of_rule:
            of_rule[rule.name] = cls(rule)
        return of_rule[rule.name]

    def step(
        self,
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        states: Mapping[str, torch.Tensor],
        options: Mapping[str, Any],
        count: int,
    ) -> dict[str, Any]:
        """Update ``parameter`` in place and return its states; those given are changed in place.

        Args:
            parameter: any tensor of float32.
            gradient: of its shape; read only.
            states: before the update; empty where the class makes them.
            options: of the group.
            count: updates of the parameter before this one.
        """
        entry: dict[str, Any] = dict(states)
        if states and self._counts:
            entry["step"] = torch.tensor(float(count))
        self.group.update(options)
        self.group["params"] = [parameter]
        optimizer = self._optimizer
        optimizer.state.clear()
        if entry:
            optimizer.state[parameter] = entry
        parameter.grad = gradient
        try:
            self._step(optimizer)
            return dict(optimizer.state[parameter])
        finally:
            parameter.grad = None
            self.group["params"] = []
            optimizer.state.clear()


def workspace_bytes(
    rule: ClassRule,
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    num_elements: int,
    *,
    scaled: bool,
) -> int:
    """Return what the update of a range of ``num_elements`` allocates at most, from layouts alone.

    Args:
        rule: of the op.
        parameter: has the layout of the parameter.
        gradient: of its shape, or flat and of the range alone.
        num_elements: of the range.
        scaled: the gradient is multiplied before it is used.
    """
    size_bytes = parameter.element_size()
    copied = plain_workspace_bytes(parameter, gradient, num_elements, scaled=scaled)
    if not rule.whole:
        return rule.scratch * min(num_elements, PIECE) * size_bytes + copied + 1024
    num_copies, size = rule.scratch + (copied > 0), parameter.numel()
    if parameter.dim() < 2:  # what is kept of a vector is as large as it
        return (num_copies + 2) * size * size_bytes + 1024
    *_, rows, columns = parameter.shape
    sums = 3 * (size // max(rows, 1) + size // max(columns, 1))
    square = math.ceil(rule.square_scratch * min(rows, columns) ** 2)
    beside = _PRODUCTS_BYTES + wide_sums_bytes(size) if rule.square_scratch else 4096
    return (num_copies * size + sums + square) * size_bytes + beside


def _update(
    rule: ClassRule,
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    tiles: tuple[torch.Tensor | None, ...],
    hyper: torch.Tensor,
    scale: torch.Tensor | None,
    begin: int,
    end: int,
    row: int,
) -> None:
    options = rule.values(hyper[: rule.length].tolist())
    count = int(hyper[rule.length + row]) - 1
    keys = rule.states(options, parameter.dim())
    kept = {key: tile for key, tile in zip(keys, tiles, strict=False) if tile is not None}
    assert len(kept) == len(keys), f"{rule.name} keeps {keys}"
    first_values = rule.first(options)
    if count == 0:
        for key, number in first_values.items():
            kept[key].fill_(number)
    # What classes make at a first step they make here.
    given = count > 0 or bool(first_values)
    stand_in = StandIn.of(rule)
    spans = [(begin, end)] if rule.whole else pieces(begin, end, whole=False)
    for first, last in spans:
        if first == last:
            continue
        part, is_copy = part_of(parameter, gradient, begin, first, last)
        if scale is not None:
            part = part.mul_(scale) if is_copy else part * scale
        value = range_of(parameter, first, last)
        states = {
            key: _state(rule, key, tile, parameter, (first - begin, last - begin))
            for key, tile in kept.items()
        }
        if rule.whole:
            value = parameter.detach()
            part = part.as_strided(parameter.shape, parameter.stride(), part.storage_offset())
        updated = stand_in.step(value, part, states if given else {}, options, count)
        for key, state in states.items():
            if rule.is_scalar(key):
                # All pieces begin with the number of before.
                if last == end:
                    kept[key].copy_(updated[key].reshape(1))
            elif updated[key] is not state:
                state.copy_(updated[key])
        del part, updated  # so that the next piece takes its memory


def _state(
    rule: ClassRule,
    key: str,
    tile: torch.Tensor,
    parameter: torch.Tensor,
    place: tuple[int, int],
) -> torch.Tensor:
    """Return a state as the class wants it."""
    if rule.is_scalar(key):
        return tile.reshape(()).to("cpu", copy=True)
    if not rule.whole:
        return tile[place[0] : place[1]]
    like = rule.like(key, parameter)
    return tile.as_strided(like.shape, like.stride(), tile.storage_offset())


def _register(rule: ClassRule) -> Any:
    letters = "bcd"
    tiles = ", ".join(
        f"Tensor({letter}!)? state_{number}" for number, letter in enumerate(letters[:MOST_STATES])
    )
    _library.define(
        f"{rule.name}(Tensor(a!) parameter, Tensor gradient, {tiles}, Tensor hyper, Tensor? scale, "
        "int begin, int end, int row=0) -> ()"
    )

    def update(
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        state_0: torch.Tensor | None,
        state_1: torch.Tensor | None,
        state_2: torch.Tensor | None,
        hyper: torch.Tensor,
        scale: torch.Tensor | None,
        begin: int,
        end: int,
        row: int = 0,
    ) -> None:
        tiles = (state_0, state_1, state_2)
        _update(rule, parameter, gradient, tiles, hyper, scale, begin, end, row)

    for key in ("CPU", "CUDA"):
        _library.impl(rule.name, update, key)
    _library.impl(rule.name, nothing, "Meta")
    return getattr(torch.ops.gascompile_updates, rule.name).default


OPS: Final = {rule.name: _register(rule) for rule in RULES}
RULE_OF: Final = {OPS[rule.name]: rule for rule in RULES}
