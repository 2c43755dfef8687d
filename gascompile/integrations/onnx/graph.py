"""The graph of an ONNX file as steps: every node is known, with all of its attributes, or the file is refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gascompile.core.errors import UnsupportedOpError
from gascompile.integrations.onnx.steps import Declared, OnnxStep
from gascompile.integrations.onnx.table import MAX_OPSET, MIN_OPSET, OPS, options_of
from gascompile.integrations.onnx.whole_ops import with_whole_ops
from gascompile.weights.onnx_file import DTYPES, OnnxFile, read_onnx

if TYPE_CHECKING:
    import numpy as np
    import onnx_ir

Constant = tuple[str, tuple[int, ...], bytes]
"""Torch's dtype, shape and little-endian bytes."""

_FLAGS = frozenset((
    "allowzero", "ceil_mode", "exclusive", "fmod", "is_causal", "keepdims", "noop_with_empty_axes", "reverse",
    "select_last_index", "storage_order", "transA", "transB", "upper",
))  # fmt: skip
"""Attributes that are 0 or 1; runtimes differ in what they take others for."""
_MOST_KNOWN = 64
"""Values of a constant that may be sizes; no tensor has as many dimensions."""
_MOST_VALUES = 1 << 30
"""Of an input that is made up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxGraph:
    """What a model computes, in order, and of what."""

    file: OnnxFile
    steps: tuple[OnnxStep, ...]
    known: Mapping[str, Any]
    """Constants that may be sizes, as numbers."""
    held: Mapping[str, Constant]
    """Constants that are used as tensors, or may be, lists of sizes among them."""
    inputs: Mapping[str, Declared]
    outputs: tuple[str, ...]
    used: frozenset[str]
    """Names that steps take, or that the model returns."""


def made_up_sizes(
    inputs: Mapping[str, Declared], batch: int, tokens: int
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of made-up inputs; sizes with names are ``batch`` along the first axis, else ``tokens``.

    Raises:
        UnsupportedOpError: an input is of a size that nobody has.
    """
    sizes_of = {}
    for name, (_, dims) in inputs.items():
        sizes = tuple(
            dim if isinstance(dim, int) else batch if axis == 0 else tokens
            for axis, dim in enumerate(dims or ())
        )
        if min(sizes, default=0) < 0 or math.prod(sizes) > _MOST_VALUES:
            raise UnsupportedOpError(
                f"the input {ascii(name)[:200]} has the sizes {list(sizes)}; give inputs of plausible ones"
            )
        sizes_of[name] = sizes
    return sizes_of


def read_graph(file: Path) -> OnnxGraph:
    """Return the graph of an ONNX file.

    Raises:
        CheckpointError: the file cannot be read, or its weights not in place.
        UnsupportedOpError: it has an op, an attribute or a type that is not known; names the node.
    """
    content = read_onnx(file)
    graph = content.model.graph
    opset = content.model.opset_imports.get("", 0)
    if not MIN_OPSET <= opset <= MAX_OPSET:
        raise UnsupportedOpError(
            f"{file} is of the operator set {opset}; {MIN_OPSET} to {MAX_OPSET} are known: convert it with "
            "onnx.version_converter"
        )
    if content.model.functions:
        raise UnsupportedOpError(
            f"{file} has functions of its own; inline them: onnx.inliner.inline_local_functions(model)"
        )
    constants = dict(content.constants)
    steps = []
    for place, node in enumerate(graph):
        if node.op_type == "Constant" and node.domain in ("", "ai.onnx"):
            constants[str(node.outputs[0].name)] = _constant(node)
        else:
            steps.append(_step(node, place, constants, opset))
    given = [v for v in graph.inputs if v.name not in {*constants, *content.weights}]
    held = {name: (source.dtype, source.shape) for name, source in content.weights.items()}
    held |= {name: (dtype, shape) for name, (dtype, shape, _) in constants.items()}
    outputs = tuple(str(value.name) for value in graph.outputs)
    whole = with_whole_ops(steps, held, outputs)
    known = {name: _numbers(c) for name, c in constants.items() if _may_be_sizes(c)}
    used = {i for step in whole for i in step.inputs if isinstance(i, str)} | set(outputs)
    return OnnxGraph(
        file=content,
        steps=whole,
        known=known,
        held={n: c for n, c in constants.items() if n in used and n not in known}
        | {n: constants[n] for n, c in known.items() if n in used and isinstance(c, list)},
        inputs={str(value.name): _input(value) for value in given},
        outputs=outputs,
        used=frozenset(used),
    )


def constant_array(constant: Constant) -> np.ndarray[Any, Any]:
    """Return a constant as an array."""
    import ml_dtypes
    import numpy as np

    name, shape, content = constant
    dtype = np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
    return np.frombuffer(content, dtype=dtype).reshape(shape)


def _number(constant: Constant) -> Any:
    """Return the one number that a constant is."""
    value = constant_array(constant).reshape(-1)[0]
    return float(value) if "float" in constant[0] else value.item()


def _numbers(constant: Constant) -> Any:
    return constant_array(constant).tolist()


def _is_one(constant: Constant) -> bool:
    return math.prod(constant[1]) == 1


def _may_be_sizes(constant: Constant) -> bool:
    dtype, shape, content = constant
    return dtype == "int64" and len(shape) <= 1 and len(content) <= 8 * _MOST_KNOWN


def _type(value: onnx_ir.Value) -> Declared | None:
    if value.dtype is None or value.dtype.name not in DTYPES:
        return None
    dims = value.shape
    sizes = None if dims is None else tuple(d if isinstance(d, int) else str(d.value) for d in dims)
    return DTYPES[value.dtype.name][0], sizes


def _input(value: onnx_ir.Value) -> Declared:
    declared = _type(value)
    if declared is None or declared[1] is None:
        raise UnsupportedOpError(
            f"the input {ascii(value.name)[:200]} is {value.type} of the shape {value.shape}; dense tensors of torch's "
            "dtypes and of a known number of dimensions are supported"
        )
    return declared


def _step(node: onnx_ir.Node, place: int, constants: Mapping[str, Any], opset: int) -> OnnxStep:
    name = ascii(node.name or (node.outputs[0].name if node.outputs else ""))[1:-1][:200]
    where = f"the ONNX node '{name}' ({node.op_type})"
    if node.domain not in ("", "ai.onnx") or node.op_type not in OPS:
        advice = "export the model with the standard ops of torch.onnx.export(dynamo=True)"
        if "quantize" in node.op_type.lower() or "Integer" in node.op_type:
            advice = "pass the model before it was quantised, with weights='int8' or 'int4'"
        raise UnsupportedOpError(
            f"{where} of the domain '{node.domain or 'ai.onnx'}' is not known; {advice}"
        )
    op, takes = OPS[node.op_type], options_of(node.op_type)
    attributes = {
        attr.name: _attribute(where, attr) for attr in node.attributes.values()
        if attr.name in takes or not _is_default(node, attr, opset)
    }  # fmt: skip
    for attr_name, attribute in attributes.items():
        if attr_name not in takes:
            raise UnsupportedOpError(f"the attribute '{attr_name}' of {where} is not known")
        if attr_name in _FLAGS and attribute not in (0, 1):
            raise UnsupportedOpError(f"the attribute '{attr_name}' of {where} is neither 0 nor 1")
    results = tuple((str(v.name), _type(v)) for v in node.outputs if v.name)
    if "results" in takes:
        attributes["results"] = len(results)
    if "result_dtype" in takes and results[0][1] is not None:
        attributes["result_dtype"] = results[0][1][0]
    inputs = []
    for number, value in enumerate(node.inputs):
        given = None if value is None or not value.name else str(value.name)
        constant = constants.get(given) if given is not None else None
        if number in op.numbers and constant is not None and _is_one(constant):
            inputs.append((_number(constant),))
        else:
            inputs.append(given)  # type: ignore[arg-type]
    return OnnxStep(
        op=node.op_type,
        name=name,
        inputs=tuple(inputs),
        outputs=results,
        attributes=tuple(attributes.items()),
        nodes=(place,),
    )


def _is_default(node: onnx_ir.Node, attr: onnx_ir.Attr, opset: int) -> bool:
    """Return whether an attribute says what holds without it."""
    import onnx

    said = onnx.defs.get_schema(node.op_type, opset).attributes.get(attr.name)
    if said is None or not said.default_value.name:
        return False
    default = onnx.helper.get_attribute_value(said.default_value)
    return bool(attr.value == (default.decode() if isinstance(default, bytes) else default))


def _attribute(where: str, attr: onnx_ir.Attr) -> Any:
    kind = attr.type.name
    if attr.is_ref() or kind not in ("INT", "FLOAT", "STRING", "INTS", "FLOATS", "TENSOR"):
        raise UnsupportedOpError(f"the attribute '{attr.name}' of {where} is of {kind}")
    if kind == "TENSOR":
        dtype, shape, content = _content(where, attr.as_tensor())
        if _is_one((dtype, shape, content)):
            return dtype, _number((dtype, shape, content))
        raise UnsupportedOpError(f"the attribute '{attr.name}' of {where} is not one value")
    if attr.name == "to":
        import onnx_ir

        known = {onnx_ir.DataType[name].value: dtype for name, (dtype, _) in DTYPES.items()}
        if attr.value not in known:
            kinds = {kind.value: kind.name for kind in onnx_ir.DataType}
            raise UnsupportedOpError(
                f"{where} casts to {kinds.get(attr.value, attr.value)}, with which torch does not compute"
            )
        return known[attr.value]
    return tuple(attr.value) if kind in ("INTS", "FLOATS") else attr.value


def _content(where: str, value: Any) -> Constant:
    if value.dtype.name not in DTYPES:
        raise UnsupportedOpError(f"{where} has a value of {value.dtype.name}")
    return DTYPES[value.dtype.name][0], tuple(value.shape.numpy()), bytes(value.tobytes())


def _constant(node: onnx_ir.Node) -> Constant:
    where = f"the ONNX node '{node.name or node.outputs[0].name}' (Constant)"
    (attr,) = node.attributes.values()
    if attr.name == "value":
        import onnx_ir

        if not isinstance(attr.value, onnx_ir.ExternalTensor):
            return _content(where, attr.as_tensor())
    elif attr.name in ("value_int", "value_ints", "value_float", "value_floats"):
        import numpy as np

        name = "int64" if "int" in attr.name else "float32"
        value = np.asarray(attr.value, dtype=name)
        return name, value.shape, value.tobytes()
    raise UnsupportedOpError(f"the attribute '{attr.name}' of {where} is not supported")
