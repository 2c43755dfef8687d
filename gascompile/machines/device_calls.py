"""The ops of a program as a GPU is given them: calls on fake tensors, with the devices that they name set to it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from gascompile.cost_models.measure.op_memory import OpCall
from gascompile.cost_models.measure.ops_on_device import OpsOnDevice
from gascompile.passes.graph.to_device import retargeted
from gascompile.runtime.kernels import attention
from gascompile.runtime.kernels.packed_triton import install as install_packed_kernels


@contextmanager
def device_ops() -> Iterator[OpsOnDevice]:
    """Measure ops on this machine's GPU, with the kernels that runs have there; give its memory back at the end."""
    install_packed_kernels()
    attention.install()
    ops = OpsOnDevice()
    try:
        yield ops
    finally:
        ops.close()


def on_device(call: OpCall, device: torch.device) -> OpCall:
    """Return ``call`` as a program for ``device`` has it; its tensors stay fake ones of the processor."""
    args, kwargs = retargeted(call.function, call.args, call.kwargs, device)
    return call._replace(args=tuple(args), kwargs=kwargs)


def calls_of(nodes: Iterable[fx.Node]) -> dict[str, OpCall]:
    """Return the calls of those of ``nodes`` that are ops of torch, of which all sizes are known, by name."""
    calls = {}
    for node in nodes:
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), _value)
        results = _tensors(node.meta.get("val"))
        if not all(_is_known(value) for value in (*pytree.tree_leaves((args, kwargs)), *results)):
            continue
        # Views count, too: it is the most that they can be.
        result_bytes = sum(value.numel() * value.element_size() for value in results)
        calls[node.name] = OpCall(node.target, tuple(args), dict(kwargs), result_bytes)
    return calls


def _value(node: fx.Node) -> Any:
    return node.meta.get("val")


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _is_known(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return all(isinstance(size, int) for size in (*value.shape, *value.stride()))
    return not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))
