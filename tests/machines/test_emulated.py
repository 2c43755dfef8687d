"""The emulated accelerator: paced links of its preset, op times of this host."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gascompile.api.plan import machine_of
from gascompile.core.checks.machine import check_machine
from gascompile.core.checks.machine_files import preset
from gascompile.core.errors import FormatError
from gascompile.core.machine import Contention, Interference, InterferencePoint, IoSettings, Machine
from gascompile.machines.emulated import EMULATED, emulated_machine, emulated_name
from gascompile.machines.resolve import resolve_machine

POINTS = (InterferencePoint(flops_per_byte=1.0, lost_share=0.5),)
HOST = replace(
    preset("cpu-nvme"),
    name="this machine: an abacus",
    io=IoSettings(num_threads=2, chunk_bytes=1 << 20),
    interference=Interference(points=POINTS),
)


def with_drive(bandwidth_bytes_per_s: float) -> Machine:
    """Return the host with another drive."""
    links = tuple(
        replace(
            link, bandwidth_bytes_per_s=bandwidth_bytes_per_s, latency_s=3e-4, source="measured"
        )
        for link in HOST.links
    )
    return replace(HOST, links=links)


def test_it_computes_as_fast_as_the_host_and_is_checked() -> None:
    machine = emulated_machine(HOST)
    check_machine(machine)
    assert machine.compute_tier == "gpu"
    assert machine.compute_backend == machine.backend == "emulated"
    assert machine.name == emulated_name(HOST.name)
    for found, own in ((machine.rates, HOST.rates), (machine.memory, HOST.memory)):
        for device in ("gpu", "cpu"):
            rates = [replace(rate, device="cpu") for rate in found if rate.device == device]
            assert rates == list(own)
        assert {rate.device for rate in found} == {"gpu", "cpu"}
    assert machine.io == HOST.io
    assert machine.tiers == {"gpu": preset(EMULATED).tiers["gpu"], **HOST.tiers}


def test_its_links_are_those_of_the_preset() -> None:
    machine = emulated_machine(HOST)
    rates = {link.name: link.bandwidth_bytes_per_s for link in machine.links}
    assert rates["cpu->gpu"] == 2e9
    assert rates["gpu->cpu"] == rates["nvme->gpu"] == 1e9
    assert machine.pipes == preset(EMULATED).pipes
    assert machine.tiers["gpu"].size_bytes == 64 << 20


def test_nothing_slows_its_links() -> None:
    assert emulated_machine(HOST).interference == Interference()


def test_its_ops_and_those_of_the_host_lose_what_two_on_the_host_do() -> None:
    lost = Contention(points=POINTS)
    assert emulated_machine(replace(HOST, contention=lost)).contention == lost
    assert emulated_machine(HOST).contention is None


def test_a_slower_drive_counts() -> None:
    machine = emulated_machine(with_drive(0.25e9))
    for link in machine.links:
        slow = "nvme" in link.name
        expected = 0.25e9 if slow else preset(EMULATED).link(link.name).bandwidth_bytes_per_s
        assert link.bandwidth_bytes_per_s == expected
        assert link.latency_s == (3e-4 if slow else 1e-4)
        assert link.source.startswith("measured" if slow else "assumed")


def test_by_name_it_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[Path] = []

    def measure(*, folder: Path, read: object) -> Machine:
        measured.append(folder)
        return HOST

    monkeypatch.setattr("gascompile.cost_models.measure.machine.measure_machine", measure)
    found = machine_of(EMULATED, tmp_path)
    assert found.rates == emulated_machine(HOST).rates
    again = resolve_machine(EMULATED, cache_dir=tmp_path, read=lambda *_, **__: None)  # type: ignore[arg-type]
    assert replace(again, places=found.places) == found
    assert measured == [tmp_path]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"backend": "abacus"}, r"\.backend.*no backend 'abacus'.*cuda"),
        ({"backend": "cpu"}, r"\.backend.*'cpu' does not compute on the place 'gpu'"),
        ({"io": IoSettings(engine="tape")}, r"\.io\.engine.*'tape'.*kvikio"),
    ],
)
def test_a_backend_or_an_engine_that_is_not_there_is_refused(
    changes: dict[str, str], match: str
) -> None:
    with pytest.raises(FormatError, match=match):
        check_machine(replace(preset("h100-gen5"), **changes))  # type: ignore[arg-type]


def test_a_machine_without_a_gpu_has_no_gpu_backend() -> None:
    with pytest.raises(FormatError, match="'cuda' does not compute on the place 'cpu'"):
        check_machine(replace(preset("cpu-nvme"), backend="cuda"))
