"""``gascompile plan --hosts``, ``--ranks`` and ``--train``."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import LlamaConfig

from gascompile.core import serial
from gascompile.core.hosts_plan import HostsPlan
from tests.commands.command_line import failure, json_of, ok
from tests.passes.stacks import stack


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("workloads") / "stack.workload.json"
    serial.write_atomic(path, serial.dumps(stack(5, weight=2 * 10**9)))
    return str(path)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("llama")
    LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=100,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)
    return str(folder)


def test_a_ring_over_home_machines(layers: str, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    data = json_of("plan", layers, "--hosts", "home-4", "-o", str(file))
    assert data["kind"] == "ring"
    assert HostsPlan.load(file).digest == data["digest"]
    assert sum(s["gpu_layers"] + s["ram_layers"] for s in data["stages"]) == 5
    table = ok("plan", layers, "--hosts", "home-4")
    assert all(name in table for name in ("mac", "desktop", "lower bound", data["digest"]))


def test_equal_ranks_and_wrong_usage(layers: str) -> None:
    table = ok("plan", layers, "--ranks", "2", "--machine", "h100-gen5")
    assert "no speed-up" in " ".join(table.split())
    assert "--hosts" in failure("plan", layers, "--hosts", "home-4", "--ranks", "2")[1]
    assert "--train" in failure("plan", layers, "--train")[1]
    assert "hosts file" in failure("plan", layers, "--ranks", "2", "--budget", "1GiB")[1]
    assert "halda" in failure("plan", layers, "--hosts", "home-4", "--strategy", "best")[1]
    assert failure("plan", layers, "--hosts", "nowhere")[0] == 1


def test_a_captured_model_is_a_chain(model: str) -> None:
    step = json_of("plan", model, "--hosts", "v100-8", "--train", "--tokens", "8")
    assert sum(group["layers"] for group in step["groups"]) == 3
    assert "4 bytes" in step["notes"][0]
