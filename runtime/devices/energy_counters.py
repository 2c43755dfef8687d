"""Counters of energy that this machine has, and what a run took by them: nothing is made up where there is none.

Processors count by RAPL, of which Linux shows a zone per package in ``/sys/class/powercap``; GPUs by NVML. A package's
zone has its cores and caches in it, so that other zones, which overlap with it, are not added.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

POWERCAP = Path("/sys/class/powercap")
_MOST_W = 1000.0
"""No package draws more: [empirical] the hungriest of 2025 are sold with 500 W. A run for which this would fill a
counter's range may have passed its end more than once, and is not reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergyCounter:
    """One counter, which begins anew at ``range_j``."""

    name: str
    range_j: float
    """Infinity where it is too large to matter."""
    read_j: Callable[[], float]
    """Raises ``OSError`` where it cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """All that count what one device's runs take."""

    of: tuple[EnergyCounter, ...] = ()
    reason: str = ""
    """Why there is none; empty where there is."""

    @property
    def source(self) -> str:
        """Name of what counts."""
        return " + ".join(counter.name for counter in self.of)

    def read_j(self) -> tuple[float, ...] | None:
        """Return what each counts at this moment; ``None`` where one cannot be read."""
        try:
            return tuple(counter.read_j() for counter in self.of) or None
        except OSError:
            return None

    def taken_j(self, before_j: tuple[float, ...] | None, seconds: float) -> float | None:
        """Return the joules since ``before_j``, ``seconds`` ago; ``None`` where they are not known.

        A counter that has not moved, which are updated a thousand times a second at most, knows nothing of a run.
        """
        after_j = self.read_j() if before_j is not None else None
        if before_j is None or after_j is None:
            return None
        taken_j = 0.0
        for counter, before, after in zip(self.of, before_j, after_j, strict=True):
            if seconds * _MOST_W >= counter.range_j:
                return None
            grown_j = after - before if after >= before else after - before + counter.range_j
            if grown_j <= 0:
                return None
            taken_j += grown_j
        return taken_j


@functools.cache
def energy_counters(device: torch.device, folder: Path = POWERCAP) -> Counters:
    """Return the counters of what ``device`` and the processors beside it take."""
    host = package_counters(folder)
    if device.type != "cuda":
        return host
    gpu = gpu_counters(device)
    if not host.of or not gpu.of:
        # A part of the machine is not what the run took.
        return Counters(reason=" and ".join(c.reason for c in (gpu, host) if c.reason))
    return Counters(of=(*gpu.of, *host.of))


def package_counters(folder: Path = POWERCAP) -> Counters:
    """Return the counter of each processor package in ``folder``, or why there are none."""
    zones = [z for z in sorted(folder.glob("intel-rapl:*")) if z.name.count(":") == 1]
    counters: list[EnergyCounter] = []
    for zone in zones:
        try:
            name = (zone / "name").read_text().strip()
            if not name.startswith("package"):
                continue
            range_j = int((zone / "max_energy_range_uj").read_text()) * 1e-6
            read = functools.partial(_microjoules, os.open(zone / "energy_uj", os.O_RDONLY))
            read()
        except PermissionError:
            return Counters(reason=f"{zone / 'energy_uj'} may not be read by this user")
        except (OSError, ValueError) as error:
            return Counters(reason=f"{zone} cannot be read: {error}")
        counters.append(EnergyCounter(name=f"RAPL {name}", range_j=range_j, read_j=read))
    if not counters:
        return Counters(
            reason=f"no package is in {folder}: the kernel or a virtual machine hides it"
        )
    return Counters(of=tuple(counters))


def gpu_counters(device: torch.device, nvml: ModuleType | None = None) -> Counters:
    """Return NVML's counter of a GPU, or why there is none; ``nvml`` is ``pynvml`` or what stands in for it."""
    try:
        nvml = nvml or importlib.import_module("pynvml")
    except ImportError:
        return Counters(reason="NVML's counters need `pip install nvidia-ml-py`")
    try:
        nvml.nvmlInit()
        # Numbers of torch are those of the visible GPUs, which NVML does not know: its identifier is the same.
        identifier = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        handle = nvml.nvmlDeviceGetHandleByUUID(identifier)
        read = functools.partial(_millijoules, nvml, handle)
        read()
    except (nvml.NVMLError, OSError) as error:
        return Counters(reason=f"NVML does not count for this GPU: {error}")
    return Counters(of=(EnergyCounter(name="NVML", range_j=float("inf"), read_j=read),))


def _microjoules(descriptor: int) -> float:
    text = os.pread(descriptor, 64, 0)
    try:
        return int(text) * 1e-6
    except ValueError as error:
        raise OSError(f"a counter shows {text!r}") from error


def _millijoules(nvml: ModuleType, handle: object) -> float:
    try:
        return float(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) * 1e-3
    except nvml.NVMLError as error:
        raise OSError(str(error)) from error
