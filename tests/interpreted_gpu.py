"""A GPU's driver without a GPU: images are Triton sources, and a launch runs them in Triton's interpreter.

What a launch gets is read as the real driver would: through an array of pointers, one to each parameter.
Functions of libdevice, which the interpreter does not have, are torch's here, and so is the conversion to
bfloat16, which it would cut off where a GPU rounds.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
import triton.language as tl
from torch._inductor.runtime import triton_helpers
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

from gascompile.codegen.cubin import Image, jit_function
from gascompile.codegen.target import GpuTarget
from gascompile.codegen.triton import TritonSource
from gascompile.runtime.devices.driver import CudaDriver
from gascompile.runtime.kernels.launching import INTERPRETED

needs_interpreter = pytest.mark.skipif(
    not INTERPRETED, reason="kernels are compiled here; the same segments are run on the GPU"
)
HOPPER = GpuTarget(major=9, minor=0, multi_processor_count=132)
_STREAM = 7
_CONVERT_FLOAT: Any = vars(interpreter)["_convert_float"]
_INVALID_CONTEXT = 201
_DTYPES = {
    "*fp32": torch.float32, "*fp64": torch.float64, "*bf16": torch.bfloat16, "*fp16": torch.float16,
    "*i32": torch.int32, "*i64": torch.int64, "*i1": torch.bool, "*u8": torch.uint8,
}  # fmt: skip
_OTHER_NAMES = {"nearbyint": "round", "llrint": "round", "fmod": "fmod", "pow": "pow"}


class Libdevice:
    """What stands for ``libdevice`` in the interpreter: torch's function of that name."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(torch, _OTHER_NAMES.get(name, name))

        def call(*values: Any) -> Any:
            given = [v if isinstance(v, tl.tensor) else tl.core._to_tensor(v, None) for v in values]
            found = function(*(torch.from_numpy(v.handle.data) for v in given)).numpy()
            scalar = tl.int1 if found.dtype == bool else given[0].dtype
            shaped = tl.block_type(scalar, list(found.shape)) if found.shape else scalar
            return tl.tensor(TensorHandle(found, scalar), shaped)

        return call


def interpreted_function(source: TritonSource) -> Any:
    """Return the function of a source, to be called by its grid."""
    with mock.patch.object(triton_helpers, "libdevice", Libdevice()):
        return jit_function(source)


def image_of_source(source: TritonSource, target: GpuTarget) -> Image:
    """Stand for ``compile_image``: what is compiled is the source itself."""
    del target
    own = sum(of != "constexpr" for of in source.signature.values())
    return Image(
        cubin=json.dumps(dataclasses.asdict(source)).encode(),
        threads=source.num_warps * 32,
        shared_bytes=64 << 10 if "tl.sum" in source.text else 0,
        num_parameters=own + 2,
    )


@dataclasses.dataclass
class Launched:
    """What one launch was given."""

    symbol: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared_bytes: int
    stream: int
    parameters: tuple[int, ...]


class FakeLibrary:
    """``libcuda`` as far as kernels need it."""

    def __init__(self) -> None:
        self.images: list[bytes] = []
        self.functions: list[tuple[TritonSource, Any]] = []
        self.most_shared_bytes: dict[int, int] = {}
        self.launches: list[Launched] = []
        self.current = 0
        """The context of the calling thread."""
        self.runs = True
        """Whether launches compute."""
        self.refuses = 0
        """The error that launches end with."""
        self.num_computed = 0
        self.queue: Callable[[Callable[[], None]], None] = lambda work: work()
        """What a launch's work is handed to."""
        # ``ctypes`` writes attributes on its functions; bound methods take none.
        self.cuLaunchKernel = lambda *given: self._launch(*given)  # noqa: PLW0108

    def cuInit(self, flags: int) -> int:  # noqa: N802 - CUDA's name
        return flags

    def cuDeviceGet(self, into: Any, number: int) -> int:  # noqa: N802
        into._obj.value = number
        return 0

    def cuDevicePrimaryCtxRetain(self, into: Any, device: ctypes.c_int) -> int:  # noqa: N802
        into._obj.value = 100 + device.value
        return 0

    def cuCtxSetCurrent(self, context: ctypes.c_void_p) -> int:  # noqa: N802
        self.current = context.value or 0
        return 0

    def cuModuleLoadData(self, into: Any, image: bytes) -> int:  # noqa: N802
        if not self.current:
            return _INVALID_CONTEXT
        if not image.startswith(b"{"):
            return 200
        self.images.append(image)
        into._obj.value = len(self.images)
        return 0

    def cuModuleGetFunction(  # noqa: N802
        self, into: Any, module: ctypes.c_void_p, symbol: bytes
    ) -> int:
        source = TritonSource(**json.loads(self.images[(module.value or 0) - 1]))
        if source.symbol != symbol.decode():
            return 500
        self.functions.append((source, interpreted_function(source)))
        into._obj.value = len(self.functions)
        return 0

    def cuFuncSetAttribute(self, function: ctypes.c_void_p, name: int, value: int) -> int:  # noqa: N802
        assert name == 8
        self.most_shared_bytes[function.value or 0] = value
        return 0

    def cuGetErrorString(self, code: int, into: Any) -> int:  # noqa: N802
        into._obj.value = {200: b"invalid image", 500: b"not found"}.get(code, b"some error")
        return 0

    def _launch(self, function: ctypes.c_void_p, *given: Any) -> int:
        grid, block, shared, stream, pointers, extra = given[:3], given[3:6], *given[6:]
        assert extra is None
        if not self.current:
            return _INVALID_CONTEXT
        if self.refuses:
            return self.refuses
        assert shared <= self.most_shared_bytes.get(function.value or 0, 48 << 10)
        source, run = self.functions[(function.value or 0) - 1]
        values = tuple(ctypes.c_uint64.from_address(int(place)).value for place in pointers)
        self.launches.append(Launched(source.symbol, grid, block, shared, stream, values))

        def compute() -> None:
            self.num_computed += 1
            _interpret(source, run, grid, values)

        if self.runs:
            self.queue(compute)
        return 0


def _interpret(
    source: TritonSource, run: Any, grid: tuple[int, ...], addresses: tuple[int, ...]
) -> None:
    names = [name for name, of in source.signature.items() if of != "constexpr"]
    assert not any(addresses[len(names) :]), "memory that a kernel does not use is null"
    pointers = {}
    for name, address in zip(names, addresses, strict=False):
        dtype = _DTYPES[source.signature[name]]
        memory = (ctypes.c_char * dtype.itemsize).from_address(address)
        # The interpreter reads and writes beyond it by address, as a kernel does.
        pointers[name] = torch.frombuffer(memory, dtype=dtype)
        if name in source.aligned:
            assert address % 16 == 0, f"{name} is not aligned"
    rounded = mock.patch.object(interpreter, "_convert_float", _convert_float)
    with rounded, numpy.errstate(all="ignore"):
        run[grid](**pointers, **source.constants)


def _convert_float(values: Any, source: Any, target: Any, rounding: Any) -> Any:
    """Stand for the interpreter's own conversion, and round to the nearest."""
    if (source, target) == (tl.float32, tl.bfloat16):
        return torch.from_numpy(values).bfloat16().view(torch.uint16).numpy()
    if (source, target) == (tl.bfloat16, tl.float32):
        return torch.from_numpy(values).view(torch.bfloat16).float().numpy()
    return _CONVERT_FLOAT(values, source, target, rounding)


def fake_driver() -> tuple[CudaDriver, FakeLibrary]:
    """Return a driver, and the library behind it."""
    library = FakeLibrary()
    return CudaDriver(library, lambda device: _STREAM + device), library
