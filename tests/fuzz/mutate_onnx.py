"""Ways to spoil ONNX files: nodes, attributes, initializers, inputs and outputs, and what says their version."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
from onnx import helper

from tests.fuzz.mutate import spoil_bytes
from tests.fuzz.onnx_files import DATA

_FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 2.0, 1e-30, float("inf"), float("nan"))
_INTS = (
    0,
    1,
    -1,
    2,
    -2,
    3,
    4,
    5,
    7,
    8,
    16,
    64,
    255,
    2**31 - 1,
    -(2**31),
    2**40,
    2**62,
    2**63 - 1,
    -(2**63),
)
_TEXTS = ("", "x", "y", "..", "../x", "/etc/passwd", DATA, "a" * 3000, "\0", "\u2028", "NOTSET", "SAME_UPPER",
          "linear", "reflect", "tanh", "none", "add", "com.other", "ai.onnx", "ai.onnx.ml", "ij,jk->ik")  # fmt: skip
_ATTRIBUTES = """axis axes perm to keepdims alpha beta epsilon transA transB mode pads strides dilations group upper
kernel_shape auto_pad ceil_mode value is_causal scale fmod allowzero num_outputs equation approximate reduction start
end"""
_OPS = ("Add", "Sub", "Mul", "Div", "MatMul", "Gemm", "Softmax", "Reshape", "Transpose", "Gather", "Concat", "Slice",
        "Identity", "Cast", "Shape", "Expand", "Pad", "Range", "Where", "Tile", "ReduceMean", "ReduceSum", "ReduceMax",
        "Unsqueeze", "Squeeze", "Flatten", "Split", "Clip", "Pow", "Mod", "Einsum", "ArgMax", "CumSum", "Trilu",
        "LayerNormalization", "RMSNormalization", "BatchNormalization", "Conv", "MaxPool", "GlobalAveragePool",
        "Dropout", "ConstantOfShape", "GatherElements", "GatherND", "ScatterND", "ScatterElements", "Gelu", "Equal",
        "Loop", "If", "Scan", "Own", "QuantizeLinear", "MatMulInteger", "Sum", "Max", "Elu", "LeakyRelu", "Not", "And",
        "GroupNormalization", "Softplus", "LogSoftmax", "Size", "Constant", "Neg", "Sqrt", "Reciprocal", "Round",
        "Attention", "Sign")  # fmt: skip


def spoil(folder: Path, rng: random.Random) -> None:
    """Change the model in a folder, or the file of its weights."""
    file = folder / "m.onnx"
    kind = rng.random()
    if kind < 0.12:
        file.write_bytes(spoil_bytes(file.read_bytes(), rng))
        return
    if kind < 0.16 and (folder / DATA).exists():
        raw = (folder / DATA).read_bytes()
        (folder / DATA).write_bytes(raw[: rng.randrange(len(raw))])
        return
    model = onnx.ModelProto.FromString(file.read_bytes())
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        rng.choice(_CHANGES)(model, rng)
    file.write_bytes(model.SerializeToString())


def _names(model: Any) -> list[str]:
    graph = model.graph
    values = [*graph.input, *graph.output, *graph.initializer]
    return [
        *(v.name for v in values),
        *(name for n in graph.node for name in n.output),
        "",
        "nobody",
    ]


def _node(model: Any, rng: random.Random) -> None:
    nodes = model.graph.node
    if not nodes:
        return
    at = rng.randrange(len(nodes))
    node = nodes[at]
    kind = rng.choice(("op", "input", "output", "drop", "double", "swap", "domain", "more", "self"))
    if kind == "op":
        node.op_type = rng.choice(_OPS)
    elif kind == "input" and node.input:
        node.input[rng.randrange(len(node.input))] = rng.choice(_names(model))
    elif kind == "output" and node.output:
        node.output[rng.randrange(len(node.output))] = rng.choice(_names(model))
    elif kind == "drop":
        del nodes[at]
    elif kind == "double":
        nodes.insert(rng.randrange(len(nodes) + 1), copy.deepcopy(node))
    elif kind == "swap":
        other = copy.deepcopy(nodes[rng.randrange(len(nodes))])
        nodes[rng.randrange(len(nodes))].CopyFrom(other)
    elif kind == "domain":
        node.domain = rng.choice(_TEXTS)
    elif kind == "more":
        rng.choice((node.input, node.output)).append(rng.choice(_names(model)))
    elif node.input and node.output:
        node.input[0] = node.output[0]


def _attribute(model: Any, rng: random.Random) -> None:
    nodes = list(model.graph.node)
    known = [attribute for node in nodes for attribute in node.attribute]
    kind = rng.choice(("value", "value", "name", "drop", "new", "type", "copy"))
    if kind == "new" or not known:
        names = _ATTRIBUTES.split()
        rng.choice(nodes).attribute.append(helper.make_attribute(rng.choice(names), _any(rng)))
        return
    attribute = rng.choice(known)
    if kind == "value":
        _other_value(attribute, rng)
    elif kind == "name":
        attribute.name = rng.choice((*_TEXTS, *(a.name for a in known)))
    elif kind == "type":
        attribute.type = rng.randrange(15)
    elif kind == "copy":
        attribute.CopyFrom(copy.deepcopy(rng.choice(known)))
    else:
        for node in nodes:
            kept = [a for a in node.attribute if a.name != attribute.name]
            del node.attribute[:]
            node.attribute.extend(kept)


def _any(rng: random.Random) -> Any:
    return rng.choice(
        (
            rng.choice(_INTS),
            rng.choice(_FLOATS),
            rng.choice(_TEXTS),
            [rng.choice(_INTS)] * rng.randint(1, 4),
        )
    )


def _other_value(attribute: Any, rng: random.Random) -> None:
    if attribute.type == onnx.AttributeProto.INTS and attribute.ints:
        at = rng.randrange(len(attribute.ints))
        change = rng.choice(("set", "drop", "more"))
        if change == "set":
            attribute.ints[at] = rng.choice(_INTS)
        elif change == "drop":
            del attribute.ints[at]
        else:
            attribute.ints.append(rng.choice(_INTS))
    elif attribute.type == onnx.AttributeProto.INT:
        attribute.i = rng.choice(_INTS)
    elif attribute.type == onnx.AttributeProto.FLOAT:
        attribute.f = rng.choice(_FLOATS)
    else:
        attribute.s = rng.choice(_TEXTS).encode()


def _tensor(model: Any, rng: random.Random) -> None:
    held = model.graph.initializer
    if not held:
        return
    tensor = rng.choice(held)
    kind = rng.choice(
        ("dim", "dims", "type", "name", "raw", "place", "place", "drop", "double", "numbers")
    )
    if kind == "dim" and tensor.dims:
        tensor.dims[rng.randrange(len(tensor.dims))] = rng.choice(_INTS)
    elif kind == "dims":
        other = (
            list(reversed(tensor.dims)) if rng.random() < 0.5 else [*tensor.dims, rng.choice(_INTS)]
        )
        del tensor.dims[:]
        tensor.dims.extend(other)
    elif kind == "type":
        tensor.data_type = rng.randrange(26)
    elif kind == "name":
        tensor.name = rng.choice(_names(model))
    elif kind == "raw":
        tensor.raw_data = bytes(
            rng.randrange(256) for _ in range(rng.choice((0, 1, 4, 8, 64, 512)))
        )
    elif kind == "place" and tensor.external_data:
        entry = rng.choice(tensor.external_data)
        entry.value = rng.choice((*_TEXTS, *map(str, _INTS), "4", "-4", "4096"))
    elif kind == "place":
        tensor.data_location = rng.choice((0, 1))
        onnx.external_data_helper.set_external_data(
            tensor, DATA, rng.choice((0, 4, 100)), rng.choice((4, 64, 512))
        )
    elif kind == "drop":
        del held[rng.randrange(len(held))]
    elif kind == "double":
        held.append(copy.deepcopy(tensor))
    else:
        tensor.float_data.extend([1.0] * rng.randint(1, 9))
        tensor.int64_data.extend([rng.choice(_INTS)])


def _ends(model: Any, rng: random.Random) -> None:
    graph = model.graph
    values = [*graph.input, *graph.output]
    if not values:
        return
    value = rng.choice(values)
    kind = rng.choice(("name", "type", "dim", "rank", "drop", "more", "info", "untyped"))
    dims = value.type.tensor_type.shape.dim
    if kind == "name":
        value.name = rng.choice(_names(model))
    elif kind == "type":
        value.type.tensor_type.elem_type = rng.randrange(26)
    elif kind == "dim" and dims:
        dim = rng.choice(dims)
        if rng.random() < 0.7:
            dim.dim_value = rng.choice(_INTS)
        else:
            dim.dim_param = rng.choice(_TEXTS)
    elif kind == "rank":
        dims.add().dim_value = rng.choice(_INTS)
    elif kind == "drop":
        ends = rng.choice((graph.input, graph.output))
        if ends:
            del ends[rng.randrange(len(ends))]
    elif kind == "more":
        rng.choice((graph.input, graph.output)).append(copy.deepcopy(value))
    elif kind == "info":
        info = copy.deepcopy(value)
        info.name = rng.choice(_names(model))
        graph.value_info.append(info)
    else:
        value.ClearField("type")


def _model(model: Any, rng: random.Random) -> None:
    kind = rng.choice(("opset", "ir", "function", "sparse", "import", "annotation"))
    if kind == "opset" and model.opset_import:
        model.opset_import[0].version = rng.choice(
            (1, 12, 13, 15, 17, 18, 20, 21, 22, 23, 24, 25, 26, 99, -1, 2**62)
        )
    elif kind == "ir":
        model.ir_version = rng.choice((0, 1, 3, 4, 10, 11, 14, 99, 2**62))
    elif kind == "import":
        model.opset_import.add(domain=rng.choice(_TEXTS), version=rng.choice(_INTS))
    elif kind == "sparse":
        model.graph.sparse_initializer.add()
    elif kind == "annotation":
        model.graph.quantization_annotation.add(tensor_name=rng.choice(_names(model)))
    else:
        model.functions.add(name=rng.choice(_OPS), domain=rng.choice(("", "com.other")))


_CHANGES: tuple[Callable[[Any, random.Random], None], ...] = (
    _node, _node, _node, _attribute, _attribute, _attribute, _tensor, _tensor, _ends, _model,
)  # fmt: skip
