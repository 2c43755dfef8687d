"""Reads by KvikIO, with a stand-in for the module: bytes, order, errors, and which path is really taken."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any, Self

import pytest
import torch

from gascompile.errors import DeviceError, StorageError
from gascompile.ir import Extent, IoSettings, WeightSource
from gascompile.runtime.arena import Arena
from gascompile.runtime.kvikio_engine import (
    CUFILE_COMPAT,
    GPU_DIRECT,
    KVIKIO_COMPAT,
    DeviceReader,
    KvikioEngine,
    path_taken,
)
from gascompile.runtime.landing import Landing, plan_landing
from tests.runtime.test_probe import HEALTHY

PAGE = 4096
IO = IoSettings(num_threads=3, chunk_bytes=2 * PAGE, engine="kvikio")


class CompatMode(Enum):
    OFF = 0
    ON = 1
    AUTO = 2


@dataclass
class Future:
    count: int = 0
    error: Exception | None = None

    def get(self) -> int:
        if self.error is not None:
            raise self.error
        return self.count


@dataclass
class Kvikio:
    """The parts of the module that the engine uses; it is its own ``defaults`` and ``cufile_driver``."""

    compat: CompatMode = CompatMode.AUTO
    prefers_compat: bool = False
    gds: bool = True
    fails_at: int = -1
    opened: list[str] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    settings: dict[str, int] = field(default_factory=dict)
    reads: list[tuple[str, int, int]] = field(default_factory=list)

    @property
    def defaults(self) -> Kvikio:
        return self

    cufile_driver = defaults

    def get(self, name: str) -> Any:
        return {"compat_mode": self.compat, "is_gds_available": self.gds}[name]

    def set(self, settings: dict[str, int]) -> None:
        self.settings.update(settings)

    def is_compat_mode_preferred(self) -> bool:
        return self.prefers_compat

    def CuFile(self, path: str, flags: str) -> Handle:  # noqa: N802 - the module's name
        assert flags == "r"
        self.opened.append(path)
        return Handle(self, path)


class Handle:
    def __init__(self, module: Kvikio, path: str) -> None:
        self._module, self._path = module, path

    def pread(self, into: torch.Tensor, size: int, offset: int, task_size: int) -> Future:
        assert task_size == self._module.settings["task_size"]
        self._module.reads.append((self._path, offset, size))
        if offset == self._module.fails_at:
            return Future(error=RuntimeError("cuFile error: 5"))
        data = Path(self._path).read_bytes()[offset : offset + size]
        if data:
            into[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return Future(count=len(data))

    def close(self) -> None:
        self._module.closed.append(self._path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


class Gate:
    """An event that is reached when the test says so."""

    def __init__(self) -> None:
        self._event = threading.Event()

    @property
    def reached(self) -> bool:
        return self._event.is_set()

    def wait(self) -> None:
        assert self._event.wait(10)

    def open(self) -> None:
        self._event.set()


def landing(path: Path, offset: int, size_bytes: int) -> Landing:
    extent = Extent(path=str(path), offset=offset, size_bytes=size_bytes)
    source = WeightSource(name="w", dtype="uint8", shape=(size_bytes,), extents=(extent,))
    return plan_landing(source, chunk_bytes=IO.chunk_bytes, is_direct=lambda path: True)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    generator = torch.Generator().manual_seed(1)
    paths = [tmp_path / "one", tmp_path / "two"]
    for path in paths:
        noise = torch.randint(0, 256, (10 * PAGE + 100,), generator=generator, dtype=torch.uint8)
        path.write_bytes(bytes(noise.tolist()))
    return paths


@pytest.mark.parametrize(
    ("module", "changes", "name", "reason"),
    [
        (Kvikio(), {}, GPU_DIRECT, ""),
        (Kvikio(compat=CompatMode.OFF, prefers_compat=True), {}, GPU_DIRECT, ""),
        (Kvikio(compat=CompatMode.ON), {}, KVIKIO_COMPAT, "KVIKIO_COMPAT_MODE"),
        (Kvikio(prefers_compat=True), {"has_udev": False}, KVIKIO_COMPAT, "/run/udev"),
        (Kvikio(gds=False), {}, CUFILE_COMPAT, "not available"),
        (Kvikio(), {"nvidia_fs": ""}, CUFILE_COMPAT, "nvidia-fs"),
    ],
)
def test_a_silent_fallback_is_found(
    module: Kvikio, changes: dict[str, Any], name: str, reason: str
) -> None:
    found = path_taken(module, replace(HEALTHY, **changes))
    assert found.name == name
    assert found.is_direct == (name == GPU_DIRECT)
    assert reason in found.reason


def test_bytes_arrive_and_files_are_opened_once(files: list[Path]) -> None:
    arena, module = Arena(32 * PAGE), Kvikio()
    engine = KvikioEngine(arena, IO, kvikio=module, facts=HEALTHY)
    first, second = landing(files[0], 100, 5 * PAGE), landing(files[1], PAGE, 3 * PAGE)
    again = landing(files[0], 6 * PAGE, PAGE)
    tickets = [
        engine.submit(first, 0, key=2, link="nvme->gpu"),
        engine.submit(second, 8 * PAGE, key=0, link="nvme->gpu"),
        engine.submit(again, 16 * PAGE, key=1, link="nvme->gpu"),
    ]
    for ticket in tickets:
        ticket.wait()
        assert ticket.done
        assert not ticket.failed
        assert ticket.event is None
    assert bytes(arena.memory[100 : 100 + 5 * PAGE]) == files[0].read_bytes()[100 : 100 + 5 * PAGE]
    assert bytes(arena.memory[8 * PAGE : 11 * PAGE]) == files[1].read_bytes()[PAGE : 4 * PAGE]
    assert bytes(arena.memory[16 * PAGE : 17 * PAGE]) == files[0].read_bytes()[6 * PAGE : 7 * PAGE]
    assert engine.paths == {"nvme->gpu": GPU_DIRECT}
    assert module.settings == {"num_threads": 3, "task_size": 2 * PAGE}
    engine.close()
    engine.close()
    assert sorted(module.opened) == sorted(module.closed) == sorted(map(str, files))
    with pytest.raises(StorageError, match="closed"):
        engine.submit(first, 0, key=0, link="nvme->gpu")


def test_nothing_is_read_into_a_reservation_that_is_in_use(files: list[Path]) -> None:
    arena, module, gate = Arena(32 * PAGE), Kvikio(), Gate()
    engine = KvikioEngine(arena, IO, kvikio=module, facts=HEALTHY)
    held = engine.submit(landing(files[0], 0, PAGE), 0, key=0, link="nvme->gpu", after=gate)
    free = engine.submit(landing(files[1], 0, PAGE), 4 * PAGE, key=1, link="nvme->gpu")
    free.wait()
    assert not held.done
    assert [path for path, _, _ in module.reads] == [str(files[1])]
    gate.open()
    held.wait()
    assert bytes(arena.memory[:PAGE]) == files[0].read_bytes()[:PAGE]
    engine.close()


def test_a_failing_drive_is_a_storage_error_and_the_engine_goes_on(files: list[Path]) -> None:
    arena, module = Arena(32 * PAGE), Kvikio(fails_at=2 * PAGE)
    engine = KvikioEngine(arena, IO, kvikio=module, facts=HEALTHY)
    ticket = engine.submit(landing(files[0], 0, 6 * PAGE), 0, key=0, link="nvme->gpu")
    with pytest.raises(StorageError, match=r"offset 8192 of .*one for 'w'.*cuFile error: 5"):
        ticket.wait()
    assert ticket.failed
    module.fails_at = -1
    engine.submit(landing(files[0], 0, 6 * PAGE), 0, key=0, link="nvme->gpu").wait()
    engine.close()


def test_a_truncated_file_is_said(files: list[Path]) -> None:
    module = Kvikio()
    engine = KvikioEngine(Arena(64 * PAGE), IO, kvikio=module, facts=HEALTHY)
    whole = landing(files[0], 0, 20 * PAGE)
    with pytest.raises(StorageError, match="ends too early"):
        engine.submit(whole, 0, key=0, link="nvme->gpu").wait()
    engine.close()


def test_a_fallback_is_logged_and_part_of_the_report(
    files: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    facts = replace(HEALTHY, has_udev=False)
    with caplog.at_level(logging.WARNING):
        engine = KvikioEngine(Arena(PAGE), IO, kvikio=Kvikio(prefers_compat=True), facts=facts)
    assert "/run/udev" in caplog.text
    engine.submit(landing(files[0], 0, 10), 0, key=0, link="nvme->gpu").wait()
    assert engine.paths["nvme->gpu"].startswith(KVIKIO_COMPAT)
    engine.close()


def test_without_kvikio_there_is_a_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(f"No module named '{name}'")

    monkeypatch.setattr("importlib.import_module", missing)
    with pytest.raises(DeviceError, match="No module named 'kvikio'") as caught:
        KvikioEngine(Arena(PAGE), IO, facts=HEALTHY)
    assert caught.value.cause == "no kvikio"


def test_a_measurement_reads_to_the_device(files: list[Path]) -> None:
    target = torch.zeros(4 * PAGE, dtype=torch.uint8)
    read = DeviceReader(target, HEALTHY, kvikio=Kvikio())
    found = read(
        str(files[0]), offset=PAGE, size_bytes=2 * PAGE, into=memoryview(bytearray()), io=IO
    )
    assert found.path == GPU_DIRECT
    assert bytes(target[: 2 * PAGE].tolist()) == files[0].read_bytes()[PAGE : 3 * PAGE]
    with pytest.raises(StorageError, match="read 100 of 4096"):
        read(str(files[0]), offset=10 * PAGE, size_bytes=PAGE, into=memoryview(bytearray()), io=IO)
