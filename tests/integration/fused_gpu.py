"""A machine with a GPU, by stand-ins: its memory and streams are fake, its kernels are interpreted sources."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

from gascompile.codegen import gpu_kernels
from gascompile.codegen.cubin import Image
from gascompile.codegen.target import GpuTarget
from gascompile.codegen.triton import TritonSource
from gascompile.core.machine import Machine
from gascompile.machines.resolve import resolve_machine
from gascompile.runtime.devices.cuda import CudaDevice
from gascompile.runtime.transfer.engine import read_blocks
from tests.interpreted_gpu import HOPPER, FakeLibrary, fake_driver, image_of_source
from tests.runtime.devices.fake_cuda import FakeRuntime, fake_cuda


class FusedGpu:
    """What happens on the machine, and who it is."""

    def __init__(self, cache: Path, patch: pytest.MonkeyPatch) -> None:
        self.restart()
        self.compiled: Counter[str] = Counter()
        self.devices: list[FakeRuntime] = []
        emulated = resolve_machine("emulated", cache_dir=cache, read=read_blocks)
        self.machine: Machine = replace(emulated, name="fake GPU", backend="cuda")
        self.target: GpuTarget | None = HOPPER
        patch.setattr("gascompile.api.compile.admit", lambda machine: machine)
        patch.setattr("gascompile.api.load.admit_saved", lambda plan: plan)
        patch.setattr("gascompile.api.unit.admit_plan", lambda plan: None)
        patch.setattr("gascompile.api.unit.device_of", lambda machine: torch.device("cpu"))
        patch.setattr("gascompile.runtime.run.session.device_for", self._device)
        patch.setattr(gpu_kernels, "target_here", lambda: self.target)
        patch.setattr(gpu_kernels, "open_driver", lambda: self.driver)
        patch.setattr(gpu_kernels, "missing_triton", lambda: "")
        patch.setattr(gpu_kernels, "compile_image", self._compile)

    def restart(self) -> FakeLibrary:
        """Begin as a process that has loaded nothing yet."""
        self.driver, self.library = fake_driver()
        self.library.queue = _on_the_stream
        return self.library

    def _device(self, machine: Machine) -> CudaDevice:
        assert machine.compute_backend == "cuda"
        api, runtime = fake_cuda()
        self.devices.append(runtime)
        return CudaDevice(api=api)

    def _compile(self, source: TritonSource, target: GpuTarget) -> Image:
        self.compiled[source.symbol] += 1
        return image_of_source(source, target)


def _on_the_stream(work: Callable[[], None]) -> None:
    """Compute now, or whenever the graph is replayed that is being captured."""
    modes = _get_current_dispatch_mode_stack()
    recorder = next((mode for mode in modes if hasattr(mode, "calls")), None)
    if recorder is not None:
        recorder.calls.append((work, (), {}, []))
        return
    with _disable_current_modes():
        work()
