"""Which machine a plan is for: given, preset, file, or this one, measured once."""

from __future__ import annotations

import json
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gascompile.core import serial
from gascompile.core.errors import FormatError, StorageError
from gascompile.core.machine import IoSettings, Machine
from gascompile.cost_models.formulas.op_time import op_time_s
from gascompile.cost_models.measure.host import MemoryLimit
from gascompile.machines import resolve as machine_module
from gascompile.machines.resolve import (
    preset,
    preset_names,
    remembered_machine,
    resolve_machine,
    this_machine_name,
)
from tests.drives import Result, read


def no_read(path: str, *, offset: int, size_bytes: int, into: memoryview, io: IoSettings) -> Result:
    raise AssertionError("this test measures nothing")


class Measured:
    """Counts measurements and answers each with a preset, quickly."""

    def __init__(self) -> None:
        self.times, self.takes_s = 0, 0.0

    def __call__(self, *, folder: object, read: object) -> Machine:
        self.times += 1
        time.sleep(self.takes_s)
        return preset("cpu-nvme")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Measured:
    fake = Measured()
    monkeypatch.setattr("gascompile.cost_models.measure.machine.measure_machine", fake)
    return fake


def test_a_machine_is_itself(tmp_path: Path) -> None:
    given = preset("cpu-nvme")
    assert resolve_machine(given, cache_dir=tmp_path, read=no_read) is given


def test_this_machine_is_measured_for_real(tmp_path: Path) -> None:
    found = resolve_machine(None, cache_dir=tmp_path / "cache", read=read)
    assert found.name == this_machine_name()
    assert found.link("nvme->cpu").bandwidth_bytes_per_s == pytest.approx(1e9)
    assert remembered_machine(tmp_path / "cache") == found


def test_it_is_measured_once(tmp_path: Path, measured: Measured) -> None:
    first = resolve_machine(None, cache_dir=tmp_path, read=no_read)
    again = resolve_machine(None, cache_dir=tmp_path, read=no_read)
    assert measured.times == 1
    assert again.links == first.links


def test_those_that_begin_at_once_measure_once(tmp_path: Path, measured: Measured) -> None:
    def resolve(_: int) -> Machine:
        return resolve_machine(None, cache_dir=tmp_path, read=no_read)

    measured.takes_s = 0.2
    with ThreadPoolExecutor(4) as pool:
        machines = list(pool.map(resolve, range(4)))
    assert measured.times == 1
    assert all(machine.links == machines[0].links for machine in machines)


def test_other_threads_are_another_machine(
    tmp_path: Path, measured: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve_machine(None, cache_dir=tmp_path, read=no_read)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    resolve_machine(None, cache_dir=tmp_path, read=no_read)
    assert measured.times == 2


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"format": "gascompile.machine/9"}'])
def test_a_damaged_memory_is_measured_again_with_a_warning(
    tmp_path: Path, measured: Measured, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    resolve_machine(None, cache_dir=tmp_path, read=no_read)
    (path,) = (tmp_path / "machine").iterdir()
    path.write_text(damage)
    with caplog.at_level(logging.WARNING):
        resolve_machine(None, cache_dir=tmp_path, read=no_read)
    assert measured.times == 2
    assert "damaged" in caplog.text
    assert serial.load(Machine, path) == preset("cpu-nvme")


def test_another_memory_limit_changes_the_tier_and_nothing_else(
    tmp_path: Path, measured: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve_machine(None, cache_dir=tmp_path, read=no_read)
    first = resolve_machine(None, cache_dir=tmp_path, read=no_read)
    limit = MemoryLimit(size_bytes=2**30, origin="a test")
    monkeypatch.setattr(machine_module, "memory_limit", lambda: limit)
    later = resolve_machine(None, cache_dir=tmp_path, read=no_read)
    assert later.tiers["cpu"].size_bytes == 2**30
    assert replace(later, places=first.places) == first
    assert measured.times == 1


def test_nothing_is_remembered_of_a_missing_folder(tmp_path: Path) -> None:
    assert remembered_machine(tmp_path / "nowhere") is None


def test_a_cache_that_cannot_be_made_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="choose another cache_dir"):
        resolve_machine(None, cache_dir=tmp_path / "file", read=no_read)


@pytest.mark.parametrize("name", ["cpu-nvme", "h100-gen5", "h200-gen5", "rtx4090-gen4"])
def test_presets(name: str, tmp_path: Path) -> None:
    assert name in preset_names()
    found = resolve_machine(name, cache_dir=tmp_path, read=no_read)
    assert found.name == name
    links = {link.name for link in found.links}
    assert {"nvme->cpu", "cpu->nvme"} <= links
    if "gpu" in found.tiers:
        assert {"nvme->gpu", "cpu->gpu", "gpu->cpu"} <= links
    for device in {"cpu", "gpu"} & set(found.tiers):
        for dtype in ("float32", "bfloat16", "float16", "float64"):
            time_s = op_time_s(
                flops=10**12,
                read_bytes=10**6,
                write_bytes=10**6,
                dtype=dtype,
                device=device,
                machine=found,
            )
            assert 1e-4 < time_s < 10


@pytest.mark.parametrize("name", preset_names())
def test_presets_say_where_each_number_comes_from(name: str) -> None:
    found = preset(name)
    sources = [found.io.source, *(tier.source for tier in found.tiers.values())]
    sources += [link.source for link in found.links] + [pipe.source for pipe in found.pipes]
    sources += [rate.source for rate in found.rates] + [rate.source for rate in found.memory]
    for source in sources:
        assert source.startswith(("datasheet: ", "assumed: "))


def test_a_preset_by_a_wrong_name() -> None:
    with pytest.raises(KeyError):
        preset("abacus")


def test_an_unknown_name_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"'abacus'.*{', '.join(preset_names())}"):
        resolve_machine("abacus", cache_dir=tmp_path, read=no_read)


def machine_file(tmp_path: Path, **changes: Any) -> Path:
    data = serial.to_json(preset("h100-gen5"))
    assert isinstance(data, dict)
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**data, **changes}))
    return path


def test_a_file(tmp_path: Path) -> None:
    path = machine_file(tmp_path, name="mine")
    for given in (path, str(path)):
        assert resolve_machine(given, cache_dir=tmp_path, read=no_read).name == "mine"


def test_a_missing_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"gone\.json does not exist"):
        resolve_machine(tmp_path / "gone.json", cache_dir=tmp_path, read=no_read)
    with pytest.raises(StorageError, match=r"gone\.json does not exist"):
        resolve_machine("gone.json", cache_dir=tmp_path, read=no_read)


LINK = {"from": "nvme", "to": "gpu", "bytes_per_second": 1e9}


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"places": [{"name": "nvme", "kind": "nvme", "bytes": 1}], "links": []}, "that computes"),
        (
            {"places": [{"name": "gpu", "kind": "gpu", "bytes": -1}], "links": []},
            r"places\[0\]\.bytes.*size -1",
        ),
        ({"links": [{**LINK, "from": "tape"}]}, "place 'tape'"),
        ({"links": [{**LINK, "shared": ["straw"]}]}, "pipe 'straw'"),
        ({"links": [{**LINK, "bytes_per_second": 0}]}, "not a positive number"),
        ({"links": [{**LINK, "bytes_per_second": float("nan")}]}, "NaN is not a number"),
        ({"links": [{**LINK, "latency_seconds": -1.0}]}, "fixed cost"),
        ({"io": {"num_threads": 0}}, "at least one thread"),
        ({"colour": "red"}, "unknown field"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(
    tmp_path: Path, changes: dict[str, Any], match: str
) -> None:
    path = machine_file(tmp_path, **changes)
    with pytest.raises(FormatError, match=match):
        resolve_machine(path, cache_dir=tmp_path, read=no_read)


@pytest.mark.parametrize("given", [(1.0,), 3, b"emulated"])
def test_what_is_no_machine_says_where_inputs_go(given: Any) -> None:
    with pytest.raises(TypeError, match=f"not {type(given).__name__}.*example_inputs="):
        resolve_machine(given, cache_dir=Path("unused"), read=no_read)
