"""The part of the CUDA driver that runs machine code: load an image, find a function, launch it.

The library comes with the driver and is asked by ``ctypes``, so nothing has to be built or installed. All
is in the primary context of a device, which is torch's. Launches go to the stream that they are given and
wait for nothing, so they may be captured into a graph.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gascompile.core.errors import DeviceError

_LIBRARY = "libcuda.so.1"
_INVALID_CONTEXT = 201  # the driver's CUDA_ERROR_INVALID_CONTEXT
_MAX_DYNAMIC_SHARED_BYTES = 8
"""The attribute of a function that raises what a launch may ask for beyond ``_PLAIN_SHARED_BYTES``."""
_PLAIN_SHARED_BYTES = 48 << 10  # that every launch may ask for
_CAUSE = "driver refused"

_opened: CudaDriver | None = None
_turn = threading.Lock()


class CudaDriver:
    """The driver, for one process."""

    def __init__(self, library: Any, stream: Callable[[int], int]) -> None:
        """Take ``libcuda`` as ``ctypes`` loads it, and what returns a device's current stream."""
        self._library = library
        self.stream = stream
        self._contexts: dict[int, ctypes.c_void_p] = {}
        library.cuLaunchKernel.argtypes = (
            ctypes.c_void_p, *(ctypes.c_uint,) * 7, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p,
        )  # fmt: skip
        self._check(library.cuInit(0), "start")

    def load(self, image: bytes, device: int) -> int:
        """Load an image into the memory of a device, for good; return its handle.

        Raises:
            DeviceError: the driver takes no such image.
        """
        self._enter(device)
        module = ctypes.c_void_p()
        self._check(self._library.cuModuleLoadData(ctypes.byref(module), image), "load an image")
        return int(module.value or 0)

    def function(self, module: int, symbol: str, shared_bytes: int) -> int:
        """Return the handle of a function whose launches take ``shared_bytes`` of each block's memory.

        Raises:
            DeviceError: the image lacks it, or the device has not so much.
        """
        handle = ctypes.c_void_p()
        code = self._library.cuModuleGetFunction(
            ctypes.byref(handle), ctypes.c_void_p(module), symbol.encode()
        )
        self._check(code, f"find the function '{symbol}'")
        if shared_bytes > _PLAIN_SHARED_BYTES:
            code = self._library.cuFuncSetAttribute(handle, _MAX_DYNAMIC_SHARED_BYTES, shared_bytes)
            self._check(code, f"give '{symbol}' {shared_bytes} bytes of shared memory")
        return int(handle.value or 0)

    def launcher(
        self,
        function: int,
        grid: Sequence[int],
        *,
        threads: int,
        shared_bytes: int,
        num_parameters: int,
        device: int,
    ) -> Callable[[Sequence[int]], None]:
        """Return what queues a launch on the device's current stream, given the addresses it reads and writes.

        Parameters beyond the addresses are null. Calls may not overlap: they share their argument block.
        """
        slots = (ctypes.c_uint64 * num_parameters)()
        start, size_bytes = ctypes.addressof(slots), ctypes.sizeof(ctypes.c_uint64)
        places = (start + i * size_bytes for i in range(num_parameters))
        pointers = (ctypes.c_void_p * num_parameters)(*places)
        launch, stream, handle = (
            self._library.cuLaunchKernel,
            self.stream,
            ctypes.c_void_p(function),
        )
        write = {n: struct.Struct(f"{n}Q").pack_into for n in range(num_parameters + 1)}
        x, y, z = grid

        def call(addresses: Sequence[int]) -> None:
            write[len(addresses)](slots, 0, *addresses)
            queue = stream(device)
            code = launch(handle, x, y, z, threads, 1, 1, shared_bytes, queue, pointers, None)
            if code == _INVALID_CONTEXT:
                # The first call of a thread that torch has not computed in.
                self._enter(device)
                code = launch(handle, x, y, z, threads, 1, 1, shared_bytes, queue, pointers, None)
            if code:
                self._check(code, "launch a kernel")

        return call

    def _enter(self, device: int) -> None:
        """Make the primary context of a device the thread's."""
        if device not in self._contexts:
            number, context = ctypes.c_int(), ctypes.c_void_p()
            self._check(self._library.cuDeviceGet(ctypes.byref(number), device), "find a device")
            code = self._library.cuDevicePrimaryCtxRetain(ctypes.byref(context), number)
            self._check(code, "open a device")
            self._contexts[device] = context
        self._check(self._library.cuCtxSetCurrent(self._contexts[device]), "use a device")

    def _check(self, code: int, what: str) -> None:
        if not code:
            return
        text = ctypes.c_char_p()
        self._library.cuGetErrorString(code, ctypes.byref(text))
        reason = (text.value or b"unknown error").decode()
        raise DeviceError(
            f"the CUDA driver could not {what}: {reason} (CUDA error {code})", cause=_CAUSE
        )


def open_driver() -> CudaDriver:
    """Return the driver of this process.

    Raises:
        DeviceError: there is none, or it does not start.
    """
    global _opened  # noqa: PLW0603 - a process has one driver
    with _turn:
        if _opened is None:
            try:
                library = ctypes.CDLL(_LIBRARY)
            except OSError as error:
                raise DeviceError(
                    f"the CUDA driver cannot be loaded: {error}; install the GPU's driver",
                    cause=_CAUSE,
                ) from error
            _opened = CudaDriver(library, lambda d: int(torch.cuda.current_stream(d).cuda_stream))
        return _opened
