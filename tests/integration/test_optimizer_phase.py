"""The benchmark of updates alone: it makes torch's updates, moves what it says, and its loop moves as much."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks import optimizer_phase
from benchmarks.training_contenders import build_model
from gascompile import compile_step
from gascompile.core.sizes import PAGE_BYTES
from tests.training.runs import MACHINE, PLANNING_S


def test_a_step_is_torch_s_update_with_the_given_gradient(tmp_path: Path) -> None:
    plain, planned = build_model("toy"), build_model("toy")
    gradient = optimizer_phase.gradient_for(plain)
    reference = torch.optim.AdamW(plain.parameters(), lr=0.1, fused=True)
    for parameter in plain.parameters():
        parameter.grad = gradient[: parameter.numel()].view_as(parameter).clone()
    reference.step()
    optimizer = torch.optim.AdamW(planned.parameters(), lr=0.1)
    with compile_step(
        planned,
        optimizer_phase.given_loss,
        optimizer,
        "5MiB",
        gradient,
        machine=MACHINE,
        cache_dir=tmp_path,
        time_limit_s=PLANNING_S,
    ) as step:
        assert float(step(gradient)) == 0.0
        assert step.plan is not None and step.last_run is not None
        read, written = (sum(n for _, n in found) for found in optimizer_phase.blocks(step))
        assert step.last_run.link_bytes == {"nvme->cpu": read, "cpu->nvme": written}
        assert read == written > 0
    for (name, expected), found in zip(plain.named_parameters(), planned.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, msg=name)


def test_the_plain_loop_moves_every_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moved = {"read": 0, "written": 0}
    plain_read, plain_write = optimizer_phase._pread, os.pwrite

    def read(file: int, buffer: memoryview, offset: int) -> int:
        moved["read"] += (done := plain_read(file, buffer, offset))
        return done

    def write(file: int, buffer: memoryview, offset: int) -> int:
        moved["written"] += (done := plain_write(file, buffer, offset))
        return done

    with (tmp_path / "states").open("w+b") as file:
        file.truncate(64 * PAGE_BYTES)
        blocks = [(0, 70_000), (20 * PAGE_BYTES, 4096)], [(30 * PAGE_BYTES, 100)]
        loop = optimizer_phase.PlainLoop(file.fileno(), *blocks)
        monkeypatch.setattr(optimizer_phase, "_pread", read)
        monkeypatch.setattr(os, "pwrite", write)
        for seconds in (loop.seconds_at_once, loop.seconds_in_turns):
            moved.update(read=0, written=0)
            assert seconds() > 0
            assert moved == {"read": 18 * PAGE_BYTES + 4096, "written": PAGE_BYTES}
        loop.close()
        file.seek(30 * PAGE_BYTES)
        values = torch.frombuffer(bytearray(file.read(PAGE_BYTES)), dtype=torch.float32)
        assert values.gt(0).all() and values.lt(2e-3).all()
        assert not file.read().strip(b"\0")


def test_a_toy_run_says_where_time_goes(tmp_path: Path) -> None:
    output = tmp_path / "phase.json"
    command = ["--toy", "--rounds", "1", "--scratch", str(tmp_path), "-o", str(output)]
    code = optimizer_phase.main(command)
    result = json.loads(output.read_text())
    assert code == int(result["share"] < optimizer_phase.ASKED_SHARE)
    assert result["peak_bytes"] <= result["budget_bytes"] == 5 << 20
    loops_s = (result["loops_at_once_s"][0], result["loops_in_turns_s"][0])
    assert result["share"] == min(loops_s) / result["steps_s"][0]
    spent = result["one_step"]
    assert spent["op_s"] + spent["wait_s"] + spent["between_s"] == pytest.approx(spent["seconds"])
    assert set(spent["link_busy_s"]) == {"nvme->cpu", "cpu->nvme"}
    assert [path.name for path in tmp_path.iterdir()] == ["phase.json"]
