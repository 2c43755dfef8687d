"""Which steps of a run a graph of the device can hold, told before anything is tried.

A graph repeats what was given to the device and nothing else: what reads values on the host, draws random
numbers or makes tensors of a size that depends on values has to run each time. The rule is by the op's own
tags, so that it knows ops which were not thought of; whatever it does not know is not captured.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Final, NamedTuple

import torch
from torch import fx

from gascompile.core import moves

Value = Any

MOVE: Final = "it is a move, which the host has to make"
RELEASE: Final = "it releases a staged copy, which takes nothing of the device"
ARRIVAL: Final = "it awaits a resident weight, once"
VALUES: Final = "its result depends on values"
RANDOM: Final = "it draws random numbers"
FOREIGN: Final = "it is no op of torch's or GASCompile's own"
MASK: Final = "it selects with a mask, whose elements are counted on the host"
ELSEWHERE: Final = "it reads or makes a tensor outside of the device's memory"
MOVES: Final = "it touches a value whose memory comes and goes, or that outlives runs and changes"
WAITS: Final = "its kernels wait for the device"
UNKNOWN: Final = "nobody says that it can be captured"

_NAMESPACES = ("aten", "prims", "gascompile")
_MODULES = ("operator", "_operator", "math", "gascompile", "torch")
_WAITING = ("linalg", "cholesky", "svd", "eig", "lu_", "lstsq", "geqrf", "qr", "ctc_loss", "histc")
"""How the names of ops begin whose kernels wait for the device, or may, without a tag that says so."""
_INDEXING = ("index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_")


class Trait(NamedTuple):
    """What of a step a graph has to know."""

    reads: tuple[int, ...] = ()
    """Slots whose values it takes."""
    host: str = UNKNOWN
    """Why no graph can hold it; empty where one can."""
    launches: bool = True
    """Whether it may give the device something to do; a view does not, but for one that turns out to be a copy."""
    name: str = ""
    """Of the op, for messages."""
    num_ops: int = 0
    """How many of the plan's ops it computes."""
    indexes: bool = False
    """Whether its lists are indices, which may be masks."""


def trait_of(node: fx.Node, reads: tuple[int, ...], num_ops: int = 0) -> Trait:
    """Return the trait of a step that calls the op of ``node`` on the values in ``reads``."""
    target = node.target
    is_view = bool(getattr(target, "is_view", False)) or target is operator.getitem
    indexes = isinstance(target, torch._ops.OpOverload) and _indexes(target)
    return Trait(reads, host_reason(node), not is_view, node.name, num_ops, indexes)


def host_reason(node: fx.Node) -> str:
    """Return why the call of ``node`` has to run on the host each time; empty where a graph can hold it."""
    target = node.target
    if target is moves.gather:
        return MOVE
    if not isinstance(target, torch._ops.OpOverload):
        module = str(getattr(target, "__module__", "")).partition(".")[0]
        is_plain = callable(target) and not isinstance(target, torch._ops.OperatorBase)
        return "" if is_plain and module in _MODULES else FOREIGN
    reason = _reason_of(target)
    return "" if reason == RANDOM and is_without_chance(node) else reason


@cache
def _reason_of(target: torch._ops.OpOverload) -> str:
    """Return why an op has to run on the host; ``RANDOM`` where it may draw random numbers."""
    if target.namespace not in _NAMESPACES:
        return FOREIGN
    name, tags = _short_name(target), target.tags
    if torch.Tag.data_dependent_output in tags or name == "is_nonzero":
        return VALUES
    if torch.Tag.dynamic_output_shape in tags and name not in _INDEXING:
        return VALUES
    if name.lstrip("_").startswith(_WAITING):
        return WAITS
    return RANDOM if torch.Tag.nondeterministic_seeded in tags else ""


def value_reason(trait: Trait, values: Sequence[Value], result: Value, device: torch.device) -> str:
    """Return why a call that was just made could not have been part of a graph; empty where it could.

    Args:
        trait: of the step.
        values: its arguments that are no constants.
        result: what it returned.
        device: where all tensors have to be.
    """
    tensors = [*tensors_in(values), *tensors_in((result,))]
    if any(tensor.device.type != device.type for tensor in tensors):
        return ELSEWHERE
    if trait.indexes and any(t.dtype in (torch.bool, torch.uint8) for t in _indices(values)):
        return MASK
    return ""


def makes_memory(values: Sequence[Value], result: Value) -> bool:
    """Return whether a call that was just made returned anything in other memory than it was given."""
    given = {tensor.untyped_storage()._cdata for tensor in tensors_in(values)}
    return any(t.untyped_storage()._cdata not in given for t in tensors_in((result,)))


def tensors_in(values: Sequence[Value]) -> list[torch.Tensor]:
    """Return the tensors among ``values`` and in the lists and tuples among them."""
    tensors: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, list | tuple):
            tensors += tensors_in(value)
    return tensors


def _indices(values: Sequence[Value]) -> list[torch.Tensor]:
    """Return the tensors of the argument that lists the indices."""
    return tensors_in([value for value in values if isinstance(value, list | tuple)])


@cache
def _indexes(target: torch._ops.OpOverload) -> bool:
    return _short_name(target) in _INDEXING


def _short_name(target: torch._ops.OpOverload) -> str:
    return str(target._schema.name).partition("::")[2]


def is_without_chance(node: fx.Node) -> bool:
    """Return whether an op that may draw random numbers is told not to."""
    given: Callable[[str], Value] = _argument(node)
    if given("train") is False or given("training") is False:
        return True
    chances = [given(name) for name in ("dropout_p", "dropout", "p")]
    known = [chance for chance in chances if chance is not None]
    return bool(known) and all(isinstance(chance, int | float) and not chance for chance in known)


def _argument(node: fx.Node) -> Callable[[str], Value]:
    assert isinstance(node.target, torch._ops.OpOverload)
    arguments = node.target._schema.arguments

    def given(name: str) -> Value:
        for i, argument in enumerate(arguments):
            if argument.name == name:
                fallback = argument.default_value if argument.has_default_value() else None
                return node.args[i] if i < len(node.args) else node.kwargs.get(name, fallback)
        return None

    return given
