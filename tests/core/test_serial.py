"""JSON of the formats: what is written is read back, and what is unknown is refused."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pytest

from gascompile.core import serial
from gascompile.core.errors import FormatError, StorageError
from gascompile.core.json_readers import reader_of
from gascompile.core.machine import ComputeRate, IoSettings, Link, Machine, MemoryRate, Pipe, Place
from gascompile.core.plan import (
    Certificate,
    LinkAccount,
    OpPlan,
    PlaceAccount,
    Plan,
    SolverStatus,
    TensorPlan,
)
from gascompile.core.steps import Compute, Prefetch, Release, Wait
from gascompile.core.workload import OpSpec, TensorKind, TensorSpec, Workload

WORKLOAD = Workload(
    name="one layer",
    repeats=True,
    tensors=(
        TensorSpec(name="w", size_bytes=4096, kind=TensorKind.WEIGHT),
        TensorSpec(name="%mm", size_bytes=64, kind=TensorKind.OUTPUT),
    ),
    ops=(OpSpec(name="mm", time_s={"cpu": 0.5}, reads=("w",), writes=("%mm",), flops=2048),),
)
MACHINE = Machine(
    name="two tiers",
    places=(Place.named("cpu", 1 << 20, source="datasheet: none"), Place.named("nvme", 1)),
    links=(
        Link(
            source_tier="nvme",
            target_tier="cpu",
            bandwidth_bytes_per_s=1e9,
            latency_s=1e-4,
            shared=("bus",),
        ),
    ),
    pipes=(Pipe(name="bus", bandwidth_bytes_per_s=2e9),),
    rates=(ComputeRate(device="cpu", dtype="float32", flops_per_s=1e11),),
    memory=(MemoryRate(device="cpu", bandwidth_bytes_per_s=2e10),),
    io=IoSettings(num_threads=2, chunk_bytes=4096),
)
PLAN = Plan(
    fingerprint={"graph": "ab", "machine": "cd"},
    strategy="ilp",
    places=(
        PlaceAccount(name="cpu", budget_bytes=8192, arena_bytes=8192, peak_bytes=8256),
        PlaceAccount(name="nvme", peak_bytes=4096, beside_bytes=8),
    ),
    links=(LinkAccount(name="nvme->cpu", moved_bytes=4096),),
    tensors={
        "w": TensorPlan(home="nvme", kind=TensorKind.WEIGHT, size_bytes=4096),
        "%mm": TensorPlan(home="cpu", kind=TensorKind.OUTPUT, size_bytes=64, address=None),
    },
    ops=(OpPlan(name="mm", site="cpu", time_s=0.5),),
    steps=(
        Prefetch(op=0, tensor="w", link="nvme->cpu", size_bytes=4096, address=0),
        Wait(op=0, tensor="w", address=0),
        Compute(op=0),
        Release(op=1, tensor="w", address=0),
    ),
    certificate=Certificate(
        predicted_s=0.6,
        lower_bound_s=0.5,
        limit_s=0.5,
        gap=1 / 6,
        status=SolverStatus.OPTIMAL,
        solve_s=0.01,
        binding="compute",
    ),
    workload=WORKLOAD,
    machine=MACHINE,
    warnings=("none",),
)


def workload_data() -> dict[str, Any]:
    data = serial.to_json(WORKLOAD)
    assert isinstance(data, dict)
    return data


@pytest.mark.parametrize("value", [WORKLOAD, MACHINE, PLAN], ids=["workload", "machine", "plan"])
def test_round_trip(value: Workload | Machine | Plan) -> None:
    text = serial.dumps(value)
    assert serial.from_json(type(value), json.loads(text)) == value
    assert serial.dumps(serial.from_json(type(value), json.loads(text))) == text


def test_names_in_the_file_are_those_of_the_format() -> None:
    data = workload_data()
    assert data["format"] == "gascompile.workload/1"
    assert data["tensors"][0] == {"name": "w", "bytes": 4096, "kind": "weight"}
    assert data["ops"][0]["seconds"] == {"cpu": 0.5}
    steps: Any = serial.to_json(PLAN.steps)
    assert [step["step"] for step in steps] == ["load", "wait", "run", "free"]


def test_a_field_with_a_default_may_be_missing() -> None:
    data = workload_data()
    del data["ops"][0]["flops"]
    assert serial.from_json(Workload, data).ops[0].flops == 0


def refused(data: object, match: str) -> None:
    with pytest.raises(FormatError, match=match):
        serial.from_json(Workload, data)


def test_refuses_another_version() -> None:
    refused({**workload_data(), "format": "gascompile.workload/2"}, r"workload/1.*workload/2")


def test_refuses_a_missing_format() -> None:
    data = workload_data()
    del data["format"]
    refused(data, "the data says None")


def test_refuses_an_unknown_field() -> None:
    refused({**workload_data(), "colour": "red"}, r"unknown field 'colour'")


def test_refuses_a_missing_field_and_says_where() -> None:
    data = workload_data()
    del data["tensors"][1]["bytes"]
    refused(data, r"\$\.tensors\[1\].*'bytes'")


@pytest.mark.parametrize("value", ["4096", 4096.5, None, True, [4096]])
def test_refuses_a_wrong_type(value: object) -> None:
    data = workload_data()
    data["tensors"][0]["bytes"] = value
    refused(data, r"\$\.tensors\[0\]\.bytes")


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["a", 1], r"ops\[0\]\.reads\[1\]: expected str, found 1"),
        (["a", "b", None], r"reads\[2\]: expected str, found None"),
        (["a\ud800"], r"reads\[0\]: .* holds half a character"),
        ("ab", r"reads: expected a list, found 'ab'"),
        ({"a": "b"}, r"reads: expected a list, found dict"),
    ],
)
def test_what_is_no_text_in_a_list_of_texts_is_named(texts: object, message: str) -> None:
    data: Any = serial.to_json(WORKLOAD)
    data["ops"][0]["reads"] = texts
    with pytest.raises(FormatError, match=message):
        serial.from_json(Workload, data)


def test_texts_in_a_list_may_be_of_any_characters() -> None:
    data: Any = serial.to_json(WORKLOAD)
    data["ops"][0]["reads"] = ["w\u00e9", "\U0001f600"]
    assert serial.from_json(Workload, data).ops[0].reads == ("w\u00e9", "\U0001f600")


def test_refuses_an_unknown_kind() -> None:
    data = workload_data()
    data["tensors"][0]["kind"] = "wheel"
    refused(data, "'wheel' is not one of")


def test_words_of_a_literal_are_read_and_no_others() -> None:
    stages = Mapping[str, Literal["kept", "again"]]
    assert reader_of(stages)({"a": "again"}, ("$",)) == {"a": "again"}
    for word in ("else", 1, None):
        with pytest.raises(FormatError, match=r"\$\.a: .* is not one of \['kept', 'again'\]"):
            reader_of(stages)({"a": word}, ("$",))


@pytest.mark.parametrize("data", [None, [], "text", 3])
def test_refuses_what_is_no_object(data: object) -> None:
    refused(data, "expected an object")


def test_refuses_an_unknown_step() -> None:
    data: Any = serial.to_json(PLAN)
    data["steps"][0]["step"] = "teleport"
    with pytest.raises(FormatError, match="unknown step 'teleport'"):
        serial.from_json(Plan, data)


def test_digest_depends_on_every_value_and_on_no_order() -> None:
    assert serial.digest({"a": 1, "b": 2}) == serial.digest({"b": 2, "a": 1})
    assert serial.digest({"a": 1, "b": 2}) != serial.digest({"a": 1, "b": 3})


def test_load_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    with pytest.raises(StorageError, match=r"plan\.json"):
        serial.load(Plan, path)
    path.write_text("{")
    with pytest.raises(FormatError, match=r"plan\.json is not valid JSON"):
        serial.load(Plan, path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(FormatError, match="not a text file"):
        serial.load(Plan, path)


def test_write_atomic_replaces_whole_files(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file.json"
    serial.write_atomic(path, "old")
    serial.write_atomic(path, b"new")
    assert path.read_text() == "new"
    assert os.listdir(path.parent) == ["file.json"]


def test_outputs_are_written_to_what_is_at_their_path(tmp_path: Path) -> None:
    """A device or a pipe is not replaced by a file, nor is a link, and other users may read what they could before."""
    pipe, link, file, there = (tmp_path / n for n in ("pipe", "link", "file.json", "there.json"))
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    serial.write_output(pipe, "of a pipe")
    assert os.read(reader, 100) == b"of a pipe"
    os.close(reader)
    assert stat.S_ISFIFO(pipe.lstat().st_mode)
    link.symlink_to("there.json")
    serial.write_output(link, "new")  # to where nothing is yet
    serial.write_output(link, "newer")
    assert link.is_symlink() and there.read_text() == "newer"
    before = os.umask(0o027)
    try:
        serial.write_output(file, "new")
        serial.write_atomic(tmp_path / "own.json", "new")
    finally:
        os.umask(before)
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert stat.S_IMODE((tmp_path / "own.json").stat().st_mode) == 0o600
    file.chmod(0o604)
    serial.write_output(file, "newer")
    assert (file.read_text(), stat.S_IMODE(file.stat().st_mode)) == ("newer", 0o604)
    for path in (tmp_path, tmp_path / "a\0b"):
        with pytest.raises(StorageError, match="cannot write"):
            serial.write_output(path, "new")
    assert sorted(os.listdir(tmp_path)) == ["file.json", "link", "own.json", "pipe", "there.json"]


def test_write_atomic_keeps_the_old_file_when_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file.json"
    serial.write_atomic(path, "old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="No space left"):
        serial.write_atomic(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file.json"]


def test_plan_saves_and_loads(tmp_path: Path) -> None:
    PLAN.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == PLAN
