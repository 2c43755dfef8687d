"""The trace file: tracks, slices that do not overlap, counters, arrows; the picture: what it shows."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from gascompile.core.errors import GASCompileError
from gascompile.core.plan import Plan
from gascompile.core.sizes import MIB, reserve_bytes
from gascompile.cost_models.simulate.trace import trace
from gascompile.report.perfetto import perfetto
from gascompile.report.picture import picture
from tests.cost_models.hand_plans import MB, streaming, training


def _events(plan: Plan, phase: str) -> list[dict[str, Any]]:
    return [e for e in perfetto(plan, trace(plan))["traceEvents"] if e["ph"] == phase]


def test_every_track_has_a_name() -> None:
    plan = training()
    named = {
        (event["pid"], event.get("tid")): event["args"]["name"]
        for event in _events(plan, "M")
        if event["name"].endswith("_name")
    }
    assert set(named.values()) == {"devices", "links", "memory", "gpu", "cpu->gpu", "gpu->cpu"}
    assert {(e["pid"], e["tid"]) for e in _events(plan, "X")} <= set(named)
    assert {event["name"] for event in _events(plan, "C")} == {"gpu (MiB)", "cpu (MiB)"}


@pytest.mark.parametrize("plan", [streaming(), streaming(0.5), training()])
def test_slices_of_a_track_do_not_overlap(plan: Plan) -> None:
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in _events(plan, "X"):
        span = (event["ts"], event["ts"] + event["dur"])
        tracks.setdefault((event["pid"], event["tid"]), []).append(span)
    end = trace(plan).seconds * 1e6
    for spans in tracks.values():
        assert all(a[1] <= b[0] + 1e-3 for a, b in pairwise(sorted(spans)))
        assert min(spans)[0] >= 0
        assert max(end for _, end in spans) <= end + 1e-3
    # Ops and waits fill the iteration.
    assert sum(b - a for a, b in tracks[1, 1]) == pytest.approx(end)


def test_slices_say_what_happens() -> None:
    slices = {event["name"]: event for event in _events(training(), "X")}
    assert slices["op1 (again)"]["ts"] == 8e6
    assert slices["offload a0"]["dur"] == 2e6
    assert slices["reload a0"]["args"]["needed by"] == "op3"
    wait = slices["wait for a0"]
    assert (wait["ts"], wait["dur"]) == (6e6, 2e6)
    assert wait["args"] == {
        "tensor": "a0", "link": "cpu->gpu", "cause": "memory", "blocker": "a1",
    }  # fmt: skip


def test_counters_and_arrows() -> None:
    counters = [e for e in _events(streaming(), "C") if e["name"] == "gpu (MiB)"]
    levels = {event["ts"]: event["args"]["streamed weights"] for event in counters}
    assert levels[0.0] == round(reserve_bytes(4 * MB) / MIB, 3)
    assert levels[5e6] == round(reserve_bytes(2 * MB) / MIB, 3)
    starts, ends = _events(streaming(), "s"), _events(streaming(), "f")
    assert [event["id"] for event in starts] == [event["id"] for event in ends]
    assert [event["ts"] for event in ends] == [4e6, 7e6]


def _texts(plan: Plan, path: Path) -> str:
    picture(plan, trace(plan), path)
    root = ElementTree.parse(path).getroot()
    return "\n".join(t for t in root.itertext() if t.strip())


def test_a_picture_names_what_it_shows(tmp_path: Path) -> None:
    text = _texts(training(), tmp_path / "plan.svg")
    for word in (
        "hand on hand: 16 s per iteration, 2 s of it waiting (12%)", "gpu computes", "cpu->gpu, 12% busy",
        "recomputed", "offload", "reload", "waiting because of: memory 2 s", "op5", "states",
        "activations", "time in one iteration (s)", "gpu memory: at most 8.58 MiB of 1.00 GiB",
    ):  # fmt: skip
        assert word in text
    assert "prefetch" not in text


def test_a_picture_is_written_as_its_suffix_says(tmp_path: Path) -> None:
    plan = streaming()
    path = tmp_path / "plan.png"
    picture(plan, trace(plan), path)
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match=r"\.png or \.svg"):
        picture(plan, trace(plan), tmp_path / "plan.gif")
    with pytest.raises(GASCompileError, match="choose another folder"):
        picture(plan, trace(plan), tmp_path / "absent" / "plan.png")


def test_the_same_plan_gives_the_same_picture(tmp_path: Path) -> None:
    first, second = _texts(streaming(), tmp_path / "a.svg"), _texts(streaming(), tmp_path / "b.svg")
    assert first == second
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_without_matplotlib_the_way_out_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(GASCompileError, match=r"pip install 'gascompile\[plot\]'"):
        picture(streaming(), trace(streaming()), tmp_path / "plan.png")
