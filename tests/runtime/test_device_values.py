"""Values of a device: which slot holds which, when a copy counts, and what outlives faults and other plans."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gascompile.core.errors import StorageError
from gascompile.core.machine import Link
from gascompile.core.sizes import PAGE_BYTES
from gascompile.core.sources import Extent, FileStamp, WeightSource
from gascompile.runtime.devices.cuda import CudaDevice
from gascompile.runtime.devices.emulated import EmulatedDevice
from gascompile.runtime.devices.pacing import Disorder
from gascompile.runtime.memory.device_moves import DeviceMoves
from gascompile.runtime.memory.device_values import DeviceValues
from gascompile.runtime.memory.host_slots import HOST_BYTES, Outside
from gascompile.runtime.memory.source_slots import SourceSlots
from gascompile.runtime.memory.staged_moves import PIECE_BYTES
from gascompile.runtime.protocols import Device, Ticket
from tests.runtime.devices.fake_cuda import FakeApi
from tests.runtime.devices.machines import accelerator

LARGE = 2 * PIECE_BYTES // 4 + 7
"""Elements of more than two pieces, the last one no whole page."""
SIZES = {"a": 1000, "b": LARGE, "c": 24}


@pytest.fixture(params=["cuda", "emulated"])
def device(request: pytest.FixtureRequest) -> Device:
    """Return a device whose copies are as late as they may be."""
    if request.param == "cuda":
        return CudaDevice(api=FakeApi())
    machine = accelerator(up=4e9, down=4e9, nvme=4e9, latency_s=1e-5)
    out = Link(source_tier="gpu", target_tier="nvme", bandwidth_bytes_per_s=4e9, latency_s=1e-5)
    machine = replace(machine, links=(*machine.links, out))
    return EmulatedDevice(machine, disorder=Disorder(seed=1, longest_delay_s=2e-3), late=True)


@pytest.fixture
def wanted() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(size, generator=generator) for name, size in SIZES.items()}


@pytest.fixture
def values(
    device: Device, wanted: dict[str, torch.Tensor], tmp_path: Path
) -> Iterator[DeviceValues]:
    tensors = {name: value.clone() for name, value in wanted.items()}
    found = DeviceValues(tensors, {"z": (50, torch.float32)}, tmp_path, DeviceMoves(device))
    yield found
    found.close()


def outside(homes: dict[str, str], **area: tuple[int, int]) -> Outside:
    blocks = {name: 4 * SIZES[name] for name, home in homes.items() if home == "cpu"}
    return Outside(homes=homes, blocks=blocks, area=area, most_bytes=1 << 30)


def arrived(device: Device, ticket: Ticket) -> None:
    """Do what a run does where its plan waits."""
    ticket.wait()
    if ticket.event is not None:
        device.hold(ticket.event)


def gone(values: DeviceValues, device: Device, name: str, link: str) -> None:
    arrived(device, values.write(name, link=link, after=device.mark()))
    values.drop(name)


def back(values: DeviceValues, device: Device, name: str, link: str) -> torch.Tensor:
    arrived(device, values.read(name, link=link, after=device.mark()))
    return values.tensors[name]


def test_values_come_and_go_over_streams(
    values: DeviceValues, device: Device, wanted: dict[str, torch.Tensor]
) -> None:
    assert all(values.is_away(name) for name in SIZES)
    values.rest(["a"], outside({"a": "cpu"}))
    for name in ("b", "c", "z"):
        assert not values.is_away(name)
    assert torch.equal(back(values, device, "a", "cpu->gpu"), wanted["a"])
    for name, link in (("a", "cpu"), ("b", "nvme"), ("c", "nvme")):
        values.changed([name])
        values.tensors[name].mul_(2)
        with pytest.raises(StorageError, match="would lose its value"):
            values.drop(name)
        gone(values, device, name, f"gpu->{link}")
        assert values.tensors[name].untyped_storage().nbytes() == 0
        assert torch.equal(values.value(name), wanted[name] * 2)
    for name, link in (("a", "cpu"), ("b", "nvme"), ("c", "nvme")):
        assert torch.equal(back(values, device, name, f"{link}->gpu"), wanted[name] * 2)
    assert not values.tensors["z"].any()


@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_what_was_not_waited_for_is_not_there(
    values: DeviceValues, device: Device, wanted: dict[str, torch.Tensor]
) -> None:
    values.rest(["a", "b"], outside({"a": "cpu", "b": "nvme"}))
    for name, link in (("a", "cpu->gpu"), ("b", "nvme->gpu")):
        ticket = values.read(name, link=link, after=device.mark())
        ticket.wait()
        assert not torch.equal(values.tensors[name], wanted[name])
        assert ticket.event is not None
        device.hold(ticket.event)
        assert torch.equal(values.tensors[name], wanted[name])


def test_a_plan_reads_no_old_slot(values: DeviceValues, device: Device) -> None:
    values.rest(["a"], outside({"a": "cpu"}))
    back(values, device, "a", "cpu->gpu")
    values.changed(["a"])
    gone(values, device, "a", "gpu->nvme")
    with pytest.raises(StorageError, match="not where the plan reads it from"):
        values.read("a", link="cpu->gpu")
    back(values, device, "a", "nvme->gpu")


def test_slots_over_one_another_hold_the_newest(
    values: DeviceValues, device: Device, wanted: dict[str, torch.Tensor]
) -> None:
    values.rest([], outside({}, a=(0, 4000), c=(0, 96)))
    gone(values, device, "a", "gpu->cpu")
    assert torch.equal(values.value("a"), wanted["a"])
    back(values, device, "a", "cpu->gpu")
    gone(values, device, "c", "gpu->cpu")
    with pytest.raises(StorageError, match="not where the plan reads it from"):
        values.read("a", link="cpu->gpu")
    assert torch.equal(values.value("c"), wanted["c"])


def test_another_plans_slots_take_values_over(
    values: DeviceValues, device: Device, wanted: dict[str, torch.Tensor]
) -> None:
    """What lies on the host alone is there for whichever plan comes next, within its memory."""
    values.rest(["a", "c"], outside({"a": "cpu"}, c=(0, 96)))
    for name, link in (("a", "cpu->gpu"), ("c", "nvme->gpu")):
        back(values, device, name, link).add_(1)
        values.changed([name])
        gone(values, device, name, "gpu->cpu")
    moves = values._moves
    assert moves.host_bytes == HOST_BYTES + 2 * PAGE_BYTES
    values.rest(["a", "b", "c"], outside({"a": "nvme", "b": "cpu", "c": "nvme"}))
    assert moves.host.blocks == {"b"}
    found = {name: values.value(name) for name in SIZES}
    values.rest([], replace(outside({}), most_bytes=0))
    assert moves.host_bytes == HOST_BYTES
    for name, value in wanted.items():
        new = value + (name != "b")
        assert torch.equal(found[name], new)
        assert torch.equal(values.tensors[name], new)


def test_values_from_outside_are_kept_wherever_they_are(
    values: DeviceValues, device: Device, wanted: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    values.rest(["a", "c"], outside({"a": "cpu", "c": "nvme"}))
    for name, value in wanted.items():
        values.assign(name, value + 1)
        assert torch.equal(values.value(name), value + 1)
    # A view of a part: the rest stays.
    values.fill("b", lambda tensor: tensor[:3].zero_())
    assert torch.equal(values.value("b")[3:], wanted["b"][3:] + 1)
    with (tmp_path / "copy").open("wb+") as file:
        for name, size in SIZES.items():
            assert values.copy_to(name, file.fileno(), 0)
            file.seek(0)
            raw = bytearray(file.read(4 * size))
            assert torch.equal(torch.frombuffer(raw, dtype=torch.float32), values.value(name))
    assert torch.equal(back(values, device, "a", "cpu->gpu"), wanted["a"] + 1)
    assert torch.equal(values.taken("c"), wanted["c"] + 1)


@pytest.mark.parametrize("direction", ["out", "in"])
def test_a_failed_transfer_leaves_the_values_before(
    direction: str, values: DeviceValues, device: Device, wanted: dict[str, torch.Tensor]
) -> None:
    values.rest(["b"] if direction == "in" else [], outside({"b": "nvme"}))
    staged = values._moves.staged
    server = staged._outward if direction == "out" else staged._inward
    real, calls = server.move_bytes, 0

    def fault(*args: Any) -> int:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OSError(errno.EIO, "the drive has failed")
        return int(real(*args))

    server.move_bytes = fault
    if direction == "out":
        values.changed(["b"])
        values.tensors["b"].add_(1)
        ticket = values.write("b", link="gpu->nvme", after=device.mark())
    else:
        ticket = values.read("b", link="nvme->gpu", after=device.mark())
    with pytest.raises(StorageError, match="the drive has failed"):
        ticket.wait()
    assert ticket.failed
    values.recover()
    assert torch.equal(values.tensors["b"], wanted["b"] + (direction == "out"))
    if direction == "out":
        with pytest.raises(StorageError, match="would lose its value"):
            values.drop("b")
    gone(values, device, "b", "gpu->nvme")
    values.recover()
    assert torch.equal(values.value("b"), wanted["b"] + (direction == "out"))


def test_values_in_files_of_others_are_read_in_place(device: Device, tmp_path: Path) -> None:
    value = torch.randn(LARGE)
    path, offset = tmp_path / "weights", 1337
    path.write_bytes(bytes(offset) + value.numpy().tobytes() + b"more")
    extent = Extent(path=str(path), offset=offset, size_bytes=value.nbytes)
    source = WeightSource(name="w", dtype="float32", shape=(LARGE,), extents=(extent,))
    found = path.stat()
    stamp = FileStamp(path=str(path), size_bytes=found.st_size, mtime_ns=found.st_mtime_ns)
    sources = SourceSlots({"w": source}, [stamp])
    moves = DeviceMoves(device)
    values = DeviceValues(
        {"w": torch.empty(LARGE)}, {}, tmp_path, moves, unread=["w"], sources=sources
    )
    try:
        values.rest(["w"], outside({"w": "nvme"}))
        assert torch.equal(back(values, device, "w", "nvme->gpu"), value)
        values.drop("w")
        assert torch.equal(values.value("w"), value)
        back(values, device, "w", "nvme->gpu").add_(1)
        values.changed(["w"])
        gone(values, device, "w", "gpu->nvme")
        assert torch.equal(values.value("w"), value + 1)
        assert path.read_bytes()[offset : offset + 4] == value[:1].numpy().tobytes()
    finally:
        values.close()
