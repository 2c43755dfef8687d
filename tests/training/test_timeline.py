"""A recorded step beside the planned one: every op once, the plan's bytes, memory up to the reported peak."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from gascompile.core.errors import PlanMismatchError
from gascompile.core.steps import Compute, Offload, Recompute, Reload
from gascompile.report.picture import picture_of_several
from gascompile.runtime.run.recording import Recording
from gascompile.training.timeline import RecordedStep, measured_trace, record
from tests.training.runs import adamw, batches, compiled, new_model


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[RecordedStep, Any, list[float]]:
    """Return the third step recorded, the report of that run, and the losses of all steps."""
    model = new_model().train()
    folder = tmp_path_factory.mktemp("timeline")
    torch.manual_seed(0)
    with compiled(model, adamw(model), folder) as step:
        first, second, third, fourth = batches(4)
        losses = [float(step(first)), float(step(second))]
        found = record(step, third)
        report = step.last_run
        assert step.recording is None
        assert step.graph_module is not None
        code = step.graph_module.code
        losses += [float(found.loss), float(step(fourth))]
    # The schedule as code: a call for each move of the plan.
    for kind, called in ((Offload, "offload("), (Reload, "reload(")):
        assert code.count(called) == sum(isinstance(s, kind) for s in found.plan.steps) > 0
    return found, report, losses


def test_every_op_is_there_once_and_in_order(
    recorded: tuple[RecordedStep, Any, list[float]],
) -> None:
    found, _, _ = recorded
    expected = [
        (step.op if isinstance(step, Compute) else step.source, isinstance(step, Recompute))
        for step in found.plan.steps
        if isinstance(step, (Compute, Recompute))
    ]
    spans = found.measured.ops
    assert [(span.op, span.recomputed) for span in spans] == expected
    assert [n for n, again in expected if not again] == list(range(len(found.plan.ops)))
    assert all(span.begun_s <= span.ended_s for span in spans)
    assert all(a.ended_s <= b.begun_s for a, b in pairwise(spans))
    assert spans[0].begun_s >= 0 and spans[-1].ended_s <= found.measured.seconds


def test_transfers_carry_the_bytes_of_the_plan(
    recorded: tuple[RecordedStep, Any, list[float]],
) -> None:
    found, report, _ = recorded
    assert found.measured.link_bytes == report.link_bytes == found.predicted.link_bytes
    steps = [step for step in found.plan.steps if isinstance(step, (Offload, Reload))]
    issued = sorted((s.tensor, s.link, s.size_bytes) for s in steps)
    for shown in (found.measured, found.predicted):
        # A steady step waits for as many transfers of the one before as it leaves to the next.
        counted = sorted((t.tensor, t.link, t.size_bytes) for t in shown.transfers)
        assert set(counted) == set(issued)
    for transfer in found.measured.transfers:
        assert transfer.issued_s <= transfer.begun_s < transfer.arrived_s
    for link in found.measured.link_bytes:
        on_link = [t for t in found.measured.transfers if t.link == link and t.begun_s >= 0]
        assert 0 < found.measured.link_busy_s[link] <= 2 * found.measured.seconds, on_link


def test_memory_reaches_the_reported_peak_and_no_more(
    recorded: tuple[RecordedStep, Any, list[float]],
) -> None:
    found, report, _ = recorded
    curve = found.measured.memory["cpu"]
    assert curve.peak_bytes == report.peak_bytes["cpu"] == found.measured.peak_bytes["cpu"]
    assert all(min(column) >= 0 for column in curve.bytes_by_use.values())
    assert list(curve.times_s) == sorted(curve.times_s)
    predicted = found.predicted.memory["cpu"]
    assert curve.peak_bytes <= predicted.peak_bytes
    peaks = {use: max(column) for use, column in curve.bytes_by_use.items()}
    assert peaks == {use: max(column) for use, column in predicted.bytes_by_use.items()}


def test_waits_say_what_they_wait_for(recorded: tuple[RecordedStep, Any, list[float]]) -> None:
    found, report, _ = recorded
    reported = {(stall.op, stall.tensor) for stall in report.stalls}
    names = {tensor.name for tensor in found.plan.workload.tensors}
    for stall in found.measured.stalls:
        assert (stall.op, stall.tensor) in reported
        assert stall.cause in {"link busy", "memory", "bandwidth"}
        assert not stall.blocker or stall.blocker in names
        assert stall.blocker or stall.cause != "memory"


def test_recording_changes_no_result(
    recorded: tuple[RecordedStep, Any, list[float]], tmp_path: Path
) -> None:
    _, _, losses = recorded
    model = new_model().train()
    torch.manual_seed(0)
    with compiled(model, adamw(model), tmp_path) as step:
        assert [float(step(batch)) for batch in batches(4)] == losses


def test_one_file_and_one_picture_show_both(
    recorded: tuple[RecordedStep, Any, list[float]], tmp_path: Path
) -> None:
    found, _, _ = recorded
    trace_file, picture_file = found.save(tmp_path / "shown")
    shown = json.loads(trace_file.read_text())
    events = shown["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == {1: "predicted", 2: "measured"}
    threads = {
        (e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"
    }
    assert set(threads.values()) == {"cpu", "nvme->cpu", "cpu->nvme"}
    for process, found_trace in ((1, found.predicted), (2, found.measured)):
        slices = [e for e in events if e["ph"] == "X" and e["pid"] == process]
        assert sum(e["cat"] in ("op", "recompute") for e in slices) == len(found_trace.ops)
        assert shown["otherData"]["seconds"][processes[process]] == found_trace.seconds
        on_cpu = [e for e in slices if threads[process, e["tid"]] == "cpu"]
        spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in on_cpu)
        assert all(a[1] <= b[0] + 2e-3 for a, b in pairwise(spans))
    arrows = [e["id"] for e in events if e["ph"] == "s"]
    assert len(set(arrows)) == len(arrows), "arrows of the two are told apart"
    assert picture_file.read_bytes().startswith(b"\x89PNG")


def test_the_picture_has_a_panel_for_each(
    recorded: tuple[RecordedStep, Any, list[float]], tmp_path: Path
) -> None:
    found, _, _ = recorded
    path = tmp_path / "both.svg"
    picture_of_several(found.plan, {"predicted": found.predicted, "measured": found.measured}, path)
    texts = "\n".join(ElementTree.parse(path).getroot().itertext())
    assert "predicted: step of TinyGPT" in texts and "measured: step of TinyGPT" in texts
    assert texts.count("cpu computes") == texts.count("cpu memory: at most") == 2
    with pytest.raises(ValueError, match="at least one"):
        picture_of_several(found.plan, {}, path)


def test_a_recording_of_another_plan_is_refused(
    recorded: tuple[RecordedStep, Any, list[float]],
) -> None:
    with pytest.raises(PlanMismatchError, match="another plan"):
        measured_trace(recorded[0].plan, Recording())
