"""A module that computes what an ONNX graph says, op by op, for ``torch.export`` to trace."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import traceback

from gascompile.core.errors import UnsupportedOpError
from gascompile.integrations.onnx.table import OPS, WHOLE_OPS
from gascompile.integrations.onnx.values import tensor

NODES = "gascompile.onnx"
"""Key in the ``custom`` part of a traced node's ``meta``: the places in the ONNX graph of the nodes that it is of."""
Declared = tuple[str, tuple[int | str | None, ...] | None]
"""Torch's dtype and the sizes of a value by its file: numbers, names, or nothing."""

_MOST_VALUES = 1 << 30
"""Of an input that is made up."""
_REFUSALS = (
    RuntimeError, IndexError, KeyError, ValueError, TypeError, AttributeError, ArithmeticError
)  # fmt: skip
"""What torch's ops, and Python's with sizes, raise for inputs that an op cannot have."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A node: op, name, inputs (a name, ``(number,)`` or ``None``), names of results with types, attributes.

    ``nodes`` are the places in the graph of those that it stands for.
    """

    op: str
    name: str
    inputs: tuple[Any, ...]
    outputs: tuple[tuple[str, Declared | None], ...]
    attributes: tuple[tuple[str, Any], ...]
    nodes: tuple[int, ...] = ()


class OnnxModel(nn.Module):
    """A graph of ONNX; takes tensors in the order of its inputs or by name.

    Returns a tensor, or a tuple of them in the order of the graph's outputs.
    """

    def __init__(
        self,
        steps: tuple[Step, ...],
        known: Mapping[str, Any],
        inputs: Mapping[str, Declared],
        outputs: tuple[str, ...],
    ) -> None:
        super().__init__()
        self.steps = steps
        self.known = dict(known)
        self.inputs = dict(inputs)
        self.outputs = outputs
        self.tensors: dict[str, str] = {}
        """Name of a parameter or a buffer by its name in the graph."""

    def made_up_inputs(self, batch: int, tokens: int) -> dict[str, torch.Tensor]:
        """Return zeros of the inputs' types; sizes with names are ``batch`` along the first axis, else ``tokens``.

        Raises:
            UnsupportedOpError: an input is of a size that nobody has.
        """
        found = {}
        for name, (dtype, dims) in self.inputs.items():
            sizes = [
                dim if isinstance(dim, int) else batch if axis == 0 else tokens
                for axis, dim in enumerate(dims or ())
            ]
            if min(sizes, default=0) < 0 or math.prod(sizes) > _MOST_VALUES:
                raise UnsupportedOpError(
                    f"the input {ascii(name)[:200]} has the sizes {sizes}; give inputs of plausible ones"
                )
            found[name] = torch.zeros(sizes, dtype=getattr(torch, dtype))
        return found

    def forward(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> Any:
        """Compute the graph's outputs."""
        given = {**dict(zip(self.inputs, args, strict=False)), **kwargs}
        if len(args) + len(kwargs) != len(given) or given.keys() != self.inputs.keys():
            raise TypeError(f"the model takes {list(self.inputs)}, not {list(given)}")
        for name, declared in self.inputs.items():
            _check(f"the input '{name}'", given[name], declared)
        values: dict[str, Any] = {**self.known, **given}
        for name, held in self.tensors.items():
            owner, _, leaf = held.rpartition(".")
            values[name] = getattr(self.get_submodule(owner), leaf)
        with traceback.preserve_node_meta():
            for step in self.steps:
                with traceback.annotate({NODES: step.nodes}):
                    self._run(step, values)
        results = tuple(tensor(values[name]) for name in self.outputs)
        return results[0] if len(results) == 1 else results

    def _run(self, step: Step, values: dict[str, Any]) -> None:
        inputs = [
            None if given is None else given[0] if isinstance(given, tuple) else values[given]
            for given in step.inputs
        ]
        where = f"the ONNX node '{step.name}' ({step.op})"
        try:
            found = (WHOLE_OPS.get(step.op) or OPS[step.op]).compute(
                *inputs, **dict(step.attributes)
            )
        except UnsupportedOpError as error:
            raise UnsupportedOpError(f"{where} cannot be taken over: {error}") from error
        except _REFUSALS as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:500]
            raise UnsupportedOpError(f"{where} makes no sense to torch: {reason}") from error
        results = found if isinstance(found, tuple) else (found,)
        if len(results) != len(step.outputs):
            raise UnsupportedOpError(
                f"{where} has {len(step.outputs)} outputs, of which {len(results)} are known"
            )
        for (name, declared), result in zip(step.outputs, results, strict=True):
            if declared is not None:
                _check(where, result, declared)
            values[name] = result


def _check(what: str, value: Any, declared: Declared) -> None:
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
