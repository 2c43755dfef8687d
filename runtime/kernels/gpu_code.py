"""Compiled kernels on a GPU: images taken from verified bytes, and a call per launch."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Mapping, Sequence

from gascompile.core.errors import DeviceError, StorageError
from gascompile.core.kernels import GpuFunction, KernelFiles, Launch
from gascompile.runtime.devices.driver import CudaDriver

_loaded: dict[tuple[str, CudaDriver], GpuCode] = {}
_turn = threading.Lock()


class GpuCode:
    """The machine code of one library. An image is loaded when a call of it is first asked for."""

    def __init__(
        self, files: KernelFiles, functions: Mapping[str, GpuFunction], driver: CudaDriver
    ) -> None:
        self._code = files.code
        self._functions = functions
        self._driver = driver
        self._handles: dict[tuple[str, int], int] = {}

    def launcher(self, launch: Launch, device: int) -> Callable[[Sequence[int]], None]:
        """Return a launch on a device, given the addresses of all inputs and buffers of its kernel.

        Raises:
            StorageError: the code lacks the function, or is no image of a GPU.
            DeviceError: the driver refuses it.
        """
        function = self._functions.get(launch.symbol)
        if function is None or len(launch.grid) != 3:
            raise StorageError(f"the fused kernels lack the function '{launch.symbol}'")
        if len(launch.arguments) > function.num_parameters:
            raise StorageError(
                f"'{launch.symbol}' takes {function.num_parameters} addresses, its launch has "
                f"{len(launch.arguments)}"
            )
        queue = self._driver.launcher(
            self._handle(launch.symbol, function, device),
            launch.grid,
            threads=function.threads,
            shared_bytes=function.shared_bytes,
            num_parameters=function.num_parameters,
            device=device,
        )
        fetch = fetcher(launch)
        return lambda addresses: queue(fetch(addresses))

    def _handle(self, symbol: str, function: GpuFunction, device: int) -> int:
        key = (symbol, device)
        if key not in self._handles:
            image = self._code[function.start : function.stop]
            if function.start < 0 or not image or len(image) != function.stop - function.start:
                raise StorageError(
                    f"the fused kernels lack the function '{symbol}': its image is not within "
                    f"their {len(self._code)} bytes"
                )
            try:
                module = self._driver.load(image, device)
                self._handles[key] = self._driver.function(module, symbol, function.shared_bytes)
            except DeviceError as error:
                error.add_note('compile with fuse="off" to run the ops of fused kernels one by one')
                raise
        return self._handles[key]


def load_gpu_code(
    files: KernelFiles, functions: Mapping[str, GpuFunction], driver: CudaDriver
) -> GpuCode:
    """Return the machine code of ``files``, the same for all who ask. It is run: ask for trust before."""
    with _turn:
        key = (files.digest, driver)
        if key not in _loaded:
            _loaded[key] = GpuCode(files, functions, driver)
        return _loaded[key]


def fetcher(launch: Launch) -> Callable[[Sequence[int]], tuple[int, ...]]:
    """Return what takes a launch's arguments from the addresses of a kernel's inputs and buffers."""
    places = [pointer.place for pointer in launch.arguments]
    if not any(pointer.offset_bytes for pointer in launch.arguments) and len(places) > 1:
        return operator.itemgetter(*places)
    pairs = tuple((pointer.place, pointer.offset_bytes) for pointer in launch.arguments)
    return lambda addresses: tuple(addresses[place] + offset for place, offset in pairs)
