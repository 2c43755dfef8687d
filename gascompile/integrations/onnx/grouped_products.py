"""Mixtures of experts in ONNX: rows that are sorted by expert, each group times the matrix of its expert.

ONNX has no such op. Each expert's rows are a slice whose ends are computed, so that no row is multiplied twice, and an
expert without rows costs a product of none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from gascompile.core.errors import UnsupportedOpError

if TYPE_CHECKING:
    import torch

_TARGETS: Final = frozenset(
    ("aten._grouped_mm.default", "transformers.grouped_mm_fallback.default")
)
"""``(rows, matrices, ends)``: rows of all groups, ``[experts, inner, columns]``, and where groups end."""


def translations(graph: torch.fx.Graph) -> dict[Any, Any]:
    """Return what torch's exporter is to write for grouped products, by the ops of a graph.

    Raises:
        UnsupportedOpError: one has no ends of groups, or a result of another dtype.
    """
    written_as = {}
    for node in graph.nodes:
        if str(node.target) not in _TARGETS:
            continue
        ends = node.kwargs.get("offs", node.args[2] if len(node.args) > 2 else None)
        others = [*node.args[3:], *(v for name, v in node.kwargs.items() if name != "offs")]
        shapes = [node.args[0].meta["val"].dim(), node.args[1].meta["val"].dim()]
        if ends is None or any(value is not None for value in others) or shapes != [2, 3]:
            raise UnsupportedOpError(
                f"the grouped product '{node.name}' has no ends of its groups, or a bias or dtype of its result; write "
                "it as rows by experts"
            )
        written_as[node.target] = grouped_product
    return written_as


def grouped_product(rows: Any, matrices: Any, offs: Any) -> Any:
    """Write one; rows after the last group are zero."""
    from onnxscript.onnx_opset import opset18

    op: Any = opset18  # typed for values, and here graphs are written
    count = matrices.shape[0]
    if not isinstance(count, int):
        raise UnsupportedOpError("a mixture of experts has a number of experts that changes")
    ends = op.Cast(offs, to=7)
    begin = op.Constant(value_ints=[0])
    products = []
    for expert in range(count):
        end = op.Slice(ends, [expert], [expert + 1], [0])
        matrix = op.Squeeze(op.Slice(matrices, [expert], [expert + 1], [0]), [0])
        products.append(op.MatMul(op.Slice(rows, begin, end, [0]), matrix))
        begin = end
    rest = op.Sub(op.Shape(rows, start=0, end=1), begin)
    shape = op.Concat(rest, op.Shape(matrices, start=2, end=3), axis=0)
    zeros = op.Expand(op.CastLike(op.Constant(value_floats=[0.0]), rows), shape)
    return op.Concat(*products, zeros, axis=0)
