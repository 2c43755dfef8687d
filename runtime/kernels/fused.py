"""Runs compiled kernels: loads machine code from verified bytes and gives a call per segment.

Nothing of Inductor is needed here. A kernel is called with bare addresses, so each call checks that its
inputs are laid out as the kernel was made for; where they are not, the ops run one by one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from gascompile.core.errors import PlanMismatchError, StorageError
from gascompile.core.kernels import ALIGNMENT_BYTES, Kernel, KernelFiles, Layout, Segment
from gascompile.core.own_files import load_code
from gascompile.core.plan import OpPlan
from gascompile.runtime.kernels.gpu_code import GpuCode, fetcher

# What a segment returns: its only output, or the tuple of them.
Value = Any

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedSegment:
    """A segment with the kernel that computes it."""

    segment: Segment
    kernel: Kernel
    library: ctypes.CDLL | GpuCode


def load_library(files: KernelFiles) -> ctypes.CDLL:
    """Load the machine code of ``files`` into this process, once. The bytes are run: ask for trust before.

    Raises:
        StorageError: it is no shared library, or one that needs what is not here.
    """
    try:
        return load_code(files.code)
    except OSError as error:
        raise StorageError(f"the fused kernels cannot be loaded: {error}") from error


def segment_nodes(
    segment: Segment, nodes: Mapping[str, fx.Node], ops: Sequence[OpPlan]
) -> list[fx.Node]:
    """Return the nodes of a segment that begins with the first of ``ops``.

    Raises:
        PlanMismatchError: the plan's ops are others, or a node is missing.
    """
    names = (*segment.ops, *segment.inputs)
    if segment.ops != tuple(op.name for op in ops[: len(segment.ops)]) or not all(
        name in nodes for name in names
    ):
        raise PlanMismatchError(
            f"the fused ops '{segment.ops[0]}' to '{segment.ops[-1]}' are not those of the plan; compile again"
        )
    return [nodes[name] for name in segment.ops]


def bind(
    fused: FusedSegment, nodes: Mapping[str, fx.Node], device: torch.device = _CPU
) -> Callable[..., Value]:
    """Return the call of a segment: input tensors in, its output or the tuple of its outputs back.

    Args:
        fused: the segment.
        nodes: the graph's nodes by name; they run one by one where an input is laid out otherwise.
        device: where the tensors lie.

    Raises:
        StorageError: the library lacks a function.
        DeviceError: the GPU's driver refuses its code.
    """
    segment, kernel = fused.segment, fused.kernel
    eager = one_by_one(
        [nodes[name] for name in segment.ops],
        [nodes[name] for name in segment.inputs],
        [nodes[name] for name in segment.outputs],
    )
    if isinstance(fused.library, GpuCode):
        call = _on_gpu(kernel, fused.library, eager, device)
    else:
        call = _on_cpu(kernel, fused.library, eager)
    return _named(call, f"fused ops '{segment.ops[0]}' to '{segment.ops[-1]}'")


def _on_cpu(
    kernel: Kernel, library: ctypes.CDLL, eager: Callable[..., Value]
) -> Callable[..., Value]:
    wanted = tuple(_layout(of) for of in kernel.inputs)
    made = tuple(_layout(of) for of in kernel.outputs)
    launches = tuple(
        (_function(library, launch.symbol, len(launch.arguments)), fetcher(launch))
        for launch in kernel.launches
    )
    is_single = len(made) == 1
    scratch_bytes = kernel.scratch_bytes
    empty, uint8 = torch.empty_strided, torch.uint8

    def call(*values: torch.Tensor) -> Value:
        for value, (shape, stride, dtype) in zip(values, wanted, strict=True):
            if (
                value.stride() != stride
                or value.shape != shape
                or value.dtype != dtype
                or not value.is_cpu
            ):
                made_by_ops = eager(*values)
                return made_by_ops[0] if is_single else made_by_ops
        outputs = [empty(shape, stride, dtype=dtype) for shape, stride, dtype in made]
        scratch = [torch.empty(size_bytes, dtype=uint8) for size_bytes in scratch_bytes]
        addresses = [value.data_ptr() for value in (*values, *outputs, *scratch)]
        for function, fetch in launches:
            function(*fetch(addresses))
        return outputs[0] if is_single else tuple(outputs)

    return call


def _on_gpu(
    kernel: Kernel, code: GpuCode, eager: Callable[..., Value], device: torch.device
) -> Callable[..., Value]:
    wanted = tuple(_layout(of) for of in kernel.inputs)
    made = tuple(_layout(of) for of in kernel.outputs)
    launches = tuple(code.launcher(launch, device.index or 0) for launch in kernel.launches)
    is_single = len(made) == 1
    scratch_bytes = kernel.scratch_bytes
    masks = [ALIGNMENT_BYTES - 1 if i in kernel.aligned else 0 for i in range(len(wanted))]
    empty, uint8 = torch.empty_strided, torch.uint8

    def call(*values: torch.Tensor) -> Value:
        addresses = [value.data_ptr() for value in values]
        for value, address, (shape, stride, dtype), mask in zip(
            values, addresses, wanted, masks, strict=True
        ):
            if (
                address & mask
                or value.stride() != stride
                or value.shape != shape
                or value.dtype != dtype
                or value.device != device
            ):
                made_by_ops = eager(*values)
                return made_by_ops[0] if is_single else made_by_ops
        # All of it is the current stream's: scratch may be handed out again before the kernel has run.
        outputs = [
            empty(shape, stride, dtype=dtype, device=device) for shape, stride, dtype in made
        ]
        scratch = [torch.empty(n, dtype=uint8, device=device) for n in scratch_bytes]
        addresses += [value.data_ptr() for value in (*outputs, *scratch)]
        for launch in launches:
            launch(addresses)
        return outputs[0] if is_single else tuple(outputs)

    return call


def _named(call: Callable[..., Value], name: str) -> Callable[..., Value]:
    def run(*values: torch.Tensor) -> Value:
        try:
            return call(*values)
        except BaseException as error:
            error.add_note(f"in the {name}")
            raise

    return run


def _layout(of: Layout) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    return of.shape, of.stride, getattr(torch, of.dtype)


def _function(library: ctypes.CDLL, symbol: str, num_arguments: int) -> Callable[..., None]:
    try:
        function = getattr(library, symbol)
    except AttributeError as error:
        raise StorageError(f"the fused kernels lack the function '{symbol}'") from error
    function.argtypes = (ctypes.c_void_p,) * num_arguments
    function.restype = None
    typed: Callable[..., None] = function
    return typed


def one_by_one(
    nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]
) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Return a function that makes ``outputs`` of ``inputs`` by calling those of ``nodes`` that it takes."""
    needed = set(outputs)
    order: list[fx.Node] = []
    for node in reversed(nodes):
        if node in needed and node not in inputs:
            order.insert(0, node)
            needed.update(node.all_input_nodes)

    def call(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        value_of: dict[fx.Node, Any] = dict(zip(inputs, values, strict=True))
        for node in order:
            assert callable(node.target)
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), value_of.__getitem__)
            value_of[node] = node.target(*args, **kwargs)
        return tuple(value_of[node] for node in outputs)

    return call
