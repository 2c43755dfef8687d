"""Steps of an ONNX graph, and how each is run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gascompile.core.errors import UnsupportedOpError, first_line_of
from gascompile.integrations.onnx.table import OPS, WHOLE_OPS

if TYPE_CHECKING:
    import torch
else:
    from gascompile.integrations.onnx.backend import torch

Declared = tuple[str, tuple[int | str | None, ...] | None]
"""Torch's dtype and the sizes of a value by its file: numbers, names, or nothing."""

_REFUSALS = (
    RuntimeError, IndexError, KeyError, ValueError, TypeError, AttributeError, ArithmeticError
)  # fmt: skip
"""What torch's ops, and Python's with sizes, raise for inputs that an op cannot have."""


@dataclass(frozen=True, kw_only=True)
class OnnxStep:
    """A node: op, name, inputs (a name, ``(number,)`` or ``None``), names of results with types, attributes.

    ``nodes`` are the places in the graph of those that it stands for.
    """

    op: str
    name: str
    inputs: tuple[Any, ...]
    outputs: tuple[tuple[str, Declared | None], ...]
    attributes: tuple[tuple[str, Any], ...]
    nodes: tuple[int, ...] = ()


def run_step(step: OnnxStep, values: dict[str, Any]) -> None:
    """Compute a step from the values so far, and add its results to them.

    Raises:
        UnsupportedOpError: its op cannot have such inputs, or a result is not what the file says; names the node.
    """
    inputs = [
        None if given is None else given[0] if isinstance(given, tuple) else values[given]
        for given in step.inputs
    ]
    where = f"the ONNX node '{step.name}' ({step.op})"
    try:
        computed = (WHOLE_OPS.get(step.op) or OPS[step.op]).compute(
            *inputs, **dict(step.attributes)
        )
    except UnsupportedOpError as error:
        raise UnsupportedOpError(f"{where} cannot be taken over: {error}") from error
    except _REFUSALS as error:
        reason = first_line_of(error)
        raise UnsupportedOpError(f"{where} makes no sense to torch: {reason}") from error
    results = computed if isinstance(computed, tuple) else (computed,)
    if len(results) != len(step.outputs):
        raise UnsupportedOpError(
            f"{where} has {len(step.outputs)} outputs, of which {len(results)} are known"
        )
    for (name, declared), result in zip(step.outputs, results, strict=True):
        if declared is not None:
            check_value(where, result, declared)
        values[name] = result


def check_value(what: str, value: Any, declared: Declared) -> None:
    """Refuse a value that is not what the file, or ONNX's own rules, say that it is."""
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        shape: tuple[Any, ...] = tuple(value.shape)
    else:
        dtype, shape = declared[0], (len(value),) if isinstance(value, list) else ()
    wrong = declared[1] is not None and (
        len(shape) != len(declared[1])
        or any(
            isinstance(has, int) and has != said
            for has, said in zip(shape, declared[1], strict=True)
            if isinstance(said, int)
        )
    )
    if dtype != declared[0] or wrong:
        raise UnsupportedOpError(
            f"{what} is {dtype}{list(shape)}, where the model has {declared[0]}{list(declared[1] or ())}"
        )
