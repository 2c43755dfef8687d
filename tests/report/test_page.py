"""The report: what stands in it is the plan's, names are text, and a browser shows it without an error."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from gascompile.core.plan import Plan
from gascompile.core.reports import RunReport
from gascompile.core.steps import Compute, Recompute
from gascompile.cost_models.simulate.trace import trace
from gascompile.passes.explain.briefly import briefly
from gascompile.passes.explain.explain import TensorExplanation, explain
from gascompile.passes.explain.whatif import whatif
from gascompile.report.page import page
from tests.cost_models.hand_plans import streaming, training

_HOSTILE = "</script><img src=x onerror=alert(1)><!-- \u2028 & ${x} 'a' \"b\""
_RUN = RunReport(
    seconds=9.0,
    peak_bytes={"gpu": 3 << 20},
    link_bytes={"cpu->gpu": 5 << 20},
    stall_s=1.0,
    share_of_limit=0.5,
    paths={},
)
_BROWSER = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)


def data_of(text: str) -> Any:
    """Read the data of a page as a browser does: up to the first end of a script."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script', text, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def renamed(plan: Plan, old: str, new: str) -> Plan:
    """Return a plan of which one tensor has another name."""

    def name(given: str) -> str:
        return new if given == old else given

    work = plan.workload
    ops = tuple(
        replace(op, reads=tuple(map(name, op.reads)), writes=tuple(map(name, op.writes)))
        for op in work.ops
    )
    tensors = tuple(replace(t, name=name(t.name)) for t in work.tensors)
    steps = tuple(
        step if isinstance(step, Compute | Recompute) else replace(step, tensor=name(step.tensor))
        for step in plan.steps
    )
    return replace(
        plan,
        workload=replace(work, ops=ops, tensors=tensors),
        tensors={name(key): value for key, value in plan.tensors.items()},
        steps=steps,
    )


@pytest.mark.parametrize("plan", [streaming(), training()])
def test_a_page_holds_what_the_trace_holds(plan: Plan) -> None:
    found = trace(plan)
    data = data_of(page(plan, found))
    names = data["names"]
    ops = [
        (names[number], begun, lasts)
        for lane in data["lanes"]
        for begun, lasts, kind, number in lane["spans"]
        if kind in ("op", "recomputed")
    ]
    assert sorted(ops) == sorted(
        (plan.ops[s.op].name, s.begun_s * 1e6, (s.ended_s - s.begun_s) * 1e6) for s in found.ops
    )
    assert len(ops) >= sum(isinstance(step, Compute) for step in plan.steps)
    waited = sum(s[1] for lane in data["lanes"] for s in lane["spans"] if s[2] == "waiting")
    assert waited == pytest.approx(1e6 * sum(stall.time_s for stall in found.stalls))
    assert {names[row[0]]: row[2] for row in data["tensors"]} == {
        t.name: t.size_bytes for t in plan.workload.tensors
    }
    for tier in data["memory"]:
        totals = [sum(column) for column in zip(*tier["uses"].values(), strict=True)]
        assert max(totals) == found.memory[tier["tier"]].peak_bytes
    assert [bar[1] for bar in data["bars"]] == [
        plan.certificate.limit_s, plan.certificate.lower_bound_s, found.seconds,
    ]  # fmt: skip


@pytest.mark.parametrize("plan", [streaming(), streaming(0.5), training()])
def test_brief_reasons_agree_with_long_ones(plan: Plan) -> None:
    for brief in briefly(plan, trace(plan)):
        said = explain(plan, brief.name)
        assert isinstance(said, TensorExplanation)
        assert brief.home == said.home
        assert brief.stall_s == pytest.approx(said.stall_s)
        assert ("late" in brief.why) == (said.stall_s > 0)
        assert ("comes" in brief.why) == any(t.kind != "offload" for t in said.transfers)
        assert ("computed again" in brief.why) == ("computed again" in said.reason)


def test_a_name_is_text_whatever_it_holds() -> None:
    plan = training()
    text = page(renamed(plan, "a0", _HOSTILE), trace(renamed(plan, "a0", _HOSTILE)))
    assert _HOSTILE in data_of(text)["names"]

    seen: list[str] = []

    class Tags(HTMLParser):
        def handle_starttag(self, tag: str, attrs: object) -> None:
            seen.append(tag)

    Tags().feed(text)
    assert "canvas" in seen
    assert "img" not in seen
    assert text.count("</script") == page(plan, trace(plan)).count("</script")
    assert not re.search(r"""(src|href)\s*=|https?://|@import|url\(""", page(plan, trace(plan)))


def test_variants_and_a_run_stand_beside_the_prediction() -> None:
    plan = streaming()
    found = whatif(plan, time_limit_s=1.0)
    data = data_of(page(plan, trace(plan), whatif=found, run=_RUN, num_explained=2))
    assert len(data["whatif"]) == len(found.variants) > 0
    assert data["bars"][-1][:2] == ["measured", 9.0]
    rows = {row[0]: row[1:] for row in data["run"]}
    assert rows["one iteration"][1] == "9 s"
    assert rows["moved over cpu->gpu"][1] == "5.00 MiB"
    briefs = [brief.why for brief in briefly(plan, trace(plan))]
    assert sum(row[6] not in briefs for row in data["tensors"]) == 2


@pytest.mark.skipif(_BROWSER is None, reason="needs Chromium")
def test_a_browser_shows_it(tmp_path: Path) -> None:
    assert _BROWSER is not None
    plan = renamed(training(), "a0", _HOSTILE)
    path = tmp_path / "plan.html"
    path.write_text(page(plan, trace(plan), run=_RUN, num_explained=1), encoding="utf-8")
    done = subprocess.run(
        [_BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
         f"--user-data-dir={tmp_path / 'browser'}", "--virtual-time-budget=2000", "--dump-dom", path.as_uri()],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert "CONSOLE" not in done.stderr, done.stderr
    body = done.stdout.split("<body>")[1].split('<script type="application/json"')[0]
    assert body.count("<tr>") >= len(plan.workload.tensors)
    assert "&lt;/script&gt;&lt;img src=x" in body
    assert "<img" not in body
    assert "Predicted and measured" in body
