"""From an ONNX file to a module: every node is known, with all of its attributes, or the file is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gascompile.core.errors import UnsupportedOpError
from gascompile.integrations.onnx.module import Declared, OnnxModel, Step
from gascompile.integrations.onnx.table import MAX_OPSET, MIN_OPSET, OPS, options_of
from gascompile.integrations.onnx.whole_ops import with_whole_ops
from gascompile.weights.onnx_file import DTYPES, OnnxFile, read_onnx

if TYPE_CHECKING:
    import onnx_ir

_FLAGS = frozenset((
    "allowzero", "ceil_mode", "exclusive", "fmod", "is_causal", "keepdims", "noop_with_empty_axes", "reverse",
    "select_last_index", "storage_order", "transA", "transB", "upper",
))  # fmt: skip
"""Attributes that are 0 or 1; runtimes differ in what they take others for."""
_MOST_KNOWN = 64
"""Values of a constant that may be sizes; no tensor has as many dimensions."""


def onnx_module(file: Path) -> OnnxModel:
    """Return the model of an ONNX file with its weights on the meta device, in eval mode.

    Raises:
        CheckpointError: the file cannot be read, or its weights not in place.
        UnsupportedOpError: it has an op, an attribute or a type that is not known; names the node.
    """
    found = read_onnx(file)
    graph = found.model.graph
    opset = found.model.opset_imports.get("", 0)
    if not MIN_OPSET <= opset <= MAX_OPSET:
        raise UnsupportedOpError(
            f"{file} is of the operator set {opset}; {MIN_OPSET} to {MAX_OPSET} are known: convert it with "
            "onnx.version_converter"
        )
    if found.model.functions:
        raise UnsupportedOpError(
            f"{file} has functions of its own; inline them: onnx.inliner.inline_local_functions(model)"
        )
    constants = dict(found.constants)
    steps = []
    for place, node in enumerate(graph):
        if node.op_type == "Constant" and node.domain in ("", "ai.onnx"):
            constants[str(node.outputs[0].name)] = _constant(node)
        else:
            steps.append(_step(node, place, constants, opset))
    given = [v for v in graph.inputs if v.name not in {*constants, *found.weights}]
    held = {name: (source.dtype, source.shape) for name, source in found.weights.items()}
    held |= {name: (dtype, shape) for name, (dtype, shape, _) in constants.items()}
    outputs = tuple(str(value.name) for value in graph.outputs)
    model = OnnxModel(
        with_whole_ops(steps, held, outputs),
        {name: _numbers(c) for name, c in constants.items() if _may_be_sizes(c)},
        {str(value.name): _input(value) for value in given},
        outputs,
    )
    _add_tensors(model, found, constants)
    return model.eval()


def _add_tensors(model: OnnxModel, found: OnnxFile, constants: Mapping[str, Any]) -> None:
    used = {i for step in model.steps for i in step.inputs if isinstance(i, str)} | set(
        model.outputs
    )
    for name, source in found.weights.items():
        if name not in used:
            continue
        owner, _, leaf = source.name.rpartition(".")
        module: nn.Module = model
        for part in owner.split(".") if owner else ():
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        value = torch.empty(source.shape, dtype=getattr(torch, source.dtype), device="meta")
        module.register_parameter(leaf, nn.Parameter(value, requires_grad=False))
        model.tensors[name] = source.name
    for number, (name, constant) in enumerate(constants.items()):
        if name in used and name not in model.known:
            model.register_buffer(
                f"onnx_constant_{number}", constant_tensor(constant), persistent=False
            )
            model.tensors[name] = f"onnx_constant_{number}"


def constant_tensor(constant: tuple[str, tuple[int, ...], bytes]) -> torch.Tensor:
    """Return a constant, of torch's dtype, shape and little-endian bytes, as a tensor."""
    name, shape, content = constant
    dtype = getattr(torch, name)
    if not content:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(content), dtype=dtype).reshape(shape)


def _numbers(constant: tuple[str, tuple[int, ...], bytes]) -> Any:
    return constant_tensor(constant).tolist()


def _may_be_sizes(constant: tuple[str, tuple[int, ...], bytes]) -> bool:
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


def _step(node: onnx_ir.Node, place: int, constants: Mapping[str, Any], opset: int) -> Step:
    name = ascii(node.name or (node.outputs[0].name if node.outputs else ""))[1:-1][:200]
    where = f"the ONNX node '{name}' ({node.op_type})"
    if node.domain not in ("", "ai.onnx") or node.op_type not in OPS:
        advice = "export the model with the standard ops of torch.onnx.export(dynamo=True)"
        if "Quantize" in node.op_type or "Integer" in node.op_type:
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
        if (
            number in op.numbers
            and constant is not None
            and len(constant_tensor(constant).view(-1)) == 1
        ):
            inputs.append((constant_tensor(constant).item(),))
        else:
            inputs.append(given)  # type: ignore[arg-type]
    return Step(
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
        if content and constant_tensor((dtype, shape, content)).numel() == 1:
            return dtype, constant_tensor((dtype, shape, content)).item()
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


def _content(where: str, value: Any) -> tuple[str, tuple[int, ...], bytes]:
    if value.dtype.name not in DTYPES:
        raise UnsupportedOpError(f"{where} has a value of {value.dtype.name}")
    return DTYPES[value.dtype.name][0], tuple(value.shape.numpy()), bytes(value.tobytes())


def _constant(node: onnx_ir.Node) -> tuple[str, tuple[int, ...], bytes]:
    where = f"the ONNX node '{node.name or node.outputs[0].name}' (Constant)"
    (attr,) = node.attributes.values()
    if attr.name == "value":
        import onnx_ir

        if not isinstance(attr.value, onnx_ir.ExternalTensor):
            return _content(where, attr.as_tensor())
    elif attr.name in ("value_int", "value_ints", "value_float", "value_floats"):
        dtype = torch.int64 if "int" in attr.name else torch.float32
        value = torch.tensor(attr.value, dtype=dtype)
        name = str(dtype).removeprefix("torch.")
        return name, tuple(value.shape), value.numpy().tobytes()
    raise UnsupportedOpError(f"the attribute '{attr.name}' of {where} is not supported")
