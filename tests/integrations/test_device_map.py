"""Device maps as plans: times by hand, names that do not fit, and the way through the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from gascompile.cli import app
from gascompile.core import serial
from gascompile.core.budget import Budget
from gascompile.core.errors import DeviceMapError, FormatError, InfeasiblePlanError
from gascompile.core.machine import Machine
from gascompile.core.sizes import GIB, reserve_bytes
from gascompile.core.steps import Compute, Prefetch, Wait
from gascompile.core.workload import OpSpec, Workload
from gascompile.integrations.device_map import device_map_plan, read_device_map, tiers_of
from gascompile.passes.plan.make_plan import make_plan
from tests.passes.planning import (
    UNIT,
    cpu_machine,
    gpu_machine,
    machines,
    weight,
    workload,
    workloads,
)

ROOM = reserve_bytes(UNIT)


def _layers(*names: str) -> Workload:
    """Return one op of 1 s per weight."""
    ops = tuple(OpSpec(name=f"op{i}", time_s={"gpu": 1.0}, reads=(n,)) for i, n in enumerate(names))
    tensors = tuple(weight(name) for name in names)
    return Workload(name="layers", repeats=True, tensors=tensors, ops=ops)


def test_nothing_is_loaded_ahead() -> None:
    # a and b stay; c comes in half a second from RAM, d in one from the drive, each in front of its op.
    plan = device_map_plan(
        {"a": 0, "b": "cuda:0", "c": "cpu", "d": "disk"}, workload("abcd"), gpu_machine()
    )
    assert plan.strategy == "device_map"
    assert {name: t.home for name, t in plan.tensors.items()} == {
        "a": "gpu", "b": "gpu", "c": "cpu", "d": "nvme",
    }  # fmt: skip
    assert plan.certificate.predicted_s == pytest.approx(4 + 0.5 + 1)
    assert plan.peak_bytes["gpu"] == 3 * ROOM
    assert plan.link_bytes == {"cpu->gpu": UNIT, "nvme->gpu": UNIT}
    kinds = [type(s) for s in plan.steps if s.op in (2, 3) and not isinstance(s, Compute)]
    assert kinds.count(Prefetch) == kinds.count(Wait) == 2
    for step in plan.steps:
        if isinstance(step, Prefetch):
            assert [
                s.op for s in plan.steps if isinstance(s, Wait) and s.tensor == step.tensor
            ] == [step.op]


def test_weights_of_one_op_lie_side_by_side_and_every_use_loads_again() -> None:
    plan = device_map_plan({"": "disk"}, workload(["ab", "a"]), cpu_machine())
    assert plan.certificate.predicted_s == pytest.approx(2 + 2 + 1)
    assert plan.peak_bytes["cpu"] == 2 * ROOM


def test_the_longest_prefix_counts_and_whole_names_match() -> None:
    task = _layers("m.l.1.w", "m.l.10.w", "m.head.w")
    tiers = tiers_of({"": "disk", "m.l": "cpu", "m.l.1": 0}, task, gpu_machine())
    assert tiers == {"m.l.1.w": "gpu", "m.l.10.w": "cpu", "m.head.w": "nvme"}


@pytest.mark.parametrize(
    ("device_map", "names", "words"),
    [
        ({"": 0, "m.l.2": "cpu"}, ("m.l.2",), "no weight or module"),
        ({"m.l.1": 0}, ("m.l.10.w",), "says nothing about 'm.l.10.w'"),
        ({"": "tpu"}, ("",), "known are"),
        ({"": 1}, ("",), "known are"),
    ],
)
def test_names_that_do_not_fit(
    device_map: dict[str, int | str], names: tuple[str, ...], words: str
) -> None:
    with pytest.raises(DeviceMapError, match=words) as caught:
        device_map_plan(device_map, _layers("m.l.1.w", "m.l.10.w"), gpu_machine())
    assert caught.value.names == names


def test_a_module_without_weights_may_be_named() -> None:
    task = _layers("m.w")
    assert tiers_of({"m": 0, "m.act": 0}, task, gpu_machine(), modules={"m.act"}) == {"m.w": "gpu"}


def test_maps_that_do_not_fit() -> None:
    with pytest.raises(InfeasiblePlanError) as caught:
        device_map_plan({"a": 0, "": "disk"}, workload("ab"), gpu_machine(), 2 * ROOM - 1)
    assert caught.value.required_bytes == 2 * ROOM
    device_map_plan({"a": 0, "": "disk"}, workload("ab"), gpu_machine(), 2 * ROOM)
    with pytest.raises(DeviceMapError, match="may hold") as refused:
        device_map_plan({"": "cpu"}, workload("ab"), gpu_machine(cpu_bytes=UNIT))
    assert set(refused.value.names) == {"a", "b"}
    machine = gpu_machine()
    places = tuple(place for place in machine.places if place.name != "nvme")
    bare = Machine(name="bare", places=places, links=machine.links[:1])
    with pytest.raises(DeviceMapError, match="no tier 'nvme'"):
        device_map_plan({"": "disk"}, workload("ab"), bare)


@settings(max_examples=25, deadline=None)
@given(task=workloads(), on=machines(), seed=st.integers(0, 2**20))
def test_no_map_beats_the_planner(task: Workload, on: Machine, seed: int) -> None:
    slow = sorted({link.source_tier for link in on.links})
    devices = ["0", *("disk" if tier == "nvme" else tier for tier in slow)]
    names = [t.name for t in task.tensors if t.kind == "weight"]
    mapping: dict[str, int | str] = {
        n: devices[(seed >> i) % len(devices)] for i, n in enumerate(names)
    }
    try:
        mapped = device_map_plan(mapping, task, on, GIB)
    except DeviceMapError:
        assert any(tier != "nvme" for tier in slow)
        return
    site = on.compute_tier
    best = make_plan(
        task, on, Budget.of(mapped.peak_bytes[site], on), fingerprint={}, time_limit_s=1.0
    )
    assert best.certificate.predicted_s <= mapped.certificate.predicted_s * (1 + 1e-9)


def test_files_are_read_and_refused(tmp_path: Path) -> None:
    path = tmp_path / "map.json"
    path.write_text('{"": 0, "m": "cpu"}')
    assert read_device_map(path) == {"": 0, "m": "cpu"}
    for text in ("[]", "{}", '{"": null}', '{"": true}'):
        path.write_text(text)
        with pytest.raises(FormatError):
            read_device_map(path)


def _cli(*args: str) -> Any:
    result = CliRunner().invoke(app, [*args, "--json"], catch_exceptions=False)
    return result.exit_code, json.loads(result.stdout)


def test_through_the_command_line(tmp_path: Path) -> None:
    source, mapping = tmp_path / "toy.workload.json", tmp_path / "map.json"
    serial.write_atomic(source, serial.dumps(workload("abcd")))
    mapping.write_text('{"a": 0, "b": 0, "": "disk"}')
    args = ("plan", str(source), "-m", "rtx4090-gen4", "--device-map", str(mapping))
    code, data = _cli(*args)
    assert (code, data["strategy"]) == (0, "device_map")
    assert data["tensors"]["d"]["home"] == "nvme"
    assert _cli(*args, "--strategy", "first_fit")[0] == 2
    mapping.write_text('{"a": 0, "nothing": "cpu", "": "disk"}')
    code, data = _cli(*args)
    assert (code, data["error"]["type"], data["error"]["names"]) == (
        1,
        "DeviceMapError",
        ["nothing"],
    )


def test_a_map_of_a_captured_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mapped_model.py").write_text(
        "import torch\n"
        "def make():\n"
        "    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))\n"
        "    return model.eval(), (torch.randn(2, 64),)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    plan = device_map_plan({"0": 0, "1": 0, "2": "disk"}, "mapped_model:make", "cpu-nvme")
    homes = {name: tensor.home for name, tensor in plan.tensors.items() if tensor.kind == "weight"}
    assert homes == {"0.weight": "cpu", "0.bias": "cpu", "2.weight": "nvme", "2.bias": "nvme"}
