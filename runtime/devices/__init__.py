"""Devices: what computes, behind the protocol ``runtime.protocols.Device``; one module per backend."""

from __future__ import annotations

from gascompile.core.errors import DeviceError
from gascompile.core.machine import Machine
from gascompile.runtime.protocols import Device


def device_for(machine: Machine) -> Device:
    """Return the device that executes plans for ``machine``.

    Raises:
        DeviceError: there is no such device here.
    """
    match machine.compute_backend:
        case "cpu":
            from gascompile.runtime.devices.cpu import CpuDevice

            return CpuDevice()
        case "emulated":
            from gascompile.runtime.devices.emulated import EmulatedDevice

            return EmulatedDevice(machine)
        case "cuda":
            from gascompile.runtime.devices.cuda import CudaDevice

            return CudaDevice()
        case backend:
            raise DeviceError(
                f"the machine '{machine.name}' asks for the backend '{backend}'; there are cpu, cuda and emulated"
            )
