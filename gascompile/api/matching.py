"""Matching: whether a call is one that a plan was made for, and what its tensors are given to the plan as."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gascompile.capture.torch_settings import PLAIN, SETTINGS, settings_now
from gascompile.core.errors import UnsupportedOpError
from gascompile.core.input_facts import facts_misfit
from gascompile.core.machine import Machine
from gascompile.core.plan import Plan
from gascompile.core.program import Dim, InputSpec, Program
from gascompile.core.signature import (
    constant_of,
    require_bare,
    require_plain,
    same_memory,
    same_tensors,
    strides_of,
)
from gascompile.machines.admission import accepts_inputs_on
from gascompile.passes.graph.bound_aliases import bound_aliases


@dataclass(frozen=True, slots=True)
class Misfit:
    """Why a call is not one that a plan was made for."""

    reason: str
    is_layout: bool = False
    """Whether only strides, what arguments share, or what else the model asks of them differ."""
    is_value: bool = False
    """Whether the call is as planned, but a value that the capture read in Python is another now."""
    is_setting: bool = False
    """Whether the call is as planned, but torch is set to compute in other types."""

    @property
    def is_near(self) -> bool:
        """Whether shapes, types and structure are as planned."""
        return self.is_layout or self.is_value or self.is_setting


def require_inputs(program: Program, machine: Machine) -> None:
    """Return if ``machine`` lays inputs out as ``program`` needs them, and the caller sees what it writes to them.

    Raises:
        UnsupportedOpError: it computes on copies in a device's memory, and writes to one or asks for its strides.
    """
    if machine.compute_tier == "cpu":
        return
    names = {spec.name: spec.path for spec in program.inputs if spec.dtype is not None}
    owners = bound_aliases(program.graph_module.graph, names)
    for node in program.op_nodes():
        owner = owners[node.all_input_nodes[0]] if node.all_input_nodes else frozenset()
        if str(node.target).startswith("aten.as_strided") and owner:
            raise UnsupportedOpError(
                f"op '{node.name}' of '{program.name}' takes a view of the input '{min(owner)}' by "
                f"strides, which its copy in '{machine.compute_tier}' may not have; write it with slices and transposes"
            )
    written = next((spec.path for spec in program.inputs if spec.written), None)
    if written is not None:
        raise UnsupportedOpError(
            f"'{program.name}' writes to its input '{written}', of which '{machine.compute_tier}' has a copy that the "
            "caller does not see; let it write to a clone, or plan for a machine that computes in RAM"
        )


def settings_misfit(plan: Plan) -> Misfit | None:
    """Return why ops that are called now would compute in other types than those of ``plan``, or ``None``."""
    wanted, now = plan.fingerprint.get(SETTINGS, PLAIN), settings_now()
    if now == wanted:
        return None
    return Misfit(f"torch is set to {now}; the plan was made under {wanted}", is_setting=True)


FOR_GIVEN_INPUTS = (
    "plans were made for given inputs alone, and generating with a cache takes others: compile the model without "
    "example_inputs, or generate with use_cache=False"
)


def advice(why_not: Misfit) -> str:
    """Return what to do where a call fits no plan and none is made for it."""
    if why_not.is_value:
        return "Put the value back (for .training: model.eval()), or compile again"
    if why_not.is_setting:
        return "Set them back around the call, or compile again under these"
    if why_not.is_layout:
        return (
            "Pass a copy that is laid out as planned, such as x.contiguous() or x.clone(), or compile again with "
            "example_inputs like these"
        )
    return (
        "Compile again with example_inputs like these, give the dimension a range with dynamic_shapes=, or compile "
        "without example_inputs to plan once per signature"
    )


def misfit(plan: Plan, inputs: Sequence[InputSpec], leaves: Sequence[Any]) -> Misfit | None:
    """Return why flat arguments do not fit a plan with these inputs, or ``None`` where they do.

    Raises:
        UnsupportedOpError: a tensor is of a kind that no plan can have.
    """
    sizes: dict[str, int] = {}
    layout: Misfit | None = None
    for value, expected in zip(leaves, inputs, strict=True):
        reason = _leaf_mismatch(value, expected, sizes, plan)
        if reason is not None:
            return Misfit(f"input '{expected.path}' {reason}")
        if layout is None and isinstance(value, torch.Tensor):
            reason = _layout_mismatch(value, expected) or facts_misfit(expected, value)
            if reason is not None:
                layout = Misfit(f"input '{expected.path}' {reason}", is_layout=True)
    return layout or _sharing_misfit(inputs, leaves) or settings_misfit(plan)


def as_planned(
    inputs: Sequence[InputSpec], leaves: Sequence[Any]
) -> tuple[list[Any], dict[int, torch.Tensor]]:
    """Return arguments with the strides of the plan, and by ``id`` of the new ones what the caller has.

    They have others in dimensions of size 1 at most, so that a view of the same memory is all that is needed.
    """
    given: list[Any] = []
    own: dict[int, torch.Tensor] = {}
    views: dict[int, torch.Tensor] = {}
    for value, expected in zip(leaves, inputs, strict=True):
        if isinstance(value, torch.Tensor):
            shape = tuple(value.shape)
            stride = expected.strides_for(shape)
            if value.stride() != stride:
                view = views.get(id(value))
                if view is None:
                    view = views[id(value)] = value.detach().as_strided(shape, stride)
                own[id(view)] = value
                given.append(view)
                continue
        given.append(value)
    return given, own


def follow_shapes(given: Sequence[Any], own: Mapping[int, torch.Tensor]) -> None:
    """Have what the caller has follow views of it whose shapes a run changed in place; see ``as_planned``."""
    for view in given:
        if isinstance(view, torch.Tensor) and (value := own.get(id(view))) is not None:
            same_memory_there = view.data_ptr() == value.data_ptr()
            same_shape = view.shape == value.shape and strides_of(view) == strides_of(value)
            if not (same_shape and same_memory_there):
                value.set_(view)  # type: ignore[call-overload]  # torch's stubs know storages alone


def _layout_mismatch(value: torch.Tensor, expected: InputSpec) -> str | None:
    stride, wanted = strides_of(value), expected.strides_for(tuple(value.shape))
    if stride == wanted:
        return None
    return f"has the strides {list(stride)}, the plan was made for {list(wanted)}"


def _sharing_misfit(inputs: Sequence[InputSpec], leaves: Sequence[Any]) -> Misfit | None:
    number = {spec.name: i for i, spec in enumerate(inputs)}
    for i, first in enumerate(same_tensors(leaves)):
        wanted = number[inputs[i].same_as] if inputs[i].same_as else i
        if first != wanted:
            is_one = f"is the same tensor as '{inputs[first].path}'"
            if first == i:
                is_one = f"is another tensor than '{inputs[wanted].path}'"
            return Misfit(
                f"input '{inputs[i].path}' {is_one}, in the plan's call not", is_layout=True
            )
    if not any(spec.written for spec in inputs):
        return None
    memory = same_memory(leaves)
    bases = {memory[i][0] for i, spec in enumerate(inputs) if spec.written}
    for i, spec in enumerate(inputs):
        alone = (number[spec.same_as] if spec.same_as else i, 0)
        expected = (number[spec.base], spec.offset_bytes) if spec.base else alone
        if (memory[i][0] in bases or spec.base) and memory[i] != expected:
            return Misfit(
                f"input '{spec.path}' shares memory with others in another way than in the plan's call, and the "
                "model writes to it",
                is_layout=True,
            )
    return None


def _leaf_mismatch(
    value: Any, expected: InputSpec, sizes: dict[str, int], plan: Plan
) -> str | None:
    if expected.dtype is None:
        if isinstance(value, torch.Tensor) or constant_of(value) != expected.constant:
            return f"is {value!r:.60}, the plan was made for the constant {expected.constant}"
        return None
    if not isinstance(value, torch.Tensor):
        return f"is a {type(value).__name__}, the plan was made for a tensor"
    require_plain(value, f"input '{expected.path}'")
    require_bare(value, f"input '{expected.path}'")
    if str(value.dtype) != f"torch.{expected.dtype}":
        return f"has the dtype {value.dtype}, the plan was made for torch.{expected.dtype}"
    if not accepts_inputs_on(plan, value.device.type, expected.device):
        return f"is on '{value.device}', the plan was made for '{expected.device}'"
    if len(value.shape) == len(expected.shape) and all(
        _fits(size, dim, sizes) for size, dim in zip(value.shape, expected.shape, strict=True)
    ):
        return None
    shown = ", ".join(
        f"{d.name} in {d.minimum}..{d.maximum}" if isinstance(d, Dim) else str(d)
        for d in expected.shape
    )
    return f"has the shape {list(value.shape)}, the plan was made for [{shown}]"


def _fits(size: int, dim: int | Dim, sizes: dict[str, int]) -> bool:
    if isinstance(dim, int):
        return size == dim
    return dim.minimum <= size <= dim.maximum and sizes.setdefault(dim.name, size) == size
