"""The memory promise, measured by the kernel: a model larger than its cgroup is built, planned, loaded and run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.limited import can_limit, run_limited
from benchmarks.llama_checkpoint import SHAPE_1B, write_llama

MIB = 1 << 20
LIBRARIES_BYTES = 700 * MIB
"""What the interpreter and the libraries may take beside the budget."""

VOCABULARY = 8000
TABLE_BYTES = VOCABULARY * SHAPE_1B["hidden_size"] * 4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return 1.0 GB of fp32 weights in shards."""
    shape = {**SHAPE_1B, "num_hidden_layers": 5, "vocab_size": VOCABULARY}
    return write_llama(tmp_path_factory.mktemp("llama"), shape, shard_bytes=400 * MIB)


@pytest.mark.skipif(not can_limit(), reason="needs the right to make memory cgroups")
def test_a_model_larger_than_its_cgroup_runs(checkpoint: Path, tmp_path: Path) -> None:
    budget_bytes = 200 * MIB
    total_bytes = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    assert total_bytes > budget_bytes + LIBRARIES_BYTES
    command = [sys.executable, "-m", "benchmarks.inference_worker", "gascompile"]
    command += ["--model", str(checkpoint), "--scratch", str(tmp_path), "--runs", "2"]
    command += ["--tokens", "16", "--budget", str(budget_bytes)]
    done = run_limited(command, budget_bytes + LIBRARIES_BYTES)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["measured_peak_bytes"] <= budget_bytes
    assert result["link_bytes"]["nvme->cpu"] == result["planned_link_bytes"]["nvme->cpu"]
    # Of the embedding only the rows of the tokens need to be read.
    assert result["link_bytes"]["nvme->cpu"] > total_bytes - budget_bytes - TABLE_BYTES
