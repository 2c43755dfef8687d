"""To device: a program captured on one device becomes the same program for another.

Where tensors are made, an op says the device: as an argument (``aten.arange(device=cpu)``), or by leaving
it out, which means the device of the capture. All of these are set to the new one. Weights, states and
inputs carry their own device and are placed by whoever runs the program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from gascompile.core.errors import UnsupportedOpError
from gascompile.core.program import Program, copied_graph

_BOUND_TO_CPU = ("_for_cpu", "mkldnn", "onednn", "_cpu")
_WITH_KERNELS = "aten._scaled_dot_product_flash_attention_for_cpu"
"""How the ops begin that are the processor's by name and for which the runtime brings kernels of a GPU."""


def to_device(program: Program, device: torch.device | str) -> Program:
    """Return ``program`` for ``device``; itself where that is the processor, on which programs are captured.

    Shapes, dtypes and the names of ops stay the same, so a plan of one is a plan of the other. So do the
    fake values in ``meta``, which say the device of the capture.

    Raises:
        UnsupportedOpError: an op has a kernel for the processor alone.
    """
    target = torch.device(device)
    if target.type == "cpu":
        return program
    graph = copied_graph(program.graph_module.graph)
    module = fx.GraphModule(program.graph_module, graph)
    for node in graph.nodes:
        if node.op == "call_function":
            _retarget(node, target)
    graph.lint()
    module.recompile()
    return replace(program, graph_module=module)


def _retarget(node: fx.Node, target: torch.device) -> None:
    """Set every device that an op names, or means by naming none."""
    name = str(node.target)
    has_kernel = target.type == "cuda" and name.startswith(_WITH_KERNELS)
    if any(part in name for part in _BOUND_TO_CPU) and not has_kernel:
        raise UnsupportedOpError(
            f"op '{node.name}' is {name}, which computes on the processor alone and not on '{target}'; "
            "capture the model from its module instead of from a lowered program"
        )

    args, kwargs = retargeted(node.target, node.args, node.kwargs, target)
    node.args, node.kwargs = tuple(args), dict(kwargs)


def retargeted(
    function: object, args: Sequence[Any], kwargs: Mapping[str, Any], target: torch.device
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return the arguments of a call of ``function`` with every device that they name, or mean, set to ``target``.

    Tensors among them stay where they are.
    """

    def moved(value: Any) -> Any:
        return target if isinstance(value, torch.device) and value.type == "cpu" else value

    args = fx.node.map_aggregate(tuple(args), moved)
    kwargs = dict(fx.node.map_aggregate(dict(kwargs), moved))
    schema = getattr(function, "_schema", None)
    if schema is None:
        return args, kwargs
    named = {argument.name for argument in schema.arguments}
    if kwargs.get("pin_memory"):
        # Only memory of the processor can be pinned.
        kwargs["pin_memory"] = False
    takes_tensors = any("Tensor" in str(argument.type) for argument in schema.arguments)
    given = kwargs.get("device") is not None or any(
        isinstance(value, torch.device) for value in args
    )
    if "device" in named and not takes_tensors and not given:
        kwargs["device"] = target
    return args, kwargs
