"""The training benchmark runs at toy size; contenders agree; its arithmetic by hand."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks import training_contenders, training_offload, training_peers
from benchmarks.training_contenders import Case, batch_of, build_model
from gascompile.core.sizes import MIB

ROOT = Path(__file__).parents[2]
ROW = {"contender": "eager", "budget": None, "cgroup_bytes": None, "baseline_bytes": 100}


def row(contender: str, median_s: float, peak_bytes: int, **more: Any) -> dict[str, Any]:
    figures = {"median_s": median_s, "step_peak_bytes": peak_bytes, "losses": [2.0, 1.0]}
    return {**ROW, **figures, "contender": contender, **more}


def losses_of(contender: str, folder: Path) -> tuple[list[float], dict[str, Any]]:
    case = Case(
        model=build_model("toy"), first_batch=batch_of("toy", 0), scratch=folder, budget=None
    )
    trainer = training_contenders.CONTENDERS[contender](case)
    losses = [float(trainer.step(batch_of("toy", number))) for number in range(3)]
    return losses, trainer.details()


@pytest.mark.parametrize("contender", ["checkpoint", "spill", "mapped-adamw", "checkpoint-mapped"])
def test_contenders_train_as_eager_does(contender: str, tmp_path: Path) -> None:
    expected, _ = losses_of("eager", tmp_path)
    found, details = losses_of(contender, tmp_path)
    assert found == pytest.approx(expected, abs=1e-4)
    files = sorted(path.name for path in tmp_path.iterdir())
    if contender == "spill":
        assert details["written_bytes"] > 3 * 2 * 32 * 512 * 4, "logits of three steps at least"
        assert files == [], "what was read back is removed"
    if "mapped" in contender:
        moments = [torch.from_file(str(p), size=p.stat().st_size // 4) for p in tmp_path.iterdir()]
        assert {name.split("-")[0] for name in files} == {"exp_avg", "exp_avg_sq"}
        assert any(moment.abs().sum() > 0 for moment in moments)


def test_spilled_tensors_come_back_and_parameters_stay(tmp_path: Path) -> None:
    model = torch.nn.Linear(256, 256)
    spill = training_contenders.FileSpill(tmp_path, model)
    assert spill.pack(model.weight.t()) is not None
    assert list(tmp_path.iterdir()) == []
    value = torch.randn(256, 512).t()
    packed = spill.pack(value)
    assert [path.stat().st_size for path in tmp_path.iterdir()] == [value.nbytes]
    torch.testing.assert_close(spill.unpack(packed), value, rtol=0, atol=0)
    small = torch.zeros(4)
    assert spill.unpack(spill.pack(small)) is small
    assert spill.written_bytes == value.nbytes


@pytest.mark.slow
def test_a_toy_run_measures_contenders_side_by_side(tmp_path: Path) -> None:
    output = tmp_path / "training.json"
    command = ["--toy", "--steps", "1", "--only", "eager", "gascompile", "--budgets", "5MiB"]
    assert training_offload.main([*command, "--scratch", str(tmp_path), "-o", str(output)]) == 0
    result = json.loads(output.read_text())
    eager, ours = result["rows"]
    assert (eager["contender"], eager["time_ratio"], eager["loss_difference"]) == ("eager", 1, 0)
    assert ours["loss_difference"] <= 1e-4
    assert len(ours["losses"]) == 2 and len(ours["times_s"]) == 1
    assert ours["measured_peak_bytes"] <= ours["budget_bytes"] == 5 * MIB
    assert ours["cgroup_bytes"] in {None, 5 * MIB + training_offload.PROCESS_BYTES}
    assert sum(ours["link_bytes"].values()) > 0
    for found in (eager, ours):
        assert 50 * MIB < found["baseline_bytes"] < found["step_peak_bytes"]
    assert [path.name for path in tmp_path.iterdir()] == ["training.json"]


def test_time_that_is_over_is_told(tmp_path: Path) -> None:
    output = tmp_path / "training.json"
    command = ["--toy", "--limit-s", "1", "--only", "eager", "-o", str(output)]
    assert training_offload.main(command) == 1
    assert json.loads(output.read_text())["rows"][0]["failed"] == "left out: 1 s were over"


def test_peers_that_are_missing_are_skipped_by_name(tmp_path: Path) -> None:
    output = tmp_path / "training.json"
    python = bare_python(tmp_path)
    assert training_peers.versions(python, ["pip", "deepspeed"]) == {}
    assert set(training_peers.versions(sys.executable, ["torch", "none-such"])) == {"torch"}
    command = ["--toy", "--only", *training_peers.PACKAGES, "--peer-python", python]
    assert training_offload.main([*command, "-o", str(output)]) == 0
    rows = json.loads(output.read_text())["rows"]
    assert [row["contender"] for row in rows] == list(training_peers.PACKAGES)
    for found in rows:
        assert found["skipped"].startswith(
            f"{training_peers.PACKAGES[found['contender']]} is not installed"
        )


def test_a_peer_whose_kernels_need_cuda_is_skipped_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = {"deepspeed": "1", "colossalai": "1"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert training_peers.missing("deepspeed-nvme", found) == ""
    assert "CUDA" in training_peers.missing("colossalai-nvme", found)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert training_peers.missing("colossalai-nvme", found) == ""


def bare_python(folder: Path) -> str:
    """Return an interpreter of an environment without packages."""
    venv.create(folder / "bare", with_pip=False, symlinks=True)
    return str(folder / "bare" / "bin" / "python")


def test_every_contender_has_its_turn() -> None:
    jobs = training_offload.jobs_of("gpt2")
    assert [job["budget"] for job in jobs if job["contender"] == "gascompile"] == [
        "2.5GiB",
        "1.5GiB",
        "1.0GiB",
    ]
    peers = training_peers.PACKAGES
    assert {job["contender"] for job in jobs} == {*training_contenders.CONTENDERS, *peers}
    assert set(peers) == set(training_peers.PEERS)
    assert jobs[0] == {"contender": "eager", "budget": None}
    ours = training_offload.jobs_of("gpt2", ["gascompile"], ["3GiB"])
    assert ours == [{"contender": "gascompile", "budget": "3GiB"}]


def test_ratios_by_hand() -> None:
    slow = row("spill", 3.0, 200, losses=[2.0, 1.5])
    failed = {"contender": "x", "budget": None, "failed": "why"}
    eager, found, last = training_offload.compared([row("eager", 2.0, 300), slow, failed])
    assert (eager["time_ratio"], eager["memory_ratio"], eager["loss_difference"]) == (1, 1, 0)
    # 100 of the bytes were there before the model.
    assert (found["time_ratio"], found["memory_ratio"]) == (1.5, 0.5)
    assert found["loss_difference"] == 0.5
    assert last == failed
    assert training_offload.compared([slow]) == [slow]


def test_what_is_wrong_is_told() -> None:
    rows = [
        row("spill", 1.0, 1, loss_difference=float("nan")),
        row("gascompile", 1.0, 1, budget="1GiB", measured_peak_bytes=6, budget_bytes=5),
        {"contender": "eager", "budget": None, "failed": "why"},
        row("checkpoint", 1.0, 1, loss_difference=1e-6),
    ]
    found = training_offload.failures(rows)
    assert [text.split(":")[0] for text in found] == ["spill", "gascompile 1GiB", "eager"]


def test_peaks_are_of_anonymous_memory() -> None:
    """In a process of its own: threads that other tests have left may take memory meanwhile."""
    code = """
import mmap
from benchmarks.anonymous import PeakSampler, anonymous_bytes
from tests.waiting import eventually
MIB = 1 << 20
with PeakSampler() as sampler:
    most_bytes = anonymous_bytes() + 60 * MIB
    with mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as block:
        block.write(b"x" * (64 * MIB))
        assert sampler.take_peak_bytes() >= most_bytes
    # A look that had begun before the block went may be noted after it.
    assert eventually(lambda: sampler.take_peak_bytes() < most_bytes)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
