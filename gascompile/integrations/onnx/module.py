"""A module that computes what an ONNX graph says, op by op, for ``torch.export`` to trace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.fx import traceback

from gascompile.integrations.onnx.graph import made_up_sizes
from gascompile.integrations.onnx.steps import Declared, OnnxStep, check_value, run_step
from gascompile.integrations.onnx.values import Numbers, tensor

NODES = "gascompile.onnx"
"""Key in the ``custom`` part of a traced node's ``meta``: the places in the ONNX graph of the nodes that it is of."""


class OnnxModel(nn.Module):
    """A graph of ONNX; takes tensors in the order of its inputs or by name.

    Returns a tensor, or a tuple of them in the order of the graph's outputs.
    """

    def __init__(
        self,
        steps: tuple[OnnxStep, ...],
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
        sizes = made_up_sizes(self.inputs, batch, tokens)
        return {
            name: torch.zeros(sizes[name], dtype=getattr(torch, dtype))
            for name, (dtype, _) in self.inputs.items()
        }

    def forward(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> Any:
        """Compute the graph's outputs."""
        given = {**dict(zip(self.inputs, args, strict=False)), **kwargs}
        if len(args) + len(kwargs) != len(given) or given.keys() != self.inputs.keys():
            raise TypeError(
                f"the model takes {list(self.inputs)}; given were {len(args)} by place and {list(kwargs)} by name"
            )
        for name, declared in self.inputs.items():
            check_value(f"the input '{name}'", given[name], declared)
        values: dict[str, Any] = {**self.known, **given}
        for name, held in self.tensors.items():
            owner, _, leaf = held.rpartition(".")
            value = getattr(self.get_submodule(owner), leaf)
            values[name] = Numbers.of(self.known[name], value) if name in self.known else value
        with traceback.preserve_node_meta():
            for step in self.steps:
                with traceback.annotate({NODES: step.nodes}):
                    run_step(step, values)
        results = tuple(tensor(values[name]) for name in self.outputs)
        return results[0] if len(results) == 1 else results
