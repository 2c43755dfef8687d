"""Ranged values: what the nodes of a program give, with the dynamic dimensions of its inputs as symbols."""

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StrictMinMaxConstraint
from torch.utils._sympy.value_ranges import ValueRanges

from gascompile.core.errors import UnsupportedOpError, first_line_of
from gascompile.core.program import Dim, Program
from gascompile.core.true_strides import true_strides
from gascompile.passes.graph.fake_inputs import fake_inputs

_REFUSALS = (RuntimeError, TypeError, ValueError, AssertionError, ArithmeticError, LookupError)


def ranged_values(program: Program) -> dict[torch.fx.Node, Any]:
    """Return the values of placeholders and ops: tensors without memory, and sizes.

    Raises:
        UnsupportedOpError: an op does not run on sizes that are symbols.
    """
    symbols = ShapeEnv()
    mode = FakeTensorMode(shape_env=symbols, allow_non_fake_inputs=True)
    dims = {d.name: d for spec in program.inputs for d in spec.shape if isinstance(d, Dim)}
    sizes = {name: _size(symbols, dim) for name, dim in dims.items()}
    shapes: dict[str, Any] = {
        spec.name: tuple(sizes[d.name] if isinstance(d, Dim) else d for d in spec.shape)
        for spec in program.inputs
    }
    with true_strides():
        values: dict[torch.fx.Node, Any] = {
            node: tensor for node, tensor, _ in fake_inputs(program, shapes, mode)
        }
        for node in program.op_nodes():
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            assert callable(node.target)
            try:
                with torch.no_grad(), mode:
                    values[node] = node.target(*args, **kwargs)
            except _REFUSALS as error:
                raise UnsupportedOpError(f"op '{node.name}': {first_line_of(error)}") from error
    return values


def _size(symbols: ShapeEnv, dim: Dim) -> torch.SymInt:
    """Return a size that may be any of its dimension's."""
    source = ConstantSource(dim.name)
    constraint = StrictMinMaxConstraint(vr=ValueRanges(dim.minimum, dim.maximum), warn_only=False)
    symbol = symbols.create_symbol(dim.maximum, source, DimDynamic.DYNAMIC, constraint)
    size = symbols.create_symintnode(symbol, hint=dim.maximum, source=source)
    assert isinstance(size, torch.SymInt)
    return size
