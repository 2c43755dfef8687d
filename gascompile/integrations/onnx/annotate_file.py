"""An ONNX file whose graph is written again with a plan: the same nodes, and the weights where they lie."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gascompile.bundles.files import Weights
from gascompile.core.errors import CheckpointError
from gascompile.core.program import Program, op_name
from gascompile.integrations.onnx.module import NODES
from gascompile.integrations.onnx.translate import constant_tensor
from gascompile.weights.onnx_file import read_onnx

if TYPE_CHECKING:
    import onnx_ir


@dataclass(frozen=True, slots=True, kw_only=True)
class SameGraph:
    """The graph of a file, in which weights of other files have no values, and where these lie."""

    model: onnx_ir.Model
    weights: Weights
    """By the name in the graph."""


def graph_of_file(file: Path) -> SameGraph:
    """Return the graph of an ONNX file as it stands there; raises as ``read_onnx`` does."""
    import onnx_ir

    read = read_onnx(file)
    model = onnx_ir.load(file)
    sources = {}
    for name, value in model.graph.initializers.items():
        if not isinstance(value.const_value, onnx_ir.ExternalTensor):
            continue
        if name in read.weights:
            sources[name] = read.weights[name]
            value.const_value = None
        else:
            value.const_value = onnx_ir.tensor(constant_tensor(read.constants[name]), name=name)
    return SameGraph(model=model, weights=Weights(sources=sources, stamps=read.stamps))


def ops_of_nodes(model: onnx_ir.Model, program: Program) -> dict[onnx_ir.Node, tuple[str, ...]]:
    """Return the ops of a captured program that the trace noted for each node of the graph that it is of.

    Raises:
        CheckpointError: the file has changed since it was captured.
    """
    nodes = list(model.graph)
    ops_of: dict[onnx_ir.Node, tuple[str, ...]] = {}
    for op in program.op_nodes():
        for place in op.meta.get("custom", {}).get(NODES, ()):
            if place >= len(nodes):
                raise CheckpointError(
                    "the ONNX file was changed while it was planned; plan it again"
                )
            ops_of[nodes[place]] = (*ops_of.get(nodes[place], ()), op_name(op))
    return ops_of
