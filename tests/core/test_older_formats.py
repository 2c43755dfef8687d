"""Plans of ``gascompile.plan/1``, written by the version that had it: read as what they are, or refused.

``older/expected.json`` holds what that version said of them: seconds of the replay, peaks, bytes per link. What they
are in today's format is said here once more, from JSON to JSON.
"""

from __future__ import annotations

import copy
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import gascompile
from gascompile import Plan
from gascompile.capture.fingerprint.fingerprint import versions
from gascompile.cli import app
from gascompile.core import serial
from gascompile.core.checks.plan import check_plan_content
from gascompile.core.errors import FormatError, GASCompileError, PlanVerificationError
from gascompile.core.plan import LinkAccount, PlaceAccount
from gascompile.core.steps import Compute, Offload, Prefetch, Recompute, Release, Reload, Step, Wait
from gascompile.cost_models.simulate.replay import replay_plan
from gascompile.passes.verify.walk import verify
from tests.core.test_places import OLDER

EXPECTED: dict[str, Any] = json.loads((OLDER / "expected.json").read_text())
PLANS = sorted(EXPECTED)
_TAGS = {
    "compute": "run", "recompute": "run", "prefetch": "load", "reload": "load", "offload": "store",
    "wait": "wait", "release": "free",
}  # fmt: skip
_EMPTY_LEFT_OUT = ("splits", "gather_tier", "gathers", "patches")
"""Of ops, which files named before where they were empty, too."""


def data_of(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((OLDER / name).read_text())
    assert data["format"] == "gascompile.plan/1"
    return data


def two_of(one: dict[str, Any]) -> dict[str, Any]:
    """Say in ``gascompile.plan/2`` what JSON of ``gascompile.plan/1`` says."""
    data = copy.deepcopy(one)
    data["format"] = "gascompile.plan/2"
    machine = data["machine"]
    machine["format"] = "gascompile.machine/2"
    tiers = machine.pop("tiers")
    machine["places"] = [{"name": name, "kind": name, **tier} for name, tier in tiers.items()]
    numbers = {field: data.pop(field) for field in ("budget_bytes", "arena_bytes", "peak_bytes")}
    reserved, host = data.pop("reserved_bytes", 0), data.pop("host_bytes", 0)
    places = []
    for name in tiers:
        place = {field: given[name] for field, given in numbers.items() if name in given}
        is_site = name == ("gpu" if "gpu" in tiers else "cpu")
        place |= {"name": name, "reserved_bytes": reserved if is_site else 0}
        places.append({**place, "beside_bytes": host if name == "cpu" else 0})
    data["places"] = places
    data["links"] = [{"name": n, "bytes": b} for n, b in data.pop("link_bytes").items()]
    for step in data["steps"]:
        if "source" in step:
            step["again"] = step.pop("source")
        if step.get("address", 0) is None:
            del step["address"]
        step["step"] = _TAGS[step["step"]]
    for op in data["workload"]["ops"]:
        for field in _EMPTY_LEFT_OUT:
            if not op.get(field):
                op.pop(field, None)
    return data


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_of_before_is_what_it_was(name: str, tmp_path: Path) -> None:
    was, plan = EXPECTED[name], Plan.load(OLDER / name)
    verify(plan)
    assert replay_plan(plan).seconds == was["seconds"]
    assert dict(plan.peak_bytes) == was["peak_bytes"]
    assert dict(plan.link_bytes) == was["link_bytes"]
    today = two_of(data_of(name))
    assert serial.to_json(plan) == today
    plan.save(tmp_path / "plan.json")
    assert json.loads((tmp_path / "plan.json").read_text()) == today
    assert Plan.load(tmp_path / "plan.json") == plan


def test_the_files_hold_every_step_of_before() -> None:
    steps = [step for name in PLANS for step in data_of(name)["steps"]]
    assert {step["step"] for step in steps} == set(_TAGS)


def verdict(data: dict[str, Any]) -> str:
    """Return what becomes of a plan's JSON: how it was refused, or how long it takes."""
    try:
        plan = serial.from_json(Plan, data)
        check_plan_content(plan, where="$")
        verify(plan)
    except PlanVerificationError as error:
        return f"refused: {error}"
    except FormatError:
        return "no plan"
    return f"{replay_plan(plan).seconds}"


@settings(max_examples=150)
@given(st.sampled_from(PLANS), st.integers(0, 2**32))
def test_damaged_plans_meet_the_same_verdict_in_both_formats(name: str, seed: int) -> None:
    """A step is dropped, doubled, moved or changed, or a number of the accounts is."""
    chance, data = random.Random(seed), data_of(name)
    steps = data["steps"]
    i = chance.randrange(len(steps))
    match chance.choice(("drop", "double", "swap", "number", "account", "reserve", "none")):
        case "drop":
            del steps[i]
        case "double":
            steps.insert(i, copy.deepcopy(steps[i]))
        case "swap":
            j = chance.randrange(len(steps))
            steps[i], steps[j] = steps[j], steps[i]
        case "number":
            key = chance.choice([k for k, value in steps[i].items() if isinstance(value, int)])
            steps[i][key] += chance.choice((-4096, -1, 1, 4096))
        case "account":
            field = chance.choice(("budget_bytes", "arena_bytes", "peak_bytes", "link_bytes"))
            key = chance.choice(list(data[field]))
            data[field][key] += chance.choice((-4096, -1, 1, 4096))
        case "reserve":
            data["reserved_bytes"] = chance.choice((-1, 1, 1 << 40))
    found = verdict(data)
    assert found == verdict(two_of(data))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("format", "gascompile.plan/3", "knows the format 'gascompile.plan/2', the data says 'gascompile.plan/3'"),
        ("format", "gascompile.machine/1", "the data says 'gascompile.machine/1'"),
        ("format", None, "the data says None"),
        ("places", [], "unknown field 'places' in PlanOne"),
        ("colour", "red", "unknown field 'colour' in PlanOne"),
        ("steps", [{"step": "run", "op": 0}], "unknown step 'run'"),
        ("steps", [{"step": "compute", "op": 0, "again": 1}], "unknown field 'again' in ComputeOne"),
        ("host_bytes", "1", "expected int"),
    ],
)  # fmt: skip
def test_what_is_neither_format_is_refused(
    tmp_path: Path, field: str, value: Any, message: str
) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({**data_of("streams.plan.json"), field: value}))
    with pytest.raises(FormatError, match=message):
        Plan.load(path)


def test_an_address_that_no_plan_had_is_refused() -> None:
    data = data_of("again.plan.json")
    step = next(step for step in data["steps"] if step["step"] == "offload")
    step["address"] = 0
    with pytest.raises(FormatError, match="out of the arena at 0"):
        serial.from_json(Plan, data)


# ---------------------------------------------------------------- today's format

_NUMBERS = st.integers(0, 1 << 60)
_NAMES = st.sampled_from(("a", "b[0:8]", "%c"))
_LINKS = st.sampled_from(("cpu->gpu", "h0.nvme1->r0.gpu"))
STEPS: tuple[st.SearchStrategy[Step], ...] = (
    st.builds(Compute, op=_NUMBERS),
    st.builds(Recompute, op=_NUMBERS, source=_NUMBERS),
    st.builds(
        Prefetch, op=_NUMBERS, tensor=_NAMES, link=_LINKS, size_bytes=_NUMBERS, address=_NUMBERS
    ),
    st.builds(Reload, op=_NUMBERS, tensor=_NAMES, link=_LINKS, size_bytes=_NUMBERS),
    st.builds(Offload, op=_NUMBERS, tensor=_NAMES, link=_LINKS, size_bytes=_NUMBERS),
    st.builds(Wait, op=_NUMBERS, tensor=_NAMES, address=st.none() | _NUMBERS),
    st.builds(Release, op=_NUMBERS, tensor=_NAMES, address=st.none() | _NUMBERS),
)
ACCOUNTS = st.builds(
    PlaceAccount,
    name=st.sampled_from(("gpu", "cpu", "r0.gpu", "h0.nvme1")),
    budget_bytes=st.none() | _NUMBERS,
    arena_bytes=st.none() | _NUMBERS,
    peak_bytes=st.none() | _NUMBERS,
    reserved_bytes=_NUMBERS,
    beside_bytes=_NUMBERS,
)


@given(
    st.lists(st.one_of(STEPS)),
    st.lists(ACCOUNTS, unique_by=lambda account: account.name),
    st.lists(st.builds(LinkAccount, name=_LINKS, moved_bytes=_NUMBERS), unique_by=lambda x: x.name),
)
def test_whatever_is_written_is_read_back(
    steps: list[Step], places: list[PlaceAccount], links: list[LinkAccount]
) -> None:
    data: Any = two_of(data_of("two.plan.json"))
    data["steps"] = serial.to_json(steps)
    data["places"], data["links"] = serial.to_json(places), serial.to_json(links)
    plan = serial.from_json(Plan, json.loads(json.dumps(data)))
    assert (list(plan.steps), list(plan.places), list(plan.links)) == (steps, places, links)
    assert serial.to_json(plan) == data
    # By hand, what a place's account says under the names of before.
    assert plan.peak_bytes == {
        p["name"]: p["peak_bytes"] for p in data["places"] if "peak_bytes" in p
    }
    assert plan.budget_bytes == {
        p["name"]: p["budget_bytes"] for p in data["places"] if "budget_bytes" in p
    }
    again = plan.with_accounts(
        budget_bytes=plan.budget_bytes, peak_bytes=plan.peak_bytes, link_bytes=plan.link_bytes
    )
    assert again.with_accounts(link_bytes={}).links == ()
    by_name = {place.name: place for place in again.places}
    assert all(by_name.get(p.name, PlaceAccount(name=p.name)) == p for p in places)


def test_two_accounts_of_one_place_are_refused(tmp_path: Path) -> None:
    plan = Plan.load(OLDER / "two.plan.json")
    for field in ("places", "links"):
        data: Any = serial.to_json(plan)
        data[field].append(data[field][0])
        path = tmp_path / "plan.json"
        path.write_text(json.dumps(data))
        with pytest.raises(FormatError, match=rf"{field}\[\d\].name: .* has two accounts"):
            Plan.load(path)
        with pytest.raises(PlanVerificationError, match="has two accounts"):
            verify(serial.from_json(Plan, data))


# ---------------------------------------------------------------- bundles and verbs


def test_a_bundle_of_before_runs(tmp_path: Path) -> None:
    """Its outputs were eager's when it was saved; its weights lie in it. Versions are as if they had stayed."""
    folder = Path(shutil.copytree(OLDER / "bundle", tmp_path / "bundle"))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["versions"] = versions()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    wanted = json.loads((OLDER / "y.json").read_text())["y"]
    x = torch.arange(64, dtype=torch.float32).reshape(2, 32) / 32
    with gascompile.load(folder, any_machine=True, cache_dir=tmp_path) as compiled:
        torch.testing.assert_close(compiled(x), torch.tensor(wanted))
        assert compiled.plan.steps == Plan.load(OLDER / "bundle" / "plan.json").steps


def json_of(*args: str) -> Any:
    result = CliRunner().invoke(app, [*args, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize(
    "name", ["again.plan.json", "streams.plan.json", "step/update-1/plan.json"]
)
def test_verbs_say_the_same_of_both_formats(name: str, tmp_path: Path) -> None:
    one, two = str(OLDER / name), str(tmp_path / "two.json")
    Path(two).write_text(json.dumps(two_of(data_of(name))))
    tensor = next(step["tensor"] for step in data_of(name)["steps"] if "tensor" in step)
    for verb in (["verify"], ["simulate"], ["explain", tensor]):
        first, *rest = verb
        assert json_of(first, one, *rest) == json_of(first, two, *rest), verb
    assert not json_of("diff", one, two)["moves"]


def test_a_plan_of_before_is_reported(tmp_path: Path) -> None:
    """The quickest of them, as a report plans nine times what the plan was made from."""
    one = str(OLDER / "streams.plan.json")
    result = CliRunner().invoke(app, ["report", one, "-o", str(tmp_path / "one.html")])
    assert result.exit_code == 0, result.output


def test_a_plan_of_a_step_of_before_is_looked_at_as_a_bundle() -> None:
    folder = str(OLDER / "step" / "update-1")
    assert json_of("verify", folder)["ok"]
    with pytest.raises(GASCompileError):
        gascompile.load(folder)
