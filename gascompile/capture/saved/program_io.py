"""Programs to JSON and back (``gascompile.program/1``), without pickle: loading one runs no code from it.

What a file may hold is the grammar of ``program_grammar``, what it may call the list of ``program_ops``; both are
checked before a node is made.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from gascompile.capture.saved import grammar
from gascompile.capture.saved.call_types import (
    check_call_type,
    check_registered,
    transformers_modules,
)
from gascompile.capture.saved.ops import (
    FUNCTION_NAMES,
    OPS_OF_LIBRARIES,
    check_call,
    find_target,
)
from gascompile.core import serial
from gascompile.core.errors import FormatError, UnsupportedOpError
from gascompile.core.input_facts import FACTS
from gascompile.core.model_libraries import model_libraries
from gascompile.core.program import (
    BoundSpec,
    Dim,
    InputSpec,
    Program,
    Stride,
    add_node,
    draws,
    graph_module_of,
)
from gascompile.core.workload import Forms
from gascompile.formats.layout import is_packed

FORMAT = "gascompile.program/1"

_TRANSFORMERS = "transformers"
"""The library that a program may need imported: for its ops at once, for its types when called."""


def program_to_json(program: Program) -> dict[str, Any]:
    """Return JSON data of ``program``.

    Raises:
        UnsupportedOpError: the graph holds something that has no JSON form.
    """
    nodes = []
    for node in program.graph_module.graph.nodes:
        if node.op == "placeholder":
            nodes.append({"name": node.name})
        elif node.op == "call_function":
            nodes.append(
                {
                    "name": node.name,
                    "target": _target_name(node),
                    "args": [_encode(arg, node) for arg in node.args],
                    "kwargs": {key: _encode(arg, node) for key, arg in node.kwargs.items()},
                }
            )
        else:
            outputs = [_encode(arg, node) for arg in node.args[0]]
    return {
        "format": FORMAT,
        "name": program.name,
        "nodes": nodes,
        "outputs": outputs,
        "inputs": [serial.to_json(spec) for spec in program.inputs],
        "bindings": dict(program.bindings),
        "bound": serial.to_json(program.bound),
        "states": sorted(program.states),
        "in_spec": program.in_spec,
        "out_spec": program.out_spec,
        "forms": serial.to_json(program.forms),
        "draws": [node.name for node in program.op_nodes() if draws(node.target)],
    }


def program_from_json(data: Any, *, where: str = "$", allow_code: bool = False) -> Program:
    """Return the program of ``program_to_json``'s data, which is checked before torch sees any of it.

    Args:
        data: JSON data from anywhere.
        where: what messages call it.
        allow_code: let it call ops that are not on the list of ``program_ops``.

    Raises:
        FormatError: the data is damaged, of another format, or names what it may not, or what is not here.
    """
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        said = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise FormatError(
            f"{where}: this reader knows the format {FORMAT!r}, the data says {said!r}"
        )
    grammar.check_program(data, where=where)
    _import_libraries(data)
    inputs = tuple(
        serial.from_json(InputSpec, spec, where=f"{where}.inputs[{i}]")
        for i, spec in enumerate(data["inputs"])
    )
    bound = {
        name: serial.from_json(BoundSpec, spec, where=f"{where}.bound.{name!a}")
        for name, spec in data["bound"].items()
    }
    forms = {
        name: serial.from_json(Forms, spec, where=f"{where}.forms.{name!a}")
        for name, spec in data.get("forms", {}).items()
    }
    _check_signature(inputs, bound, forms, where)
    return Program(
        name=data["name"],
        graph_module=_read_graph(data, where, allow_code=allow_code),
        inputs=inputs,
        bindings=data["bindings"],
        bound=bound,
        states=frozenset(data["states"]),
        in_spec=data["in_spec"],
        out_spec=data["out_spec"],
        forms=forms,
    )


def _check_layout(spec: InputSpec, before: tuple[InputSpec, ...], where: str) -> None:
    """Refuse strides that no input has, and memory shared with what is no earlier input."""
    dims = {dim.name for dim in spec.shape if isinstance(dim, Dim)}
    for step in spec.stride or ():
        if isinstance(step, Stride) and not dims.issuperset(step.dims):
            grammar.refuse(where, "a stride grows with a dimension that the input has not")
    if spec.stride is not None and len(spec.stride) != len(spec.shape):
        grammar.refuse(where, "it has another number of strides than of dimensions")
    shape = spec.upper_shape()
    grammar.check_strides(shape, spec.strides_for(shape), where)
    known = {other.name for other in before if other.dtype is not None}
    if spec.same_as and (spec.dtype is None or spec.same_as not in known):
        grammar.refuse(where, f"it is to be {grammar.shown(spec.same_as)}, no earlier input")
    if spec.base and (spec.dtype is None or spec.base not in known | {spec.name}):
        grammar.refuse(where, f"it is to lie in {grammar.shown(spec.base)}, no earlier input")
    if abs(spec.offset_bytes) > grammar.MAX_SIZE:
        grammar.refuse(where, f"it lies {spec.offset_bytes} bytes from another input")


def _check_signature(
    inputs: tuple[InputSpec, ...],
    bound: Mapping[str, BoundSpec],
    forms: Mapping[str, Forms],
    where: str,
) -> None:
    for i, spec in enumerate(inputs):
        here = f"{where}.inputs[{i}]"
        for dim in spec.shape:
            if isinstance(dim, Dim) and not 0 <= dim.minimum <= dim.maximum <= grammar.MAX_SIZE:
                grammar.refuse(
                    here, f"the range of the dimension {grammar.shown(dim.name)} is none"
                )
        grammar.check_shape(spec.upper_shape(), here)
        if spec.dtype is not None:
            grammar.check_dtype(spec.dtype, here)
        _check_layout(spec, inputs[:i], here)
        for fact in spec.facts:
            if fact.partition("=")[0] not in FACTS:
                grammar.refuse(here, f"{grammar.shown(fact)} is nothing that inputs are asked for")
        if spec.device not in grammar.DEVICES:
            grammar.refuse(here, f"{grammar.shown(spec.device)} is no device of an input")
        if not spec.path.isprintable() or len(spec.path) > grammar.MAX_NAME:
            grammar.refuse(here, f"{grammar.shown(spec.path)} is no place in a call")
    for name, weight in bound.items():
        grammar.check_shape(weight.shape, f"{where}.bound.{name!a}")
        grammar.check_strides(weight.shape, weight.strides, f"{where}.bound.{name!a}")
        grammar.check_dtype(weight.dtype, f"{where}.bound.{name!a}")
    for name, form in forms.items():
        for kind in (form.stored, form.wire, form.compute):
            if kind not in grammar.DTYPES and not is_packed(kind):
                grammar.refuse(f"{where}.forms.{name!a}", f"{grammar.shown(kind)} is no form")


def load_treespec(text: str) -> pytree.TreeSpec:
    """Return the pytree that ``text`` describes, with the parts of transformers that define its types imported.

    Raises:
        FormatError: a type of it may not be named, or is unknown here.
    """
    check_call_type(text, where="the structure of a call")
    if modules := transformers_modules(text):
        for library in model_libraries():
            library.register_types(modules)
    check_registered(text)
    try:
        return pytree.treespec_loads(text)
    except (NotImplementedError, ValueError, KeyError, TypeError, AssertionError) as error:
        raise FormatError(
            f"the program's inputs or outputs have a type that is not registered here ({error}); "
            "import the library that defines it first"
        ) from error


def needs_import(text: str) -> bool:
    """Return whether ``load_treespec`` would import a library."""
    return bool(transformers_modules(text)) and _TRANSFORMERS not in sys.modules


def _import_libraries(data: Mapping[str, Any]) -> None:
    """Import what registers the program's ops; what defines its types is only looked for, as it takes seconds.

    Raises:
        FormatError: the library is not installed.
    """
    targets = {node["target"] for node in data["nodes"] if "target" in node}
    has_ops = any(target in OPS_OF_LIBRARIES for target in targets)
    if not has_ops and not transformers_modules(data["in_spec"] + data["out_spec"]):
        return
    if _TRANSFORMERS not in sys.modules and importlib.util.find_spec(_TRANSFORMERS) is None:
        raise FormatError(
            f"this program needs the library '{_TRANSFORMERS}'; install it and try again"
        )
    if has_ops:
        for library in model_libraries():
            library.register_ops(targets)


def _target_name(node: torch.fx.Node) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    if callable(target) and target in FUNCTION_NAMES:
        return FUNCTION_NAMES[target]
    raise UnsupportedOpError(
        f"op '{node.name}' calls {target}, which has no form in a saved program"
    )


_ENUMS: dict[str, dict[str, Any]] = {
    kind: {name: getattr(torch, name) for name in names}
    for kind, names in grammar.ENUMS.items()
    if kind != "device"
}


def _encode(arg: Any, node: torch.fx.Node) -> Any:
    """Return JSON for an argument: plain scalars as they are, everything else as a one-key object."""
    if arg is None or isinstance(arg, (bool, int, str)):
        return arg
    if isinstance(arg, torch.fx.Node):
        return {"node": arg.name}
    if isinstance(arg, float):
        return arg if math.isfinite(arg) else {"float": repr(arg)}
    if isinstance(arg, (list, tuple)):
        return {
            "tuple" if isinstance(arg, tuple) else "list": [_encode(item, node) for item in arg]
        }
    if isinstance(arg, torch.device):
        return {"device": str(arg)}
    if isinstance(arg, complex):
        return {"complex": [_encode(arg.real, node), _encode(arg.imag, node)]}
    for kind, members in _ENUMS.items():
        if str(arg).removeprefix("torch.") in members and not isinstance(arg, str):
            return {kind: str(arg).removeprefix("torch.")}
    raise UnsupportedOpError(
        f"op '{node.name}' has an argument of type {type(arg).__name__}, which has no form in a saved program"
    )


def _decode(data: Any, nodes: Mapping[str, torch.fx.Node]) -> Any:
    if not isinstance(data, dict):
        return data
    ((kind, value),) = data.items()
    if kind == "node":
        return nodes[value]
    if kind == "float":
        return float(value)
    if kind == "list":
        return [_decode(item, nodes) for item in value]
    if kind == "tuple":
        return tuple(_decode(item, nodes) for item in value)
    if kind == "device":
        return torch.device(value)
    if kind == "complex":
        return complex(*(_decode(part, nodes) for part in value))
    return _ENUMS[kind][value]


def _read_graph(data: Mapping[str, Any], where: str, *, allow_code: bool) -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    nodes: dict[str, torch.fx.Node] = {}
    targets: dict[str, Callable[..., Any]] = {}
    drawing = []
    for i, entry in enumerate(data["nodes"]):
        name, called = entry["name"], entry.get("target")
        if called is None:
            node = graph.create_node("placeholder", name, name=name)
        else:
            here = f"{where}.nodes[{i}]"
            if called not in targets:
                targets[called] = find_target(called, allow_code=allow_code, where=here)
            target = targets[called]
            check_call(target, entry, nodes, here)
            if draws(target):
                drawing.append(name)
            args = tuple(_decode(arg, nodes) for arg in entry["args"])
            kwargs = {key: _decode(arg, nodes) for key, arg in entry["kwargs"].items()}
            node = add_node(graph, target, args, kwargs, name)
        if node.name != name:
            node.name = name  # FX would rename a node called like a builtin, such as 'input'
        nodes[name] = node
    if drawing != data.get("draws", []):
        grammar.refuse(
            f"{where}.draws", f"{len(drawing)} ops draw random numbers, and others are listed"
        )
    for value in data["outputs"]:
        if not grammar.is_result(value, nodes):
            grammar.refuse(f"{where}.outputs", f"{grammar.shown(value)} is no result of a node")
    graph.output(tuple(_decode(arg, nodes) for arg in data["outputs"]))
    graph.lint()
    return graph_module_of(torch.nn.Module(), graph)
