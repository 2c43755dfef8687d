"""Asks whether a machine can compute here, before anything is planned or opened for it.

The processor and the emulated accelerator always can. A GPU needs a driver, a build of torch for it, and
memory that nobody else holds; what is missing is said by its cause.
"""

from __future__ import annotations

import logging

import torch
from torch import nn

from gascompile.capture.plain_tensors import require_plain_model
from gascompile.core.errors import UnsupportedOpError
from gascompile.core.machine import Machine, PlaceKind
from gascompile.core.plan import Plan
from gascompile.core.program import Program
from gascompile.machines.read_path import readable_here
from gascompile.passes.graph.grouped_attention import grouped_attention
from gascompile.passes.plan.recost import recost
from gascompile.runtime.devices.probe import (
    DeviceMemory,
    GpuFacts,
    device_memory,
    look,
    pinned_fault,
    require_device,
    require_memory,
)
from gascompile.runtime.memory.pinned import pinned_bytes

_log = logging.getLogger(__name__)

CUDA = "cuda"


def admit(machine: Machine, *, facts: GpuFacts | None = None) -> Machine:
    """Return ``machine`` as it can compute here: with aligned reads where the path that it names is not here.

    Args:
        machine: whose backend is asked for.
        facts: what is there; looked at by default.

    Raises:
        DeviceError: it computes on a GPU that cannot be used; its ``cause`` says why.
        UnsupportedOpError: it has a place that the runtime does not know.
    """
    for place in machine.places:
        if place.name != place.kind or place.kind is PlaceKind.OTHER:
            raise UnsupportedOpError(
                f"machine '{machine.name}' has the place '{place.name}' of the kind '{place.kind}'; plans for it are "
                "made, verified and simulated, but run only on places called gpu, cpu and nvme"
            )
    if machine.compute_backend == CUDA:
        facts = facts or look()
        require_device(facts, machine=machine.name)
    return readable_here(machine, facts=facts)


def admit_saved(plan: Plan, *, facts: GpuFacts | None = None) -> Plan:
    """Return a plan that was saved as it runs here: re-costed, with a warning, where reads take another path now.

    Raises:
        DeviceError: as ``admit`` does.
    """
    machine = admit(plan.machine, facts=facts)
    if machine == plan.machine:
        return plan
    return recost(plan, machine, warning=machine.io.source)


def admit_model(model: nn.Module, machine: Machine) -> None:
    """Return if the weights of ``model`` lie where ``machine`` computes, in RAM, or nowhere yet.

    Raises:
        CaptureError: one is no plain tensor, or a part of the model cannot be traced.
        UnsupportedOpError: they are on another device.
    """
    require_plain_model(model)
    known = {"cpu", "meta"} | ({CUDA} if machine.compute_backend == CUDA else set())
    elsewhere = {p.device.type for p in model.parameters()} - known
    if elsewhere:
        raise UnsupportedOpError(
            f"the model has weights on '{min(elsewhere)}', this machine computes on '{machine.compute_tier}'; "
            "move them with model.cpu(), or build the model on the meta device and pass checkpoint="
        )


def admit_plan(
    plan: Plan, *, memory: DeviceMemory | None = None, facts: GpuFacts | None = None
) -> None:
    """Return if what ``plan`` needs of a GPU's memory is there.

    What torch holds in this process counts as free: a session that is closed gives it back. A limit on locked
    memory below what the plan pins is logged: whether it counts is the driver's to say.

    Raises:
        DeviceError: other processes hold too much of it.
    """
    if plan.machine.compute_backend != CUDA:
        return
    limit = pinned_fault(facts or look(), pinned_bytes(plan))
    if limit is not None:
        _log.warning("%s: %s", limit.detail, limit.remedy)
    of_device = memory or device_memory()
    tier = plan.machine.compute_tier
    needed_bytes = plan.peak_bytes[tier] + plan.machine.library_bytes(tier)
    require_memory(of_device, max(needed_bytes - of_device.own_bytes, 0), device=plan.machine.name)


def device_of(machine: Machine) -> torch.device:
    """Return the torch device that ops of a plan for ``machine`` run on."""
    return torch.device(CUDA if machine.compute_backend == CUDA else "cpu")


def accepts_inputs_on(plan: Plan, given: str, expected: str) -> bool:
    """Return whether an input on the device type ``given`` fits a plan made for one on ``expected``."""
    return given == expected or {given, expected} <= {"cpu", device_of(plan.machine).type}


def as_computed(program: Program, machine: Machine) -> Program:
    """Return a captured program as kernels of the machine's processor, or of its GPU, compute it best."""
    return grouped_attention(program) if device_of(machine).type == "cpu" else program
