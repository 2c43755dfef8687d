"""KvikIO as it is here: the module, the path that its reads take, and readers that time it. Only this file imports it.

KvikIO falls back from GPUDirect Storage to reads through RAM without a word: its own compatibility mode where
it finds no cuFile or no /run/udev, cuFile's where the kernel module or the file system cannot do it. Which of
them is on is asked for and never inferred from what is installed.
"""

from __future__ import annotations

import importlib
import time
from dataclasses import dataclass
from typing import Any

import torch

from gascompile.core.errors import DeviceError, StorageError
from gascompile.core.machine import IoSettings
from gascompile.runtime.devices.probe import NO_KVIKIO, GpuFacts, look, storage_faults

GPU_DIRECT = "GPUDirect Storage"
CUFILE_COMPAT = "cuFile's compatibility mode"
KVIKIO_COMPAT = "KvikIO's compatibility mode"
POSIX = "KvikIO's POSIX reads"
"""Into memory of the host, and of parts that are too small for anything else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PathTaken:
    """How KvikIO's reads reach the device."""

    name: str
    reason: str = ""
    """Why it is not the direct one."""

    @property
    def is_direct(self) -> bool:
        """Whether reads go from the drive to the device without a stop in RAM."""
        return self.name == GPU_DIRECT

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})" if self.reason else self.name


def import_kvikio() -> Any:
    """Return the module; raises ``DeviceError`` where it is not installed or does not load."""
    try:
        kvikio = importlib.import_module("kvikio")
        for part in ("defaults", "cufile_driver"):
            importlib.import_module(f"kvikio.{part}")
    except ImportError as error:
        raise DeviceError(
            f"KvikIO cannot be used: {error}. Install it with pip install 'gascompile[gpu]', or measure this machine "
            "again so that its plans read without it: gascompile calibrate",
            cause=NO_KVIKIO,
        ) from error
    return kvikio


def path_taken(kvikio: Any, facts: GpuFacts) -> PathTaken:
    """Return the path that ``kvikio`` takes on a machine with ``facts``."""
    missing = "; ".join(fault.detail for fault in storage_faults(facts))
    if is_compat(kvikio):
        return PathTaken(
            name=KVIKIO_COMPAT, reason=missing or "KVIKIO_COMPAT_MODE, or no libcufile"
        )
    try:
        available = bool(kvikio.cufile_driver.get("is_gds_available"))
    except RuntimeError as error:
        return PathTaken(name=CUFILE_COMPAT, reason=f"cuFile's driver does not answer: {error}")
    if not available or not facts.nvidia_fs:
        return PathTaken(
            name=CUFILE_COMPAT, reason=missing or "cuFile says that GDS is not available"
        )
    return PathTaken(name=GPU_DIRECT)


def is_compat(kvikio: Any) -> bool:
    """Return whether KvikIO reads by POSIX calls; ``AUTO`` is what it has found out to prefer."""
    mode = getattr(kvikio.defaults.get("compat_mode"), "name", "AUTO")
    return mode == "ON" or (mode != "OFF" and bool(kvikio.defaults.is_compat_mode_preferred()))


def buffer_of(memory: memoryview | torch.Tensor) -> Any:
    """Return ``memory`` as KvikIO takes it: a tensor of the host has no interface that it knows, an array has."""
    if isinstance(memory, torch.Tensor) and memory.device.type == "cpu":
        return memory.numpy()
    return memory


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedRead:
    """What reading a part of a file cost."""

    time_s: float
    path: str


class TimedReader:
    """Reads parts of files as the runtime does, and times them: what a measurement asks for.

    On the direct path bytes go to the device. On the others they go to the memory that the caller gives, from
    which its own copies go on: the runtime does not leave them to buffers of KvikIO's that no plan knows of.
    """

    def __init__(
        self, target: torch.Tensor, facts: GpuFacts | None = None, *, kvikio: Any = None
    ) -> None:
        """Find out which path is taken; raises ``DeviceError`` where KvikIO is not installed.

        Args:
            target: memory of the device for a read on the direct path.
            facts: about this machine; looked at by default.
            kvikio: the module; imported by default.
        """
        self._target = target
        self._kvikio = kvikio if kvikio is not None else import_kvikio()
        self.path = path_taken(self._kvikio, facts or look())
        self._set: tuple[int, int] | None = None

    def __call__(
        self, path: str, *, offset: int, size_bytes: int, into: memoryview, io: IoSettings
    ) -> TimedRead:
        """Read ``size_bytes`` at ``offset``; ``into`` is left alone on the direct path."""
        if (io.num_threads, io.chunk_bytes) != self._set:
            self._set = (io.num_threads, io.chunk_bytes)
            settings = {"num_threads": io.num_threads, "task_size": io.chunk_bytes}
            self._kvikio.defaults.set(settings)
        memory = self._target if self.path.is_direct else into
        buffer = buffer_of(memory[:size_bytes])
        with self._kvikio.CuFile(path, "r") as handle:
            start = time.perf_counter()
            count = handle.pread(buffer, size_bytes, offset, io.chunk_bytes).get()
            time_s = time.perf_counter() - start
        if count != size_bytes:
            raise StorageError(
                f"KvikIO read {count} of {size_bytes} bytes at offset {offset} of {path}; check the drive"
            )
        return TimedRead(time_s=time_s, path=str(self.path))
