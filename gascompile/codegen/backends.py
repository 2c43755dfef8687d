"""What making and running kernels differs in from backend to backend: the writer, the compiler, what code runs on.

The CPU and the emulated accelerator, which computes on it, get C++ in a shared library; a GPU gets Triton,
compiled to images that its driver loads. ``fusion`` knows neither.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import fx

from gascompile.codegen.build import (
    KernelBuildError,
    NoCompilerError,
    build,
    built_for,
    has_compiler,
)
from gascompile.codegen.cpp import Generated, generate
from gascompile.codegen.cubin import (
    Image,
    NoTritonError,
    built_for_gpu,
    compile_image,
    joined,
    missing_triton,
    runs_on_gpu,
)
from gascompile.codegen.target import GpuTarget, target_here
from gascompile.codegen.triton import generate_triton
from gascompile.core.errors import UnsupportedOpError
from gascompile.core.kernels import GpuFunction, Kernel, KernelFiles, KernelLibrary
from gascompile.core.machine import Machine
from gascompile.runtime.devices.driver import open_driver
from gascompile.runtime.kernels.fused import load_library
from gascompile.runtime.kernels.gpu_code import GpuCode, load_gpu_code

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
            return CpuKernels(), ""
        case "cpu" | "emulated":
            first = ".".join(map(str, _KEEPS_CASTS))
            return (
                None,
                f"kernels of torch {torch.__version__} leave out casts that torch makes: {first} is needed",
            )
        case "cuda":
            target = target_here()
            if target is None:
                return None, "there is no GPU here that kernels could be compiled for or run on"
            return CudaKernels(target), ""
        case other:
            return None, f"ops are not fused on the backend '{other}'"


def _torch_version() -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])


def has_compiler_for(machine: Machine) -> bool:
    """Return whether kernels can be compiled for plans of ``machine``."""
    backend, _ = backend_of(machine)
    try:
        if backend is not None:
            backend.require_compiler()
    except NoCompilerError:
        return False
    return backend is not None


def _difference(here: Mapping[str, str], there: Mapping[str, str]) -> str:
    name = next((k for k in here if there.get(k) != here[k]), "")
    return (
        f"its kernels were made for {name} {there.get(name)}, this is {here[name]}" if name else ""
    )


# ------------------------------------------------------------ the processor


class CpuKernels:
    """C++ by Inductor, compiled to a shared library. The seconds are [Empirical]."""

    compile_base_s = 8.0
    compile_each_s = 0.6
    call_s = 3e-6

    def built_for(self) -> dict[str, str]:
        return built_for()

    def unlike(self, there: Mapping[str, str]) -> str:
        return _difference(built_for(), there)

    def require_compiler(self) -> None:
        if not has_compiler():
            raise NoCompilerError

    def writer(self) -> Writer:
        return _CppWriter()

    def load(self, files: KernelFiles, library: KernelLibrary) -> ctypes.CDLL:
        del library
        return load_library(files)


class _CppWriter:
    def __init__(self) -> None:
        self._sources: list[str] = []
        self._last: Generated

    def write(self, key: str, nodes: Nodes, inputs: Nodes, outputs: Nodes) -> Kernel:
        self._last = generate(key, nodes, inputs, outputs)
        return self._last.kernel

    def keep(self) -> None:
        self._sources += self._last.sources

    def build(self) -> tuple[bytes, Mapping[str, GpuFunction]]:
        return build(self._sources), {}


# ------------------------------------------------------------ a GPU


class CudaKernels:
    """Triton by Inductor, compiled to images of a GPU.

    The seconds are [Empirical], all of them the processor's. A call takes 5 us more than an op's, but most
    launches are replayed by graphs.
    """

    compile_base_s = 6.0
    compile_each_s = 0.7
    call_s = 2e-6

    def __init__(self, target: GpuTarget) -> None:
        self._target = target

    def built_for(self) -> dict[str, str]:
        return built_for_gpu(self._target)

    def unlike(self, there: Mapping[str, str]) -> str:
        """Images run without what compiled them: its version is not asked for."""
        return _difference(runs_on_gpu(self._target), there)

    def require_compiler(self) -> None:
        if reason := missing_triton():
            raise NoTritonError(reason)

    def writer(self) -> Writer:
        return _TritonWriter(self._target)

    def load(self, files: KernelFiles, library: KernelLibrary) -> GpuCode:
        return load_gpu_code(files, library.functions, open_driver())


class _TritonWriter:
    """Compiles each kernel at once: what one of them needs too much of is no reason to leave out the others."""

    def __init__(self, target: GpuTarget) -> None:
        self._target = target
        self._kept: dict[str, Image] = {}
        self._last: dict[str, Image] = {}

    def write(self, key: str, nodes: Nodes, inputs: Nodes, outputs: Nodes) -> Kernel:
        generated = generate_triton(key, nodes, inputs, outputs, target=self._target)
        try:
            self._last = {s.symbol: compile_image(s, self._target) for s in generated.sources}
        except NoCompilerError:
            raise
        except KernelBuildError as error:
            raise UnsupportedOpError(str(error)) from error
        return generated.kernel

    def keep(self) -> None:
        self._kept |= self._last

    def build(self) -> tuple[bytes, Mapping[str, GpuFunction]]:
        return joined(self._kept)
