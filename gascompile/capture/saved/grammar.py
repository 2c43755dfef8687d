"""The grammar of a saved program: what a name, an op, an argument and a signature may be.

Everything here is checked on JSON data, before torch sees any of it: FX writes names and keywords into Python
source, and ops take what they are given. What ``check_program`` passes names known ops alone, calls them by their
own schemas, and holds no text that could end up as code.
"""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, NoReturn

from gascompile.capture.saved.call_types import check_call_type
from gascompile.core.errors import FormatError
from gascompile.core.strides import span_elements
from gascompile.core.tiles import base_name, parse_tile
from gascompile.formats.layout import PACKED_FORMS, is_packed

MAX_NODES: Final = 1 << 20  # and inputs, and names: far beyond any graph that is traced
MAX_ITEMS: Final = 1 << 16
"""Of one list among arguments."""
MAX_NAME: Final = 512  # letters
MAX_DIMENSIONS: Final = 64  # ops of torch take no more
MAX_SIZE: Final = 1 << 48
"""Of one dimension, and of the elements of one tensor."""

DTYPES: Final = (
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "uint16", "uint32",
    "uint64", "bool", "complex128", "complex64", "complex32", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
    "float8_e5m2fnuz", "float8_e8m0fnu",
)  # fmt: skip
"""Those of plain numbers: quantised tensors and packed bits have kernels that trust what they are given."""
DEVICES: Final = ("cpu", "cuda", "cuda:0")
ENUMS: Final[Mapping[str, tuple[str, ...]]] = {
    "dtype": DTYPES,
    "layout": ("strided",),
    "memory_format": ("contiguous_format", "preserve_format", "channels_last", "channels_last_3d"),
    "device": DEVICES,
}
WORDS: Final = frozenset(
    {
        "none", "tanh", "constant", "reflect", "replicate", "circular", "floor", "trunc", "fro", "nuc", "sum", "prod",
        "mean", "amax", "amin", "ij", "xy", "left", "right", "reduced", "complete", "r", "linear", "lower", "higher",
        "midpoint", "nearest", "backward", "ortho", "forward", "L", "U", "gesvd", "gesvdj", "gesvda", "gels", "gelsy",
        "gelsd", "gelss", "float32", *PACKED_FORMS, "bfloat16", "float16",
    }
)  # fmt: skip
"""Texts that ops take; beside them only names of packed forms, and the equation of ``einsum``."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_EQUATION = re.compile(r"[A-Za-z.,> -]{1,400}", re.ASCII)
_KINDS: Final[Mapping[str, type]] = {
    "name": str, "nodes": list, "outputs": list, "inputs": list, "states": list, "draws": list, "bindings": dict,
    "bound": dict, "forms": dict,
}  # fmt: skip
_FIELDS = frozenset({"format", "in_spec", "out_spec", *_KINDS})


def refuse(where: str, problem: str) -> NoReturn:
    """Raise the error of a program that breaks a rule."""
    raise FormatError(f"{where}: {problem}; the program is refused, save it again")


def shown(value: object) -> str:
    """Return a value for a message, short and in ASCII."""
    text = ascii(value) if isinstance(value, (str, int, float, bool)) else type(value).__name__
    return text if len(text) <= 120 else f"{text[:117]}..."


def is_name(value: object) -> bool:
    """Return whether a value can stand in generated source as a name, and as nothing else."""
    return (
        isinstance(value, str)
        and len(value) <= MAX_NAME
        and _NAME.fullmatch(value) is not None
        and not keyword.iskeyword(value)
        and value != "self"  # the generated function's first argument
    )


def check_tensor_name(value: object, where: str, parts: Collection[str] = ()) -> None:
    """Refuse a name of a weight or state that is not printable on one line.

    Args:
        value: the name.
        where: of it.
        parts: names of what is a part of a moment or a divided parameter, in itself no tensor of the program.
    """
    if not isinstance(value, str) or not value or len(value) > 2 * MAX_NAME:
        refuse(where, f"{shown(value)} is no name of a tensor")
    if value.startswith("%") or (parse_tile(value) is not None and value not in parts):
        refuse(where, f"{shown(value)} is called like the result of an op or a part of a weight")
    if not value.isprintable():
        refuse(where, f"the tensor name {shown(value)} holds more than printable characters")


def check_program(data: Any, *, where: str) -> None:
    """Refuse what is no program by its shape and its names; ops and their arguments are ``CallChecker``'s.

    Raises:
        FormatError: names the place.
    """
    if not isinstance(data, dict):
        refuse(where, f"expected an object, found {shown(data)}")
    if set(data) - _FIELDS or not _FIELDS - {"forms", "draws"} <= set(data):
        odd = sorted((set(data) ^ _FIELDS) - {"forms", "draws"}, key=str)
        refuse(where, f"the fields {shown(str(odd[:3]))} are unknown or missing")
    for field, kind in _KINDS.items():
        if not isinstance(data.get(field, kind()), kind):
            refuse(f"{where}.{field}", f"expected a {kind.__name__}, found {shown(data[field])}")
        if len(data.get(field, ())) > MAX_NODES:
            refuse(
                f"{where}.{field}",
                f"it has {len(data[field])} entries, at most {MAX_NODES} are read",
            )
    if not data["name"].isprintable() or len(data["name"]) > MAX_NAME:
        refuse(f"{where}.name", f"{shown(data['name'])} is no name of a model")
    parts = {
        name
        for name in data["bound"]
        if base_name(name) not in data["bound"]
        # What no op can be called is of a divided parameter, which not every step changes.
        and (name in data["states"] or not is_name(base_name(name)))
    }
    for name in (*data["bound"], *data["states"], *data["bindings"].values()):
        check_tensor_name(name, f"{where}.bound", parts)
    placeholders = _check_nodes(data["nodes"], where)
    inputs = [spec.get("name") if isinstance(spec, dict) else None for spec in data["inputs"]]
    num_bound = len(data["bindings"])
    if set(placeholders[:num_bound]) != set(data["bindings"]) or placeholders[num_bound:] != inputs:
        refuse(where, "its first nodes are not its weights and then its inputs")
    if not set(data["bindings"].values()) <= set(data["bound"]):
        refuse(f"{where}.bindings", "a weight is bound that is not described")
    if not set(data["states"]) <= set(data["bound"]) or not set(data.get("forms", {})) <= set(
        data["bound"]
    ):
        refuse(f"{where}.states", "a state or a form is of no weight of the program")
    leaves = check_call_type(data["in_spec"], where=f"{where}.in_spec")
    if leaves != len(inputs):
        refuse(f"{where}.in_spec", f"a call has {leaves} parts, the program {len(inputs)} inputs")
    leaves = check_call_type(data["out_spec"], where=f"{where}.out_spec")
    if leaves != len(data["outputs"]):
        refuse(
            f"{where}.out_spec", f"a result has {leaves} parts, the program {len(data['outputs'])}"
        )


def _check_nodes(nodes: list[Any], where: str) -> list[str]:
    """Return the names of the placeholders; every node has the fields of its kind and a name of its own."""
    placeholders: list[str] = []
    names: set[str] = set()
    for i, entry in enumerate(nodes):
        here = f"{where}.nodes[{i}]"
        if not isinstance(entry, dict) or set(entry) not in (
            {"name"},
            {"name", "target", "args", "kwargs"},
        ):
            refuse(here, "it is neither an input nor a call")
        name = entry["name"]
        if not is_name(name) or name in names:
            refuse(here, f"the node name {shown(name)} is not usable, or stands twice")
        names.add(name)
        if "target" not in entry:
            if len(placeholders) < i:
                refuse(here, f"the input '{name}' stands behind an op")
            placeholders.append(name)
            continue
        if not isinstance(entry["args"], list) or not isinstance(entry["kwargs"], dict):
            refuse(here, "its arguments are no list, or its keywords no object")
        if not isinstance(entry["target"], str):
            refuse(here, f"{shown(entry['target'])} is no name of an op")
    return placeholders


def check_shape(shape: tuple[int, ...], where: str) -> None:
    """Refuse sizes that no tensor has."""
    if len(shape) > MAX_DIMENSIONS or not all(0 <= size <= MAX_SIZE for size in shape):
        refuse(where, f"{shown(str(list(shape)[:8]))} is no shape of a tensor")
    if math.prod(max(size, 1) for size in shape) > MAX_SIZE:
        refuse(where, f"a tensor of the shape {shown(str(list(shape)[:8]))} is beyond any machine")


def check_strides(shape: tuple[int, ...], stride: tuple[int, ...], where: str) -> None:
    """Refuse strides that no tensor of ``shape`` has, and memory beyond any machine."""
    if len(stride) != len(shape) or not all(0 <= step <= MAX_SIZE for step in stride):
        refuse(where, f"{shown(str(list(stride)[:8]))} are no strides of a tensor")
    if span_elements(shape, stride) > MAX_SIZE:
        refuse(where, f"a tensor of the strides {list(stride)[:8]} is beyond any machine")


def check_dtype(dtype: str, where: str) -> None:
    """Refuse what is no dtype of plain numbers."""
    if dtype not in DTYPES:
        refuse(where, f"{shown(dtype)} is no dtype that a program may have")


# ------------------------------------------------------------ arguments, by the type that a schema gives them

Check = Callable[[Any, "set[str] | Mapping[str, Any]"], bool]


def _node(data: Any, nodes: Any) -> bool:
    return (
        isinstance(data, dict)
        and len(data) == 1
        and isinstance(data.get("node"), str)
        and data["node"] in nodes
    )


def is_int(data: Any, nodes: Any) -> bool:
    """Return whether the data is a whole number of 64 bits, or a node."""
    return (type(data) is int and -(1 << 63) <= data < 1 << 63) or _node(data, nodes)


def is_float(data: Any, nodes: Any) -> bool:
    """Return whether the data is a number, or a node."""
    if isinstance(data, dict) and set(data) == {"float"}:
        return data["float"] in ("inf", "-inf", "nan")
    return (type(data) is float and math.isfinite(data)) or is_int(data, nodes)


def is_bool(data: Any, nodes: Any) -> bool:
    """Return whether the data is a truth value, or a node."""
    return isinstance(data, bool) or _node(data, nodes)


def is_number(data: Any, nodes: Any) -> bool:
    """Return whether the data is a number of any kind, or a node."""
    if isinstance(data, dict) and set(data) == {"complex"}:
        parts = data["complex"]
        return isinstance(parts, list) and len(parts) == 2 and all(is_float(p, ()) for p in parts)
    return isinstance(data, bool) or is_float(data, nodes)


def _is_text(data: Any, nodes: Any) -> bool:
    del nodes
    return isinstance(data, str) and (data in WORDS or is_packed(data))


def is_equation(data: Any, nodes: Any) -> bool:
    """Return whether the data is an equation of ``einsum``."""
    del nodes
    return isinstance(data, str) and _EQUATION.fullmatch(data) is not None


def _is_member(kind: str) -> Check:
    def check(data: Any, nodes: Any) -> bool:
        del nodes
        if not isinstance(data, dict) or set(data) != {kind}:
            return False
        return isinstance(data[kind], str) and data[kind] in ENUMS[kind]

    return check


def items_of(data: Any) -> list[Any] | None:
    """Return what a list or tuple among arguments holds; ``None`` where the data is neither."""
    if not isinstance(data, dict) or len(data) != 1:
        return None
    items = data.get("list", data.get("tuple"))
    return items if isinstance(items, list) and len(items) <= MAX_ITEMS else None


def _is_list(check: Check, *, alone: bool) -> Check:
    def are_all(data: Any, nodes: Any) -> bool:
        items = items_of(data)
        if items is None:
            # A list that an op returns, or one number for all dimensions.
            return _node(data, nodes) or (alone and check(data, nodes))
        return all(check(item, nodes) for item in items)

    return are_all


def _optional(check: Check) -> Check:
    return lambda data, nodes: data is None or check(data, nodes)


def _is_none(data: Any, nodes: Any) -> bool:
    del nodes
    return data is None


_SCALARS: Final[Mapping[str, Check]] = {
    "Tensor": is_number, "int": is_int, "SymInt": is_int, "float": is_float, "bool": is_bool, "number": is_number,
    "str": _is_text, "ScalarType": _is_member("dtype"), "Layout": _is_member("layout"),
    "MemoryFormat": _is_member("memory_format"), "Device": _is_member("device"),
}  # fmt: skip
# Ops take numbers in the place of tensors.


def check_of(kind: str) -> Check | None:
    """Return what checks data for an argument of a schema's type; ``None`` for a type that no file may give."""
    if kind == "Optional[Generator]":
        return _is_none
    if kind.startswith("Optional[") and kind.endswith("]"):
        inner = check_of(kind[9:-1])
        return None if inner is None else _optional(inner)
    if kind.startswith("List[") and kind.endswith("]"):
        inner = check_of(kind[5:-1])
        alone = kind[5:-1] in ("int", "SymInt", "float", "number")
        return None if inner is None else _is_list(inner, alone=alone)
    return _SCALARS.get(kind)


def is_result(data: Any, nodes: Any) -> bool:
    """Return whether data is what a program may return: a node's value, or a constant."""
    if isinstance(data, str):
        return len(data) <= MAX_NAME and data.isprintable()
    return data is None or is_number(data, nodes)
