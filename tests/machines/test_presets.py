"""The machines that ship with the package: complete, positive, and each number with its source."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import gascompile
from gascompile.core import serial
from gascompile.core.checks.machine import source_warnings
from gascompile.core.checks.machine_files import load_machine, preset, preset_names
from gascompile.core.machine import Machine
from gascompile.core.workload import OpSpec, TensorKind, TensorSpec, Workload

FOLDER = Path(__file__).resolve().parents[2] / "cost_models" / "presets"
WITH_GPU = [name for name in preset_names() if "gpu" in preset(name).tiers]
# x16 after encoding, by the standard's arithmetic: GT/s per lane x 16 lanes x 128/130 / 8 bits.
PCIE_BYTES_PER_S = {
    "gen3": 8e9 * 16 * 128 / 130 / 8,
    "gen4": 16e9 * 16 * 128 / 130 / 8,
    "gen5": 32e9 * 16 * 128 / 130 / 8,
}


def test_the_machines_that_users_name_are_there() -> None:
    assert set(preset_names()) >= {
        "a100-80-gen4", "a100-80-pcie-gen4", "cpu-nvme", "emulated", "gh200-gen5", "h100-gen5",
        "h200-gen5", "rtx4090-gen4", "t4-gen3", "xeon-gen5",
    }  # fmt: skip


@pytest.mark.parametrize("name", preset_names())
def test_every_two_tiers_are_linked_in_both_directions(name: str) -> None:
    machine = preset(name)
    assert machine.name == name
    expected = {f"{a}->{b}" for a, b in itertools.permutations(machine.tiers, 2)}
    assert [link.name for link in machine.links] == list(
        dict.fromkeys(link.name for link in machine.links)
    )
    assert {link.name for link in machine.links} == expected


def numbers(value: Any, source: str = "", where: str = "$") -> Iterator[tuple[str, float, str]]:
    """Yield ``(path, number, source)`` of every number, with the source of the object around it."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from numbers(item, value.get("source", source), f"{where}.{key}")
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from numbers(item, source, f"{where}[{i}]")
    elif isinstance(value, (int, float)):
        yield where, value, source


@pytest.mark.parametrize("name", preset_names())
def test_every_number_is_positive_and_says_where_it_comes_from(name: str) -> None:
    found = list(numbers(json.loads((FOLDER / f"{name}.json").read_text())))
    assert len(found) > 10
    for where, number, source in found:
        assert math.isfinite(number), where
        assert number > 0, where
        assert re.match(r"(datasheet|assumed): \S", source), where
        if "latency" in where or "overhead" in where:
            assert "assumed" in source, where
        if source.startswith("datasheet: ") and "PCI Express" not in source:
            assert "https://" in source, where


@pytest.mark.parametrize("name", WITH_GPU)
def test_what_shares_a_wire_shares_its_pipe(name: str) -> None:
    machine = preset(name)
    shared = {link.name: set(link.shared) for link in machine.links}
    for pipe, links in {
        "nvme-read": {"nvme->gpu", "nvme->cpu"},
        "nvme-write": {"gpu->nvme", "cpu->nvme"},
        "gpu-in": {"nvme->gpu", "cpu->gpu"},
        "gpu-out": {"gpu->nvme", "gpu->cpu"},
    }.items():
        assert {link for link, pipes in shared.items() if pipe in pipes} == links
    rate = {pipe.name: pipe.bandwidth_bytes_per_s for pipe in machine.pipes}
    assert rate["nvme-read"] == machine.link("nvme->cpu").bandwidth_bytes_per_s
    assert rate["nvme-write"] == machine.link("cpu->nvme").bandwidth_bytes_per_s
    assert rate["gpu-in"] == machine.link("cpu->gpu").bandwidth_bytes_per_s
    assert rate["gpu-out"] == machine.link("gpu->cpu").bandwidth_bytes_per_s


@pytest.mark.parametrize("name", [n for n in WITH_GPU if n not in {"gh200-gen5", "emulated"}])
def test_the_bus_is_as_fast_as_its_generation(name: str) -> None:
    expected = PCIE_BYTES_PER_S[name.rpartition("-")[2]]
    for link in ("cpu->gpu", "gpu->cpu"):
        assert preset(name).link(link).bandwidth_bytes_per_s == pytest.approx(expected, rel=1e-3)


def test_the_bus_of_grace_hopper_is_limited_by_the_memory_behind_it() -> None:
    machine = preset("gh200-gen5")
    assert machine.link("cpu->gpu").bandwidth_bytes_per_s == 450e9
    through_memory = {link.name for link in machine.links if "cpu-memory" in link.shared}
    assert through_memory == {link.name for link in machine.links if "cpu" in link.name}
    (pipe,) = (pipe for pipe in machine.pipes if pipe.name == "cpu-memory")
    (memory,) = (rate for rate in machine.memory if rate.device == "cpu")
    assert pipe.bandwidth_bytes_per_s == memory.bandwidth_bytes_per_s < 450e9


def workload(site: str) -> Workload:
    """Return five ops of 1 ms that read one weight of 64 MiB each."""
    weights = tuple(
        TensorSpec(name=f"w{i}", size_bytes=64 << 20, kind=TensorKind.WEIGHT) for i in range(5)
    )
    ops = tuple(OpSpec(name=f"op{i}", time_s={site: 1e-3}, reads=(f"w{i}",)) for i in range(5))
    return Workload(name="five", repeats=True, tensors=weights, ops=ops)


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_plans(name: str) -> None:
    machine = preset(name)
    plan = gascompile.plan(workload(machine.compute_tier), "192MiB", name)
    assert not any("mixes" in warning for warning in plan.warnings)
    # With a page for each there is room for two of five weights: three come in each iteration.
    (slow,) = {tensor.home for tensor in plan.tensors.values()} - {machine.compute_tier}
    best = max(link.bandwidth_bytes_per_s for link in machine.links_into(machine.compute_tier))
    assert slow in machine.tiers
    assert plan.certificate.predicted_s >= max(5e-3, 3 * (64 << 20) / best)


def test_a_second_drive_doubles_what_a_copied_preset_reads() -> None:
    """The recipe of the page on machines."""
    one = preset("cpu-nvme")
    two = doubled_drive(one)
    slow = gascompile.plan(workload("cpu"), "128MiB", one).certificate.predicted_s
    fast = gascompile.plan(workload("cpu"), "128MiB", two).certificate.predicted_s
    # Latencies and the first op, which the reads of the next iteration cannot hide behind, stay.
    assert 0.5 * slow < fast < 0.6 * slow


def doubled_drive(machine: Machine) -> Machine:
    """Return ``machine`` with two drives where it has one."""
    drive = machine.tiers["nvme"]
    return replace(
        machine,
        name=f"{machine.name}-x2",
        places=machine.with_place(replace(drive, size_bytes=2 * drive.size_bytes)).places,
        links=tuple(
            replace(link, bandwidth_bytes_per_s=2 * link.bandwidth_bytes_per_s)
            if "nvme" in (link.source_tier, link.target_tier)
            else link
            for link in machine.links
        ),
        pipes=tuple(
            replace(pipe, bandwidth_bytes_per_s=2 * pipe.bandwidth_bytes_per_s)
            if pipe.name.startswith("nvme-")
            else pipe
            for pipe in machine.pipes
        ),
    )


def test_measured_and_datasheet_numbers_do_not_mix_in_silence(tmp_path: Path) -> None:
    machine = preset("cpu-nvme")
    assert source_warnings(machine) == ()
    read, write = machine.links
    mixed = replace(machine, links=(replace(read, source="measured 2026-01-01: by hand"), write))
    path = tmp_path / "mixed.json"
    serial.write_atomic(path, serial.dumps(mixed))
    (warning,) = gascompile.plan(workload("cpu"), "192MiB", path).warnings
    assert "links[0]" in warning
    assert "links[1]" in warning
    sized = replace(machine.tiers["cpu"], source="measured 2026-01-01: free")
    assert source_warnings(machine.with_place(sized)) == ()


def test_the_page_on_machines_lists_the_presets_and_its_code_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (FOLDER.parents[1] / "docs" / "machines.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `([\w-]+)` \|", page, re.MULTILINE)) == set(preset_names())
    (code,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "machines.md", "exec"), {})
    assert load_machine("h100-two-drives.json") == replace(
        doubled_drive(preset("h100-gen5")), name="h100-two-drives"
    )
