"""The ops that a saved program may call, and how each must be called.

Op packets of ``aten`` by the list in ``aten_ops``; of a packet, those overloads that take plain data and tensors and
make tensors or numbers: none that writes into an ``out`` or takes a generator, a storage or a stream. What else this
process has registered is code of its user's, which a file may name only where machine code is allowed, too.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import Any, Final, NamedTuple

import torch

from gascompile.capture.saved import grammar
from gascompile.capture.saved.aten_ops import ATEN
from gascompile.core.errors import FormatError
from gascompile.core.own_ops import OWN_OPS
from gascompile.formats import ops as format_ops

Target = Callable[..., Any]

_OPERATORS: Final = (
    "add", "sub", "mul", "floordiv", "truediv", "mod", "neg", "pow", "eq", "ne", "lt", "le", "gt", "ge", "and_",
    "or_", "not_",
)  # fmt: skip
FUNCTIONS: Final[Mapping[str, Target]] = {
    "operator.getitem": operator.getitem,
    **{f"operator.{name}": getattr(operator, name) for name in _OPERATORS},
    **{
        f"torch.{name}": getattr(torch, name)
        for name in ("sym_max", "sym_min", "sym_not", "sym_float", "sym_int", "sym_ite")
    },
    **{f"math.{name}": getattr(math, name) for name in ("ceil", "floor", "trunc")},
}
"""What computes sizes from sizes, and takes elements of results."""
FUNCTION_NAMES: Final = {function: name for name, function in FUNCTIONS.items()}
_OWN: Final = {str(op): op for op in (format_ops.LINEAR, format_ops.DECODE)}
OPS_OF_LIBRARIES: Final = frozenset(
    {
        "transformers.grouped_mm_fallback.default",
        "transformers.grouped_mm_fallback_backward.default",
    }
)
"""Those of transformers that its models are captured with; reading them imports the part that registers them."""
_MAX_EXPONENT: Final = 64  # a larger one makes numbers that take seconds and memory


class Argument(NamedTuple):
    """An argument of an op: what it is called, what it may be, and whether it must be given."""

    name: str
    check: grammar.Check
    kind: str
    required: bool
    keyword_only: bool


@cache
def arguments_of(target: torch._ops.OpOverload) -> tuple[Argument, ...] | None:
    """Return the arguments of an op; ``None`` where a file cannot give one of them, or take a result."""
    arguments = []
    for argument in target._schema.arguments:
        kind = str(argument.real_type)
        check = grammar.check_of(kind)
        if check is None or argument.is_out:
            return None
        if target is torch.ops.aten.einsum.default and kind == "str":
            check = grammar.is_equation
        required = not argument.has_default_value()
        arguments.append(Argument(argument.name, check, kind, required, argument.kwarg_only))
    results = {str(result.real_type) for result in target._schema.returns}
    return tuple(arguments) if results <= _RESULTS else None


_RESULTS: Final = frozenset(
    {"Tensor", "List[Tensor]", "int", "SymInt", "float", "bool", "number", "List[int]"}
)


def is_allowed(name: str) -> bool:
    """Return whether a program may call what ``name`` names, as far as the name says."""
    if name in FUNCTIONS or name in _OWN or name in OPS_OF_LIBRARIES:
        return True
    namespace, _, rest = name.partition(".")
    packet, _, _ = rest.rpartition(".")
    return namespace == "aten" and packet in ATEN


def find_target(name: str, *, allow_code: bool, where: str) -> Target:
    """Return what a node of a program calls.

    Args:
        name: as the file has it.
        allow_code: also find every other op that this process has registered.
        where: of the node.

    Raises:
        FormatError: it is not on the list, or not there.
    """
    if name in FUNCTIONS:
        return FUNCTIONS[name]
    if name in _OWN:
        return _OWN[name]
    if not is_allowed(name) and not allow_code:
        raise FormatError(
            f"{where}: the op {grammar.shown(name)} is none of those that data may call; if you trust who made it and "
            "have imported what registers the op, pass allow_code=True (--allow-code)"
        )
    op = registered(name)
    if op is None:
        raise FormatError(
            f"{where}: the op {grammar.shown(name)} is not registered in this process; import the library that "
            "defines it, or use the version of torch that the file was made with"
        )
    if arguments_of(op) is None:
        raise FormatError(f"{where}: the op {grammar.shown(name)} takes what no file can hold")
    return op


def registered(name: str) -> torch._ops.OpOverload | None:
    """Return the op of a name like ``aten.add.Tensor``, if this process has it."""
    parts = name.split(".")
    if len(parts) != 3 or not all(part.isidentifier() and part.isascii() for part in parts):
        return None
    namespace, packet, overload = parts
    if namespace in OWN_OPS:
        import_module(OWN_OPS[namespace])
    try:
        op = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    except AttributeError:
        return None
    return op if isinstance(op, torch._ops.OpOverload) else None


def check_call(target: Target, entry: Mapping[str, Any], nodes: Any, where: str) -> None:
    """Refuse arguments that are not what the schema of ``target`` says.

    Args:
        target: what is called.
        entry: the node's JSON, with ``args`` and ``kwargs``.
        nodes: names of the nodes before.
        where: of the node.

    Raises:
        FormatError: names the argument.
    """
    if not isinstance(target, torch._ops.OpOverload):
        _check_function(target, entry, nodes, where)
        return
    expected = arguments_of(target)
    assert expected is not None, "such ops are not found"
    args, kwargs = entry["args"], entry["kwargs"]
    if len(args) > len(expected):
        grammar.refuse(where, f"{target} takes {len(expected)} arguments, here are {len(args)}")
    num_named = 0
    for i, argument in enumerate(expected):
        if i < len(args):
            value = args[i]
            if argument.keyword_only or argument.name in kwargs:
                grammar.refuse(where, f"{target} takes '{argument.name}' by its name, and once")
        elif argument.name in kwargs:
            value, num_named = kwargs[argument.name], num_named + 1
        elif argument.required:
            grammar.refuse(where, f"{target} needs '{argument.name}'")
        else:
            continue
        if not argument.check(value, nodes):
            grammar.refuse(
                where,
                f"'{argument.name}' of {target} is a {argument.kind}, here is {grammar.shown(value)}",
            )
    if num_named != len(kwargs):
        odd = min(set(kwargs) - {argument.name for argument in expected}, default="")
        grammar.refuse(where, f"{target} has no argument {grammar.shown(odd)}")


def _check_function(target: Target, entry: Mapping[str, Any], nodes: Any, where: str) -> None:
    args, kwargs = entry["args"], entry["kwargs"]
    if kwargs or not 1 <= len(args) <= 3:
        grammar.refuse(
            where, f"{FUNCTION_NAMES[target]} takes one to three arguments and no keywords"
        )
    if target is operator.getitem:
        is_element = len(args) == 2 and type(args[1]) is int and abs(args[1]) < grammar.MAX_ITEMS
        if not is_element or not isinstance(args[0], dict) or not grammar.is_int(args[0], nodes):
            grammar.refuse(where, "operator.getitem takes a node and the number of its element")
    elif not all(grammar.is_number(value, nodes) for value in args):
        grammar.refuse(where, f"{FUNCTION_NAMES[target]} takes numbers")
    elif target is operator.pow and not (
        len(args) == 2 and type(args[1]) in (int, float) and abs(args[1]) <= _MAX_EXPONENT
    ):
        grammar.refuse(where, f"an exponent is a number up to {_MAX_EXPONENT}")
