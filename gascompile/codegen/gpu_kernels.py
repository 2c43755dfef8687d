"""Kernels of a GPU: Triton by Inductor, compiled to images."""

from __future__ import annotations

from collections.abc import Mapping

from gascompile.codegen.backends import Nodes, Writer, difference
from gascompile.codegen.build import KernelBuildError, NoCompilerError
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
from gascompile.runtime.devices.driver import open_driver
from gascompile.runtime.kernels.gpu_code import GpuCode, load_gpu_code


def kernels_of_gpu() -> CudaKernels | None:
    """Return what makes and runs kernels for the GPU that is here; ``None`` where there is none."""
    target = target_here()
    return None if target is None else CudaKernels(target)


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
        return difference(runs_on_gpu(self._target), there)

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
