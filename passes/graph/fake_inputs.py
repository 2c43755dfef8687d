"""Fake inputs: what a program is given where it is run on fake tensors, laid out and sharing memory as in calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gascompile.core.program import Program
from gascompile.core.strides import span_elements


def fake_inputs(
    program: Program, shapes: Mapping[str, tuple[int, ...]], mode: FakeTensorMode
) -> Iterator[tuple[torch.fx.Node, torch.Tensor | None, str]]:
    """Yield each placeholder with its tensor, ``None`` for a constant, and the tensor's name in workloads.

    Inputs that share memory are views of one storage, which has the name of the first of them.
    """
    inputs = {spec.name: spec for spec in program.inputs}
    shared = _shared_memory(program, mode)
    for node in program.graph_module.graph.nodes:
        if node.op != "placeholder":
            break
        if node.name in program.bindings:
            name = program.bindings[node.name]
            bound = program.bound[name]
            dtype = getattr(torch, bound.dtype)
            with mode:
                tensor = torch.empty_strided(bound.shape, bound.strides, dtype=dtype)
            yield node, tensor, name
            continue
        spec, name = inputs[node.name], f"%{node.name}"
        if spec.dtype is None:
            yield node, None, name
            continue
        shape, dtype = shapes[node.name], getattr(torch, spec.dtype)
        stride = spec.strides_for(shape)
        with mode:
            if spec.base:
                begin = spec.offset_bytes - _lowest_bytes(program, spec.base)
                tensor = shared[spec.base][begin:].view(dtype).as_strided(shape, stride)
                name = f"%{spec.base}"
            else:
                tensor = torch.empty_strided(shape, stride, dtype=dtype, device=spec.device)
        yield node, tensor, name


def _lowest_bytes(program: Program, base: str) -> int:
    return min(spec.offset_bytes for spec in program.inputs if spec.base == base)


def _shared_memory(program: Program, mode: FakeTensorMode) -> dict[str, torch.Tensor]:
    """Return the memory that several inputs lie in, by the one that it is named after."""
    ends: dict[str, int] = {}
    for spec in program.inputs:
        if spec.base:
            shape = spec.upper_shape()
            itemsize = getattr(torch, str(spec.dtype)).itemsize
            end = spec.offset_bytes + span_elements(shape, spec.strides_for(shape)) * itemsize
            ends[spec.base] = max(ends.get(spec.base, 0), end)
    with mode:
        # Views of any dtype may begin at its end.
        return {
            base: torch.empty(end - _lowest_bytes(program, base) + 16, dtype=torch.uint8)
            for base, end in ends.items()
        }
