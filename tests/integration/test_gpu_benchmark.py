"""The GPU benchmark runs at toy size on the emulated accelerator; its arithmetic and its table by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks import gpu, gpu_models, gpu_table, gpu_worker
from tests.in_process import run_here


def row(batch: int, median_s: float, **more: Any) -> dict[str, Any]:
    logits = [0.5, 1.0]
    figures = {"batch": batch, "median_s": median_s, "tokens_per_s": batch / median_s}
    return {**figures, "logits": logits, "allocated_peak_bytes": None, **more}


@pytest.mark.slow
def test_a_toy_run_measures_two_contenders_that_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("accelerate")
    run_here(monkeypatch, "benchmarks.gpu_worker", gpu_worker.main)
    output = tmp_path / "gpu.json"
    command = ["--machine", "emulated", "--toy", "--runs", "2", "--sections", "memory"]
    assert gpu.main([*command, "--scratch", str(tmp_path), "-o", str(output)]) == 0
    result = json.loads(output.read_text())
    section = result["sections"]["memory"]
    ours, theirs = section["contenders"]
    assert ours["contender"], theirs["contender"] == ("gascompile", "accelerate")
    table_bytes = gpu_models.embedding_bytes(gpu_models.SHAPES["toy"])
    for found in ours["rows"]:
        assert found["machine"].startswith("emulated")
        assert found["measured_peak_bytes"] <= found["budget_bytes"] == 1 << 20
        # With a budget only what pays within the default number of runs is compiled.
        assert found["fused"]["num_all_ops"] > found["fused"]["num_ops"] >= 0
        assert found["link_limit_s"] == pytest.approx(
            (ours["weight_bytes"] - table_bytes - (1 << 20)) / result["link"]["bytes_per_s"]
        )
        # What does not fit was moved.
        assert sum(found["link_bytes"].values()) >= ours["weight_bytes"] - found["budget_bytes"]
    # Both computed on the processor, in the same order of sequences.
    assert [entry["batch"] for entry in section["compared"]] == [1, 16]
    assert all(entry["largest_difference"] < 0.05 for entry in section["compared"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([]) == 1
    assert "no GPU here" in capsys.readouterr().err


def test_missing_libraries_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_NEEDED", ("json", "no_such_library"))
    assert "needs no_such_library:" in str(gpu.missing(machine="emulated"))


LITTLE: dict[str, Any] = {
    "shape": "toy",
    "weight_bytes": 100 + gpu_models.embedding_bytes(gpu_models.SHAPES["toy"]),
}


def test_limits_by_hand() -> None:
    ours = row(1, 0.5, budget_bytes=60, measured_peak_bytes=60, limit_s=0.2, budget="60B")
    found = gpu.with_limits({**LITTLE, "rows": [dict(ours)]}, 100.0)["rows"][0]
    assert (found["link_limit_s"], found["share_of_limit"]) == (0.4, 0.8)
    assert found["keeps_budget"]
    on_disk = {**LITTLE, "rows": [dict(ours)], "disk": True}
    found = gpu.with_limits(on_disk, 100.0)["rows"][0]
    assert "link_limit_s" not in found and found["share_of_limit"] == 0.4
    above = {**ours, "allocated_peak_bytes": 61}
    found = gpu.with_limits({**LITTLE, "rows": [above]}, 100.0)["rows"][0]
    assert not found["keeps_budget"]


def test_failures_and_broken_budgets_are_told() -> None:
    ours = row(1, 0.1, budget="60B", keeps_budget=False)
    jobs: list[dict[str, Any]] = [
        {"contender": "gascompile", "rows": [ours]},
        {"contender": "accelerate", "failed": "x"},
    ]
    result = {"link": {"failed": "y"}, "sections": {"memory": {"contenders": jobs}}}
    assert gpu.failures(result) == [
        "link: y",
        "memory, gascompile: batch 1 took more than 60B",
        "memory, accelerate: x",
    ]
    assert gpu.compared(jobs) == []


def test_contenders_are_compared_batch_by_batch() -> None:
    theirs = [row(1, 0.4), row(16, 1.0, logits=[0.5, 1.25]), row(4, 1.0)]
    jobs: list[dict[str, Any]] = [{"rows": [row(1, 0.1), row(16, 0.5)]}, {"rows": theirs}]
    assert gpu.compared(jobs) == [
        {"batch": 1, "speedup": 4.0, "largest_difference": 0.0},
        {"batch": 16, "speedup": 2.0, "largest_difference": 0.25},
    ]


def test_weights_in_memory_and_on_the_drive_are_the_same(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    shape = gpu_models.SHAPES["toy"]
    folder = gpu_models.write_checkpoint(shape, tmp_path / "toy")
    saved: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        saved |= load_file(path)
    model = gpu_models.llama_in_memory(shape)
    held = dict(model.named_parameters())
    assert saved.keys() == held.keys()
    assert all(torch.equal(saved[name], held[name]) for name in held)
    assert gpu_models.weight_bytes(shape) == sum(value.nbytes for value in saved.values())
    assert not [name for name, buffer in model.named_buffers() if buffer.is_meta]


def test_only_results_of_a_gpu_reach_the_readme(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{gpu_table.BEGIN}\nold\n{gpu_table.END}\nafter\n")
    options = ["--results", str(tmp_path), "--readme", str(readme)]
    result = {
        "date": "2030-01-02",
        "environment": {"gpu": None, "versions": {"torch": "2.11", "accelerate": None}},
        "machine": "emulated",
        "runs": 5,
        "link": {"bytes_per_s": 50e9},
        "sections": {
            "memory": {
                "contenders": [
                    {
                        "contender": "gascompile",
                        "shape": "8B",
                        "rows": [row(16, 0.5, budget="6GiB", share_of_limit=0.9)],
                        "budgets": ["6GiB", "8GiB"],
                        "batches": [16],
                        "failed": "not finished after 9 s",
                    },
                    {
                        "contender": "accelerate",
                        "shape": "8B",
                        "batches": [1, 16],
                        "failed": "out of memory",
                    },
                ]
            }
        },
    }
    (tmp_path / "gpu-emulated.json").write_text(json.dumps(result))
    assert gpu_table.main(options) == 1
    result |= {"environment": {"gpu": "A GPU", "versions": {"torch": "2.11"}}}
    result["machine"] = "this machine"
    (tmp_path / "gpu-a.json").write_text(json.dumps(result))
    assert gpu_table.main([*options, "--check"]) == 1
    assert gpu_table.main(options) == 0
    text = readme.read_text()
    assert "| CPU memory | 8B | GASCompile | 6GiB | 16 | 32.0 | 90.0% | - |" in text
    start = "8B, weights from CPU memory"
    assert f"- GASCompile, {start}, 8GiB, batch 16: not finished after 9 s" in text
    assert f"- accelerate, {start}, batch 1 and 16: out of memory" in text
    assert "50.0 GB/s" in text and "A GPU, torch 2.11." in text and "old" not in text
    assert gpu_table.main([*options, "--check"]) == 0


def test_the_package_runs_in_place_without_being_installed(root: Path, tmp_path: Path) -> None:
    """By a Python that sees neither site-packages nor this checkout, only what the script lays out."""
    code = (
        "import gascompile.formats.layout, gascompile.core.sizes, importlib.metadata as m\n"
        "print(gascompile.__file__, m.version('gascompile'))"
    )
    done = subprocess.run(
        [sys.executable, "-S", str(root / "tools" / "run_in_place.py"), "-S", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(root / ".in_place" / "gascompile" / "__init__.py"), "0.1.0"]
    linked = root / ".in_place" / "gascompile"
    for folder in ("passes", "cost_models", "runtime"):
        assert (linked / folder / "__init__.py").samefile(root / folder / "__init__.py")
