"""How much an error of each weight changes the outputs: measured on the model itself, forward and back.

For small errors the outputs change by the derivative of the outputs by the weight. A random direction of the
outputs is taken back through the program op by op; the squared norm of what arrives at a weight, averaged over
directions, is what independent errors of its values become. A layer's input and the direction that arrives at
its output say that norm, so no gradient is ever made. Weights are read in blocks of rows from where they lie,
three times each; between runs of ops only live values are kept, and the runs repeated on the way back.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from gascompile.formats.layout import DEFAULT_GROUPS
from gascompile.formats.quantize import pack, squared_error
from gascompile.precision.sensitivity_walk import (
    EMBEDDING,
    LINEAR,
    SensitivityWalk,
    Setting,
    UnmeasurableError,
    Values,
    as_node,
    function,
    written,
)
from gascompile.weights.rows import WeightRows

_SAMPLED_ROWS = 48
"""Rows, about, that a weight is rounded on to see how well its values fit a form."""
_NUM_DIRECTIONS = 2
"""One is within some per cent already: a weight has many values, over which it averages."""
_SEED = 0  # any: equal models get equal forms
_MOST_FLOPS = 2e13
"""Minutes on two cores; larger inputs are not measured on."""

_Arriving = dict[tuple[fx.Node, int], list[torch.Tensor]]
"""Directions by node and place among its results, one for each of ``_NUM_DIRECTIONS``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """What one weight's error does."""

    gain: float
    """Square of the outputs' relative error per square of the weight's, for small independent errors."""
    errors: Mapping[str, float]
    """Relative error of the weight itself by packed form, from some of its rows."""


def measure_sensitivities(setting: Setting, leaves: Sequence[Any]) -> dict[str, Sensitivity]:
    """Return the sensitivity of every weight of ``setting.matrices``, on one set of inputs.

    Args:
        setting: the program and its weights.
        leaves: the flattened inputs.

    Raises:
        UnmeasurableError: an op cannot be differentiated, or changes what others are views of; the inputs have no
            values, or take minutes to be run; values take more than the limit; outputs are all zero.
        StorageError: a weight cannot be read.
    """
    with WeightRows() as rows, torch.no_grad():
        return _Back(setting, leaves, rows).sensitivities()


class _Back(SensitivityWalk):
    def __init__(self, setting: Setting, leaves: Sequence[Any], rows: WeightRows) -> None:
        super().__init__(setting, leaves, rows)
        self._active = self._reached()
        self._gains = dict.fromkeys(setting.matrices, 0.0)
        self._squares = dict.fromkeys(setting.matrices, 0.0)
        self._samples: dict[str, list[torch.Tensor]] = {}
        self._errors: dict[str, dict[str, float]] = {}
        self._flops = 0.0

    def sensitivities(self) -> dict[str, Sensitivity]:
        """Run forward, keeping live values at the start of each run of ops; then back, run by run."""
        length = max(1, math.isqrt(len(self.nodes)))
        runs = [self.nodes[i : i + length] for i in range(0, len(self.nodes), length)]
        values = dict(self.inputs)
        starts: list[Values] = []
        for run in runs:
            starts.append(dict(values))
            self.forward(run, values, starts, keep=False)
        arriving, total = self._directions(values)
        for run in reversed(runs):
            values = starts.pop()
            self.forward(run, values, starts, keep=True)
            for node in reversed(run):
                self._back(node, values, arriving)
        bound = self.setting.program.bound
        return {
            name: Sensitivity(
                gain=gain
                / _NUM_DIRECTIONS
                * self._squares[name]
                / math.prod(bound[name].shape)
                / total,
                errors=self._errors.get(name, {}),
            )
            for name, gain in self._gains.items()
        }

    def _directions(self, values: Mapping[fx.Node, Any]) -> tuple[_Arriving, float]:
        """Return random directions of all floating outputs, and the sum of squares of these."""
        generator = torch.Generator().manual_seed(_SEED)
        arriving: _Arriving = {}
        total = 0.0
        (output,) = self.setting.program.graph_module.graph.find_nodes(op="output")
        for node in dict.fromkeys(pytree.tree_leaves(output.args)):
            value = values.get(node) if isinstance(node, fx.Node) else None
            if not isinstance(value, torch.Tensor) or not value.is_floating_point():
                continue
            total += float(value.double().square().sum())
            arriving[node, 0] = [
                torch.randn(value.shape, generator=generator).to(value.dtype)
                for _ in range(_NUM_DIRECTIONS)
            ]
        if not total or not math.isfinite(total):
            raise UnmeasurableError("the outputs are zero or not finite")
        return arriving, total

    # -------------------------------------------------------- forward

    def product(self, node: fx.Node, values: Values) -> torch.Tensor:
        name = self.weights[as_node(node.args[1])]
        numel = values[as_node(node.args[0])].numel()
        self._flops += 2.0 * numel * self.setting.program.bound[name].shape[0]
        # Every layer is run forward twice, and back for each direction.
        if self._flops * (2 + _NUM_DIRECTIONS) > 2 * _MOST_FLOPS:
            raise UnmeasurableError(f"the inputs take more than {_MOST_FLOPS:.0e} operations")
        result = super().product(node, values)
        if name in self._samples:
            self._errors[name] = self._tried(torch.cat(self._samples.pop(name)))
        return result

    def seen(self, name: str, block: torch.Tensor) -> None:
        if name not in self._gains or name in self._errors:
            return
        self._squares[name] += float(block.float().square().sum())
        every = max(1, self.setting.program.bound[name].shape[0] // _SAMPLED_ROWS)
        self._samples.setdefault(name, []).append(block[::every].float())

    def _tried(self, rows: torch.Tensor) -> dict[str, float]:
        errors = {}
        for form in self.setting.forms:
            group = DEFAULT_GROUPS[form]
            if form == "int4" and rows.shape[1] % group:
                continue
            try:
                wrong, total = squared_error(rows, pack(rows, form, group), form, group)
            except ValueError:
                continue  # converting names the weight and the reason
            errors[form] = math.sqrt(wrong / total) if total else 0.0
        return errors

    # -------------------------------------------------------- back

    def _back(self, node: fx.Node, values: Values, arriving: _Arriving) -> None:
        """Take what arrives at a node's results on to its operands, and off the books."""
        for operand, before in self.before.get(node, {}).items():
            # What came later read the changed operand, which is the result.
            if (operand, 0) in arriving:
                _add(arriving, (node, 0), arriving.pop((operand, 0)))
            values[operand] = before
        places = [place for other, place in arriving if other is node]
        mine = {place: arriving.pop((node, place)) for place in places}
        if not mine or node not in self._active:
            return
        if (name := self.weight_of(node, LINEAR, 1)) is not None:
            self._back_product(node, name, values, mine[0], arriving)
        elif (name := self.weight_of(node, EMBEDDING, 0)) is not None:
            if name in self._gains:
                ids = values[as_node(node.args[1])].reshape(-1)
                self._add_gain(name, mine[0], (ids[:, None] == ids[None, :]).float())
        elif node.target is operator.getitem:
            parent, place = as_node(node.args[0]), node.args[1]
            assert isinstance(place, int)
            _add(arriving, (parent, place), mine[0])
        else:
            self._back_op(node, values, mine, arriving)

    def _back_product(
        self,
        node: fx.Node,
        name: str,
        values: Values,
        directions: list[torch.Tensor],
        arriving: _Arriving,
    ) -> None:
        source = as_node(node.args[0])
        x = values[source]
        if name in self._gains:
            flat = x.reshape(-1, x.shape[-1]).float()
            self._add_gain(name, directions, flat @ flat.t())
        if source not in self._active:
            return
        features = directions[0].shape[-1]
        flat = torch.cat([d.reshape(-1, features) for d in directions])
        product = flat.new_zeros((flat.shape[0], x.shape[-1]))
        for begin, end in self.blocks(name):
            product.addmm_(flat[:, begin:end], self.block(name, begin, end))
        parts = [part.view(x.shape) for part in product.chunk(len(directions))]
        _add(arriving, (source, 0), parts)

    def _add_gain(self, name: str, directions: list[torch.Tensor], between: torch.Tensor) -> None:
        """Add the squared norm of ``direction.T @ x``; ``between`` holds products of the rows of ``x``."""
        for direction in directions:
            flat = direction.reshape(-1, direction.shape[-1]).float()
            self._gains[name] += float(((flat @ flat.t()) * between).sum())

    def _back_op(
        self,
        node: fx.Node,
        values: Values,
        mine: dict[int, list[torch.Tensor]],
        arriving: _Arriving,
    ) -> None:
        args, kwargs = self.arguments(node, values)
        flat, spec = pytree.tree_flatten((args, kwargs))
        nodes = pytree.tree_leaves(
            (node.args, node.kwargs), is_leaf=lambda v: isinstance(v, fx.Node)
        )
        wanted = [
            place
            for place, (operand, value) in enumerate(zip(nodes, flat, strict=True))
            if isinstance(operand, fx.Node)
            and operand in self._active
            and isinstance(value, torch.Tensor)
            and value.is_floating_point()
        ]
        if not wanted:
            return
        for place in wanted:
            flat[place] = flat[place].detach().requires_grad_()
        operands = [flat[place] for place in wanted]
        changed = [place for place, operand in enumerate(nodes) if operand in written(node)]
        try:
            with torch.enable_grad():
                for place in changed:
                    flat[place] = flat[place].clone()
                args, kwargs = pytree.tree_unflatten(flat, spec)
                result = function(node)(*args, **kwargs)
                results = list(result) if isinstance(result, (tuple, list)) else [result]
                outs = [i for i in mine if results[i].requires_grad]
                if not outs:
                    return
                parts = [
                    torch.autograd.grad(
                        [results[i] for i in outs],
                        operands,
                        [mine[i][number] for i in outs],
                        retain_graph=True,
                        allow_unused=True,
                    )
                    for number in range(_NUM_DIRECTIONS)
                ]
        except (RuntimeError, NotImplementedError) as error:
            raise UnmeasurableError(f"op '{node.name}' has no derivative: {error}") from error
        for number, place in enumerate(wanted):
            if all(part[number] is not None for part in parts):
                _add(arriving, (nodes[place], 0), [part[number] for part in parts])

    def _reached(self) -> set[fx.Node]:
        """Return the nodes whose values depend on a weight that is measured."""
        reached: set[fx.Node] = set()
        for node in self.nodes:
            read = node.all_input_nodes
            if any(n in reached or self.weights.get(n) in self.setting.matrices for n in read):
                reached.update((node, *written(node)))
        return reached


def _add(arriving: _Arriving, key: tuple[fx.Node, int], parts: Sequence[torch.Tensor]) -> None:
    before = arriving.get(key)
    arriving[key] = (
        list(parts) if before is None else [a + b for a, b in zip(before, parts, strict=True)]
    )
