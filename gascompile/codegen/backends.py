"""What making and running kernels differs in from backend to backend: the writer, the compiler, what code runs on.

The CPU and the emulated accelerator, which computes on it, get C++ in a shared library; a GPU gets Triton,
compiled to images that its driver loads. ``fuse`` knows neither.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import fx

from gascompile.codegen.build import NoCompilerError
from gascompile.core.kernels import GpuFunction, Kernel, KernelFiles, KernelLibrary
from gascompile.core.machine import Machine
from gascompile.runtime.kernels.gpu_code import GpuCode

Nodes = Sequence[fx.Node]

_KEEPS_CASTS = (2, 13)
"""The first torch whose C++ was found to round where its ops do: that of 2.11 leaves casts to narrow types out."""


class Writer(Protocol):
    """Collects the kernels of one library and compiles them."""

    def write(self, key: str, nodes: Nodes, inputs: Nodes, outputs: Nodes) -> Kernel:
        """Return the kernel of a segment.

        Raises:
            UnsupportedOpError: there is no code for it.
        """

    def keep(self) -> None:
        """Take the kernel that was written last into the library."""

    def build(self) -> tuple[bytes, Mapping[str, GpuFunction]]:
        """Return the machine code of what was kept, and its functions.

        Raises:
            KernelBuildError: the compiler failed.
        """


class KernelBackend(Protocol):
    """Makes and loads kernels for what a plan computes on."""

    compile_base_s: float
    """What a first kernel costs beside the rest: importing, reading headers."""
    compile_each_s: float
    """What writing and compiling one kernel costs."""
    call_s: float
    """What calling one costs: checking inputs, allocating, launching."""

    def built_for(self) -> dict[str, str]:
        """Return what kernels that are compiled here depend on."""

    def unlike(self, there: Mapping[str, str]) -> str:
        """Return why code that was built for ``there`` does not run here; empty where it does."""

    def require_compiler(self) -> None:
        """Raise ``NoCompilerError`` where nothing can be compiled."""

    def writer(self) -> Writer:
        """Return what makes a new library."""

    def load(self, files: KernelFiles, library: KernelLibrary) -> ctypes.CDLL | GpuCode:
        """Load machine code. It is run: ask for trust before.

        Raises:
            StorageError: it is none.
            DeviceError: a GPU's driver does not start.
        """


def backend_of(machine: Machine) -> tuple[KernelBackend | None, str]:
    """Return what makes and runs kernels for plans of ``machine``; or none, and why."""
    match machine.compute_backend:
        case "cpu" | "emulated" if _torch_version() >= _KEEPS_CASTS:
            from gascompile.codegen.cpu_kernels import CpuKernels

            return CpuKernels(), ""
        case "cpu" | "emulated":
            first = ".".join(map(str, _KEEPS_CASTS))
            return (
                None,
                f"kernels of torch {torch.__version__} leave out casts that torch makes: {first} is needed",
            )
        case "cuda":
            # What writes Triton takes a while to import, and runs without a GPU never ask for it.
            from gascompile.codegen.gpu_kernels import kernels_of_gpu

            kernels = kernels_of_gpu()
            if kernels is None:
                return None, "there is no GPU here that kernels could be compiled for or run on"
            return kernels, ""
        case other:
            return None, f"ops are not fused on the backend '{other}'"


def _torch_version() -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])


def difference(here: Mapping[str, str], there: Mapping[str, str]) -> str:
    """Return in words what code was built for that is not here; empty where nothing is."""
    name = next((k for k in here if there.get(k) != here[k]), "")
    return (
        f"its kernels were made for {name} {there.get(name)}, this is {here[name]}" if name else ""
    )


def has_compiler_for(machine: Machine) -> bool:
    """Return whether kernels can be compiled for plans of ``machine``."""
    backend, _ = backend_of(machine)
    try:
        if backend is not None:
            backend.require_compiler()
    except NoCompilerError:
        return False
    return backend is not None
