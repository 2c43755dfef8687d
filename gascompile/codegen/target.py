"""The GPU that kernels are written for: this machine's, or one that is described and need not be here.

Inductor asks the driver what the GPU is like. Where there is none, it is told for as long as it writes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

# What Inductor is told of a GPU that is not here is told to the whole process.
_turn = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuTarget:
    """A GPU, as far as generated code depends on it."""

    major: int
    minor: int
    multi_processor_count: int
    regs_per_multiprocessor: int = 65536
    max_threads_per_multi_processor: int = 2048
    max_threads_per_block: int = 1024
    warp_size: int = 32

    @property
    def capability(self) -> str:
        return f"{self.major}.{self.minor}"


def target_here() -> GpuTarget | None:
    """Return this machine's current GPU; ``None`` where there is none."""
    if not torch.cuda.is_available() or torch.version.cuda is None:
        return None
    properties: Any = torch.cuda.get_device_properties()
    return GpuTarget(
        major=properties.major,
        minor=properties.minor,
        multi_processor_count=properties.multi_processor_count,
        regs_per_multiprocessor=properties.regs_per_multiprocessor,
        max_threads_per_multi_processor=properties.max_threads_per_multi_processor,
        warp_size=properties.warp_size,
    )


@contextmanager
def seen_by_inductor(target: GpuTarget) -> Iterator[None]:
    """Let Inductor see a GPU: this machine's own, or else one with the properties of ``target``."""
    if torch.cuda.is_available():
        yield
        return
    with _turn, _shown(target):
        yield


@contextmanager
def _shown(target: GpuTarget) -> Iterator[None]:
    from torch._dynamo import device_interface
    from torch._inductor.runtime.hints import DeviceProperties
    from torch.utils import _triton

    device_interface.get_interface_for_device("cuda")  # fills the table
    table: dict[str, Any] = device_interface.device_interfaces
    cuda: Any = torch.cuda
    shown = _interface(target)
    names = ("cuda", "cuda:0")
    before = {name: table[name] for name in names if name in table}
    properties, backend_hash = cuda.get_device_properties, _triton.triton_hash_with_backend
    table.update(dict.fromkeys(names, shown))
    # What has been found out about this machine is forgotten, as is then what holds for the other.
    remembered = [f for f in (*vars(_triton).values(), DeviceProperties.create) if _is_cached(f)]
    cuda.get_device_properties = lambda device=None: target
    _triton.triton_hash_with_backend = lambda: "none"  # type: ignore[assignment]
    _forget(remembered)
    try:
        yield
    finally:
        for name in names:
            table.pop(name, None)
        table.update(before)
        cuda.get_device_properties = properties
        _triton.triton_hash_with_backend = backend_hash
        _forget(remembered)


def _is_cached(value: object) -> bool:
    return hasattr(value, "cache_clear")


def _forget(functions: list[Any]) -> None:
    for function in functions:
        function.cache_clear()


def _interface(target: GpuTarget) -> Any:
    from torch._dynamo import device_interface

    base: Any = device_interface.CudaInterface

    class Shown(base):  # type: ignore[misc]
        current_device = staticmethod(lambda: 0)
        device_count = staticmethod(lambda: 1)
        is_available = staticmethod(lambda: True)
        get_device_properties = staticmethod(lambda device=None: target)
        get_compute_capability = staticmethod(lambda device=None: target.major * 10 + target.minor)
        is_bf16_supported = staticmethod(lambda including_emulation=False: True)
        is_triton_capable = staticmethod(lambda device=None: True)
        raise_if_triton_unavailable = staticmethod(lambda device=None: None)

        class Worker:
            current_device = staticmethod(lambda: 0)
            get_device_properties = staticmethod(lambda device=None: target)

    return Shown
