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


def test_other_numbers_of_ranks_are_plans_made_for_them(layers: str) -> None:
    on = ("--machine", "h100-gen5", "--train")
    data = json_of("whatif", layers, "--ranks", "4,1,2", *on)
    assert [variant["ranks"] for variant in data["variants"]] == [1, 2, 4]
    one = data["variants"][0]
    for variant in data["variants"]:
        made = json_of("plan", layers, "--ranks", str(variant["ranks"]), *on)
        assert variant["predicted_seconds"] == made["predicted_seconds"]
        assert variant["peak_bytes"] == made["peak_bytes"]
        ratio = one["predicted_seconds"] / made["predicted_seconds"]
        assert variant["efficiency"] == pytest.approx(ratio)
        assert variant["per_second"] == pytest.approx(variant["ranks"] / made["predicted_seconds"])
    assert "between ranks" in " ".join(ok("whatif", layers, "--ranks", "2", *on).split())


def test_ranks_without_room_say_what_they_need(tmp_path: Path) -> None:
    path = tmp_path / "large.workload.json"
    serial.write_atomic(path, serial.dumps(stack(3, weight=4 * 10**12)))
    data = json_of("whatif", str(path), "--ranks", "2", "--machine", "h100-gen5", "--train")
    (variant,) = data["variants"]
    assert variant["predicted_seconds"] is None
    assert variant["required_bytes"] > 0
    table = ok("whatif", str(path), "--ranks", "2", "--machine", "h100-gen5", "--train")
    assert "needs" in table


def test_wrong_usage_of_other_ranks(layers: str) -> None:
    assert "--ranks" in failure("whatif", layers, "--train")[1]
    assert "--ranks" in failure("whatif", layers, "--ranks", "2", "--gib", "1")[1]
    assert "1,2,4,8" in failure("whatif", layers, "--ranks", "two")[1]
    assert "from 1 on" in failure("whatif", layers, "--ranks", "0", "--machine", "h100-gen5")[1]
    assert "--train" in failure("explain", layers, "states", "--ranks", "2")[1]
    over = ("--hosts", "v100-8", "--train")
    assert "--budget" not in failure("explain", layers, "states", *over, "--budget", "1GiB")[1]
    assert "parameters, states, activations" in failure("explain", layers, "x1", *over)[1]


@pytest.mark.parametrize("subject", ["parameters", "states", "activations"])
def test_why_a_step_is_sharded_so(layers: str, subject: str) -> None:
    data = json_of("explain", layers, subject, "--hosts", "v100-8", "--train")
    made = json_of("plan", layers, "--hosts", "v100-8", "--train")
    assert data["plan"]["digest"] == made["digest"]
    layers_of = [other["layers"] for other in data["others"]]
    assert max(layers_of) == 5
    for other in data["others"]:
        if other["predicted_seconds"] is None:
            assert other["obstacle"]
            assert not other["layers"]
        elif other["layers"] == 5:
            assert other["change_seconds"] == 0.0
        else:
            assert other["change_seconds"] >= -2e-3 * made["predicted_seconds"]
    assert made["binding"] in data["why"]
    assert "all layers" in ok("explain", layers, subject, "--hosts", "v100-8", "--train")
