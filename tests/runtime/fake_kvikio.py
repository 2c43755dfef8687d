"""Stands in for the module ``kvikio``: real reads by threads of a pool, and every fault on demand."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable
from concurrent.futures import Future as Started
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest


class CompatMode(Enum):
    OFF = 0
    ON = 1
    AUTO = 2


@dataclass
class Future:
    """As the module's: ``get`` blocks, and raises what the read raised."""

    started: Started[int]

    def get(self) -> int:
        return self.started.result()


@dataclass
class Kvikio:
    """The parts of the module that the engine uses; it is its own ``defaults`` and ``cufile_driver``."""

    compat: CompatMode = CompatMode.AUTO
    prefers_compat: bool = False
    gds: bool = True
    gds_threshold: int = 0
    fails_at: int = -1
    """Offset of the read that fails."""
    fault: Exception = field(default_factory=lambda: RuntimeError("cuFile error: 5"))
    before: Callable[[str, int], None] = lambda path, offset: None
    """Called by a thread of the pool before it reads; may block or raise."""
    opened: list[str] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    settings: dict[str, int] = field(default_factory=dict)
    reads: list[tuple[str, int, int]] = field(default_factory=list)
    to_host: list[bool] = field(default_factory=list)
    """For each read whether it went to memory that is passed as such."""
    under_way: dict[str, int] = field(default_factory=dict)
    most_under_way: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._lock = threading.Lock()

    @property
    def defaults(self) -> Kvikio:
        return self

    cufile_driver = defaults

    def get(self, name: str) -> Any:
        return {
            "compat_mode": self.compat,
            "is_gds_available": self.gds,
            "gds_threshold": self.gds_threshold,
        }[name]

    def set(self, settings: dict[str, int]) -> None:
        self.settings.update(settings)
        self._pool.shutdown()
        self._pool = ThreadPoolExecutor(settings["num_threads"])

    def is_compat_mode_preferred(self) -> bool:
        return self.prefers_compat

    def CuFile(self, path: str, flags: str) -> Handle:  # noqa: N802 - the module's name
        assert flags == "r"
        self.opened.append(path)
        return Handle(self, path)

    def start(self, path: str, into: Any, size: int, offset: int) -> Future:
        """Queue a read with the pool, as the module does."""
        # The module takes arrays and buffers; a tensor of the host has neither interface.
        array = np.asarray(memoryview(into))
        assert array.nbytes >= size
        with self._lock:
            self.reads.append((path, offset, size))
            self.to_host.append(isinstance(into, memoryview))
            self.under_way[path] = self.under_way.get(path, 0) + 1
            most = max(self.most_under_way.get(path, 0), self.under_way[path])
            self.most_under_way[path] = most
        return Future(self._pool.submit(self._read, path, array, size, offset))

    def _read(self, path: str, array: Any, size: int, offset: int) -> int:
        try:
            self.before(path, offset)
            if offset == self.fails_at:
                raise self.fault
            with Path(path).open("rb") as stream:
                stream.seek(offset)
                data = stream.read(size)
            array[: len(data)] = np.frombuffer(data, dtype=np.uint8)
            return len(data)
        finally:
            with self._lock:
                self.under_way[path] -= 1

    def install(self, patch: pytest.MonkeyPatch) -> Self:
        """Be what ``import kvikio`` finds."""
        module = types.ModuleType("kvikio")
        for name in ("defaults", "cufile_driver"):
            setattr(module, name, self)
            patch.setitem(sys.modules, f"kvikio.{name}", types.ModuleType(f"kvikio.{name}"))
        module.CuFile = self.CuFile  # type: ignore[attr-defined]
        patch.setitem(sys.modules, "kvikio", module)
        return self


class Handle:
    """As ``kvikio.CuFile``."""

    def __init__(self, module: Kvikio, path: str) -> None:
        self._module, self._path = module, path

    def pread(self, into: Any, size: int, offset: int, task_size: int) -> Future:
        assert task_size == self._module.settings["task_size"]
        return self._module.start(self._path, into, size, offset)

    def close(self) -> None:
        self._module.closed.append(self._path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def uninstall(patch: pytest.MonkeyPatch) -> None:
    """Let ``import kvikio`` fail."""
    for name in ("kvikio", "kvikio.defaults", "kvikio.cufile_driver"):
        patch.setitem(sys.modules, name, None)
