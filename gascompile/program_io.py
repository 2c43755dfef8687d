"""Programs to JSON and back (``gascompile.program/1``), without pickle: loading one runs no code from it.

Only ops that torch has registered and a closed list of Python operators can be named, so a file can
call nothing else.
"""

from __future__ import annotations

import importlib.util
import keyword
import math
import operator
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from gascompile import serial, wire_ops
from gascompile.errors import FormatError, UnsupportedOpError
from gascompile.ir import Forms
from gascompile.program import BoundSpec, Dim, InputSpec, Program

FORMAT = "gascompile.program/1"

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    f"operator.{name}": getattr(operator, name)
    for name in (
        "getitem",
        "add",
        "sub",
        "mul",
        "floordiv",
        "truediv",
        "mod",
        "neg",
        "pow",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "and_",
        "or_",
        "not_",
    )
} | {
    f"torch.{name}": getattr(torch, name)
    for name in ("sym_max", "sym_min", "sym_not", "sym_float", "sym_int", "sym_ite")
}
_FUNCTIONS |= {"math.ceil": math.ceil, "math.floor": math.floor, "math.trunc": math.trunc}
_FUNCTIONS |= {str(op): op for op in (wire_ops.LINEAR, wire_ops.DECODE)}
_FUNCTION_NAMES = {function: name for name, function in _FUNCTIONS.items()}
_LIBRARIES = ("transformers",)
"""Installed libraries that a program may need imported: for their ops at once, for their types when called."""


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
        "inputs": [_input_to_json(spec) for spec in program.inputs],
        "bindings": dict(program.bindings),
        "bound": serial.to_json(program.bound),
        "states": sorted(program.states),
        "in_spec": program.in_spec,
        "out_spec": program.out_spec,
        "forms": serial.to_json(program.forms),
    }


def program_from_json(data: Any, *, where: str = "$") -> Program:
    """Return the program of ``program_to_json``'s data.

    Raises:
        FormatError: the data is damaged, of another format, or names an op that is not registered here.
    """
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise FormatError(
            f"{where}: this reader knows the format {FORMAT!r}, the data says {found!r}"
        )
    try:
        _import_libraries(data)
        return Program(
            name=data["name"],
            graph_module=_read_graph(data),
            inputs=tuple(_input_from_json(spec, where) for spec in data["inputs"]),
            bindings={str(node): str(name) for node, name in data["bindings"].items()},
            bound={
                name: serial.from_json(BoundSpec, spec, where=f"{where}.bound.{name}")
                for name, spec in data["bound"].items()
            },
            states=frozenset(data["states"]),
            in_spec=data["in_spec"],
            out_spec=data["out_spec"],
            forms={
                name: serial.from_json(Forms, forms, where=f"{where}.forms.{name}")
                for name, forms in data.get("forms", {}).items()
            },
        )
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        raise FormatError(
            f"{where}: the program is damaged ({type(error).__name__}: {error})"
        ) from error


def load_treespec(text: str) -> pytree.TreeSpec:
    """Return the pytree that ``text`` describes, with the libraries of its types imported.

    Raises:
        FormatError: a type of it is unknown here.
    """
    if _libraries_of(text):
        from gascompile.integrations.huggingface import register_types

        register_types(text)
    try:
        return pytree.treespec_loads(text)
    except (NotImplementedError, ValueError, KeyError, TypeError) as error:
        raise FormatError(
            f"the program's inputs or outputs have a type that is not registered here ({error}); "
            "import the library that defines it first"
        ) from error


def needs_import(text: str) -> bool:
    """Return whether ``load_treespec`` would import a library."""
    return any(library not in sys.modules for library in _libraries_of(text))


def _libraries_of(text: str) -> list[str]:
    return [library for library in _LIBRARIES if f'"{library}.' in text]


def _import_libraries(data: Mapping[str, Any]) -> None:
    """Import what registers the program's ops; what defines its types is only looked for, as it takes seconds.

    Raises:
        FormatError: a library is not installed.
    """
    targets = {node.get("target", "") for node in data["nodes"]}
    text = data["in_spec"] + data["out_spec"]
    for library in _LIBRARIES:
        has_ops = any(t.startswith(f"{library}.") for t in targets)
        if not has_ops and library not in _libraries_of(text):
            continue
        if library not in sys.modules and importlib.util.find_spec(library) is None:
            raise FormatError(
                f"this program needs the library '{library}'; install it and try again"
            )
        if has_ops:
            from gascompile.integrations.huggingface import register_ops

            register_ops(targets)


def _target_name(node: torch.fx.Node) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    if callable(target) and target in _FUNCTION_NAMES:
        return _FUNCTION_NAMES[target]
    raise UnsupportedOpError(
        f"op '{node.name}' calls {target}, which has no form in a saved program"
    )


def _find_target(name: str) -> Callable[..., Any]:
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    namespace, _, rest = name.partition(".")
    packet, _, overload = rest.rpartition(".")
    try:
        found = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    except AttributeError as error:
        raise FormatError(
            f"the op '{name}' is not registered in this process; import the library that defines it"
        ) from error
    if not isinstance(found, torch._ops.OpOverload):
        raise FormatError(f"'{name}' is not an op")
    return found


_ENUMS: dict[str, dict[str, Any]] = {
    "dtype": {
        str(v).removeprefix("torch."): v for v in vars(torch).values() if isinstance(v, torch.dtype)
    },
    "layout": {
        str(v).removeprefix("torch."): v
        for v in vars(torch).values()
        if isinstance(v, torch.layout)
    },
    "memory_format": {
        str(v).removeprefix("torch."): v
        for v in vars(torch).values()
        if isinstance(v, torch.memory_format)
    },
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
    if isinstance(arg, slice):
        return {"slice": [_encode(item, node) for item in (arg.start, arg.stop, arg.step)]}
    if isinstance(arg, torch.device):
        return {"device": str(arg)}
    if isinstance(arg, complex):
        return {"complex": [arg.real, arg.imag]}
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
    if kind == "slice":
        return slice(*(_decode(item, nodes) for item in value))
    if kind == "device":
        return torch.device(value)
    if kind == "complex":
        return complex(*value)
    return _ENUMS[kind][value]


def _read_graph(data: Mapping[str, Any]) -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    nodes: dict[str, torch.fx.Node] = {}
    targets: dict[str, Callable[..., Any]] = {}
    for entry in data["nodes"]:
        name = entry["name"]
        if "target" not in entry:
            node = graph.create_node("placeholder", name, name=name)
        else:
            target = targets.get(entry["target"]) or targets.setdefault(
                entry["target"], _find_target(entry["target"])
            )
            args = tuple(_decode(arg, nodes) for arg in entry["args"])
            kwargs = {key: _decode(arg, nodes) for key, arg in entry["kwargs"].items()}
            node = graph.create_node("call_function", target, args, kwargs, name=name)
        if not name.isidentifier() or keyword.iskeyword(name) or name in nodes:
            raise FormatError(f"the node name {name!r} is not usable")
        node.name = name  # FX would rename a node called like a builtin, such as 'input'
        nodes[name] = node
    graph.output(tuple(_decode(arg, nodes) for arg in data["outputs"]))
    graph.lint()
    return torch.fx.GraphModule(torch.nn.Module(), graph)


def _input_to_json(spec: InputSpec) -> dict[str, Any]:
    return {
        "name": spec.name,
        "path": spec.path,
        "dtype": spec.dtype,
        "shape": [serial.to_json(dim) if isinstance(dim, Dim) else dim for dim in spec.shape],
        "device": spec.device,
        "constant": spec.constant,
    }


def _input_from_json(data: Mapping[str, Any], where: str) -> InputSpec:
    return InputSpec(
        name=data["name"],
        path=data["path"],
        dtype=data["dtype"],
        shape=tuple(
            serial.from_json(Dim, dim, where=f"{where}.shape")
            if isinstance(dim, dict)
            else int(dim)
            for dim in data["shape"]
        ),
        device=data["device"],
        constant=data["constant"],
    )
