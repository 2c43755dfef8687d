"""Places of any name: machines that list them, the format of before, and budgets over them."""

from __future__ import annotations

import copy
import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import gascompile
from gascompile import Budget
from gascompile.cli import app
from gascompile.core import serial
from gascompile.core.checks.machine_files import load_machine, preset
from gascompile.core.errors import UnknownPlaceError, UnsupportedOpError
from gascompile.core.machine import Link, Machine, Place, PlaceKind, kind_by_name
from gascompile.core.workload import OpSpec, TensorKind, TensorSpec, Workload
from gascompile.machines.admission import admit
from gascompile.passes.verify.walk import verify

OLDER = Path(__file__).parent / "older"
TWO_DRIVES = Machine(
    name="two drives",
    places=(
        Place.named("r0.gpu", 1 << 20),
        Place.named("h0.cpu", 1 << 16),
        Place.named("h0.nvme0", 1 << 30),
        Place.named("h0.nvme1", 1 << 30),
    ),
    links=tuple(
        Link(source_tier=name, target_tier="r0.gpu", bandwidth_bytes_per_s=rate)
        for name, rate in (("h0.cpu", 4e6), ("h0.nvme0", 1e6), ("h0.nvme1", 2e6))
    ),
)


def chain(count: int, size_bytes: int) -> Workload:
    """Return ops that read a weight each."""
    tensors = [
        TensorSpec(name=f"w{i}", size_bytes=size_bytes, kind=TensorKind.WEIGHT)
        for i in range(count)
    ]
    ops = [OpSpec(name=f"op{i}", time_s={"r0.gpu": 0.01}, reads=(f"w{i}",)) for i in range(count)]
    return Workload(name="chain", repeats=True, tensors=tuple(tensors), ops=tuple(ops))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("gpu", PlaceKind.GPU), ("r12.gpu", PlaceKind.GPU), ("h0.nvme0", PlaceKind.NVME), ("cpu1", PlaceKind.CPU),
        ("pool", None), ("gpu.pool", None), ("", None), ("0", None), ("other", PlaceKind.OTHER),
    ],
)  # fmt: skip
def test_a_name_says_the_kind(name: str, kind: PlaceKind | None) -> None:
    assert kind_by_name(name) is kind
    if kind is None:
        with pytest.raises(ValueError, match="says no kind of memory"):
            Place.named(name, 1)


def one_of(machine: Any) -> Any:
    """Write a machine of today as ``gascompile.machine/1`` had it, from its JSON alone."""
    data = copy.deepcopy(machine)
    data["format"] = "gascompile.machine/1"
    data["tiers"] = {
        place["name"]: {"bytes": place["bytes"], "source": place["source"]}
        for place in data.pop("places")
    }
    return data


def test_a_machine_of_before_is_read() -> None:
    """The file was written by the version before places were a list."""
    data = json.loads((OLDER / "machine.json").read_text())
    assert data["format"] == "gascompile.machine/1"
    machine = load_machine(OLDER / "machine.json")
    assert one_of(serial.to_json(machine)) == data
    assert machine.compute_tier == "gpu"
    assert {name: place.kind for name, place in machine.tiers.items()} == {
        "gpu": "gpu",
        "cpu": "cpu",
        "nvme": "nvme",
    }


@given(
    st.dictionaries(
        st.sampled_from(("gpu", "cpu", "nvme", "pool", "h0.nvme0", "gpu1")), st.integers(0, 1 << 60)
    ),
    st.sampled_from(("t4-gen3", "cpu-nvme")),
)
def test_machines_of_both_formats_say_the_same(sizes: dict[str, int], base: str) -> None:
    """Of the format before, ``gpu``, ``cpu`` and ``nvme`` alone had a meaning."""
    known = {"gpu", "cpu", "nvme"}
    places = tuple(
        Place(
            name=name,
            kind=PlaceKind(name if name in known else "other"),
            size_bytes=size,
            source="",
        )
        for name, size in sizes.items()
    )
    # That format had no energy.
    machine = replace(preset(base), places=places, energy=None)
    data = serial.to_json(machine)
    assert serial.from_json(Machine, data) == machine
    assert serial.from_json(Machine, one_of(data)) == machine


def test_budgets_name_any_place() -> None:
    budget = Budget({"h0.nvme0": "1MB", "h0.nvme1": None}, gpu=None)
    assert budget.limits_bytes(TWO_DRIVES) == {
        "r0.gpu": 1 << 20,
        "h0.cpu": 1 << 16,
        "h0.nvme0": 10**6,
        "h0.nvme1": 1 << 30,
    }
    keywords = Budget(gpu="24GiB", cpu=5)
    assert keywords == Budget({"cpu": 5, "gpu": "24GiB"}) == Budget({"cpu": 5}, gpu="24GiB")
    assert hash(keywords) == hash(Budget(cpu=5, gpu="24GiB"))
    assert (keywords.gpu, keywords.cpu, keywords.nvme) == ("24GiB", 5, None)
    assert Budget.of("1KiB", TWO_DRIVES) == Budget({"r0.gpu": 1024})
    assert keywords.with_size("cpu", 6) == Budget(gpu="24GiB", cpu=6)
    assert eval(repr(keywords)) == keywords


def test_a_budget_of_a_place_that_is_not_there() -> None:
    with pytest.raises(
        UnknownPlaceError, match=r"names 'tape'.*places are r0.gpu, h0.cpu"
    ) as raised:
        gascompile.plan(chain(2, 4096), Budget({"tape": 1}), TWO_DRIVES)
    assert (raised.value.place, raised.value.known[0]) == ("tape", "r0.gpu")
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)
    with pytest.raises(ValueError, match="'gpu' is given twice"):
        Budget({"gpu": 1}, gpu=1)
    with pytest.raises(ValueError, match="takes sizes by place"):
        Budget("8GiB")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cannot read the size"):
        Budget({"h0.cpu": "much"}).limits_bytes(TWO_DRIVES)


def test_a_plan_over_places_of_any_name(tmp_path: Path) -> None:
    """Four weights of 99 pages, two of which fit: the other two lie on the faster places that have room."""
    size = 99 * 4096
    budget = Budget({"r0.gpu": 200 * 4096, "h0.cpu": 0, "h0.nvme1": 3 * size})
    plan = gascompile.plan(chain(4, size), budget, TWO_DRIVES)
    verify(plan)
    assert plan.peak_bytes["r0.gpu"] <= 200 * 4096
    assert plan.peak_bytes["h0.cpu"] == 0
    assert plan.peak_bytes["h0.nvme1"] <= 3 * size
    streamed = [tensor.home for tensor in plan.tensors.values() if tensor.home != "r0.gpu"]
    assert streamed
    assert plan.link_bytes["h0.nvme1->r0.gpu"] == size * streamed.count("h0.nvme1")
    plan.save(tmp_path / "plan.json")
    assert gascompile.Plan.load(tmp_path / "plan.json") == plan
    with pytest.raises(
        UnsupportedOpError, match=r"'r0.gpu'.*run only on places called gpu, cpu and nvme"
    ):
        admit(plan.machine)


def verb(*args: str) -> Any:
    return CliRunner().invoke(app, [*args, "--json"])


def test_places_on_the_command_line(tmp_path: Path) -> None:
    machine, workload = tmp_path / "two.json", tmp_path / "chain.workload.json"
    machine.write_text(serial.dumps(TWO_DRIVES))
    workload.write_text(serial.dumps(chain(4, 99 * 4096)))
    asked = ["plan", str(workload), "-m", str(machine), "--budget", "800KiB", "--place"]
    done = verb(*asked, "h0.cpu=0", "--place", "h0.nvme1=1GB")
    assert done.exit_code == 0, done.output
    plan = serial.from_json(gascompile.Plan, json.loads(done.stdout))
    verify(plan)
    assert dict(plan.budget_bytes) == {
        "r0.gpu": 800 << 10,
        "h0.cpu": 0,
        "h0.nvme0": 1 << 30,
        "h0.nvme1": 10**9,
    }
    for place, code, message in (
        ("tape=1GB", 1, "its places are r0.gpu, h0.cpu"),
        ("r0.gpu=1GB", 2, "--budget and --place both set"),
        ("h0.cpu", 2, "takes NAME=SIZE"),
        ("h0.cpu=much", 2, "cannot read the size"),
    ):
        done = verb(*asked, place)
        assert (done.exit_code, message in done.output) == (code, True), done.output
