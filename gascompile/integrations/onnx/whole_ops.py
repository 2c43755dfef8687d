"""What exporters write as several nodes becomes one op again: a linear layer, and SiLU.

A linear layer is a product with a transposed weight, to which a bias may be added. As one op it reads the weight as it
lies, a plan may divide it by rows, and it is what the model had before it was exported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from gascompile.formats.dtypes import FLOATING
from gascompile.integrations.onnx.steps import OnnxStep
from gascompile.integrations.onnx.table import LINEAR, SILU

Held = Mapping[str, tuple[str, tuple[int, ...]]]
"""Torch's dtype and the shape of each initializer, by its name."""


def with_whole_ops(
    steps: Sequence[OnnxStep], held: Held, outputs: Collection[str]
) -> tuple[OnnxStep, ...]:
    """Return the steps of a graph, in order, with fewer of them, which compute the same."""
    uses = Counter(name for step in steps for name in step.inputs if isinstance(name, str))
    uses.update(outputs)
    made: dict[str, OnnxStep] = {}
    kept: dict[int, OnnxStep] = {}
    for step in steps:
        merged = _linear(step, made, held) or _with_bias(step, made, held, uses)
        merged = merged or _silu(step, made, uses)
        whole, gone = merged or (step, None)
        if gone is not None:
            del kept[id(gone)]
        kept[id(whole)] = whole
        made.update((name, whole) for name, _ in whole.outputs)
    taken = {name for step in kept.values() for name in step.inputs} | set(outputs)
    # Transposed weights that products alone had read.
    return tuple(
        step for step in kept.values()
        if step.op != "Transpose" or any(name in taken for name, _ in step.outputs)
    )  # fmt: skip


def _maker(name: object, made: Mapping[str, OnnxStep], op: str) -> OnnxStep | None:
    """Return the step of an op that makes a value."""
    step = made.get(name) if isinstance(name, str) else None
    return step if step is not None and step.op == op else None


def _linear(
    step: OnnxStep, made: Mapping[str, OnnxStep], held: Held
) -> tuple[OnnxStep, None] | None:
    """Return the linear layer that a product with a transposed weight is."""
    if step.op != "MatMul":
        return None
    turned = _maker(step.inputs[1], made, "Transpose")
    if turned is None or turned.inputs[0] not in held:
        return None
    dtype, shape = held[turned.inputs[0]]
    perm = dict(turned.attributes).get("perm", (1, 0))
    if len(shape) != 2 or tuple(perm) != (1, 0) or dtype not in FLOATING:
        return None
    inputs = (step.inputs[0], turned.inputs[0])
    nodes = (*turned.nodes, *step.nodes)
    return replace(step, op=LINEAR, inputs=inputs, attributes=(), nodes=nodes), None


def _with_bias(
    step: OnnxStep, made: Mapping[str, OnnxStep], held: Held, uses: Mapping[str, int]
) -> tuple[OnnxStep, OnnxStep] | None:
    """Return the linear layer with what is added to it, and the one without that."""
    if step.op != "Add":
        return None
    for product, bias in (step.inputs, step.inputs[::-1]):
        linear = _maker(product, made, LINEAR)
        if linear is None or uses[product] != 1 or len(linear.inputs) != 2 or bias not in held:
            continue
        weight_dtype, shape = held[linear.inputs[1]]
        if held[bias] == (weight_dtype, shape[:1]):
            whole = replace(
                linear,
                name=step.name,
                inputs=(*linear.inputs, bias),
                outputs=step.outputs,
                nodes=(*linear.nodes, *step.nodes),
            )
            return whole, linear
    return None


def _silu(
    step: OnnxStep, made: Mapping[str, OnnxStep], uses: Mapping[str, int]
) -> tuple[OnnxStep, OnnxStep] | None:
    """Return the SiLU that a value times its sigmoid is, and the sigmoid."""
    if step.op != "Mul":
        return None
    for value, gate in (step.inputs, step.inputs[::-1]):
        sigmoid = _maker(gate, made, "Sigmoid")
        if sigmoid is not None and sigmoid.inputs[0] == value and uses[gate] == 1:
            nodes = (*sigmoid.nodes, *step.nodes)
            return replace(step, op=SILU, inputs=(value,), nodes=nodes), sigmoid
    return None
