"""Kernels of the processor, and of the emulated accelerator that computes on it: C++ by Inductor."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import TYPE_CHECKING

from gascompile.codegen.backends import Nodes, Writer, difference
from gascompile.codegen.build import NoCompilerError, build, built_for, has_compiler
from gascompile.core.kernels import GpuFunction, Kernel, KernelFiles, KernelLibrary
from gascompile.runtime.kernels.fused import load_library

if TYPE_CHECKING:
    from gascompile.codegen.cpp import Generated


class CpuKernels:
    """C++ by Inductor, compiled to a shared library. The seconds are [Empirical]."""

    compile_base_s = 8.0
    compile_each_s = 0.6
    call_s = 3e-6

    def built_for(self) -> dict[str, str]:
        return built_for()

    def unlike(self, there: Mapping[str, str]) -> str:
        return difference(built_for(), there)

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
        # It takes a while to import, and runs of kernels that are there never ask for it.
        from gascompile.codegen.cpp import generate

        self._last = generate(key, nodes, inputs, outputs)
        return self._last.kernel

    def keep(self) -> None:
        self._sources += self._last.sources

    def build(self) -> tuple[bytes, Mapping[str, GpuFunction]]:
        return build(self._sources), {}
