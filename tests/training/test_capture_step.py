"""Programs of steps captured without values: those of the same model with values, and no memory is taken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import training_large, training_planning
from gascompile.machines.resolve import resolve_machine
from gascompile.runtime.memory.heap_memory import own_bytes
from gascompile.runtime.transfer.engine import read_blocks
from gascompile.training.capture.capture_step import capture_step
from gascompile.training.capture.unbacked_tensors import Outlines
from gascompile.training.settings import Settings
from tests.training.runs import TinyGPT, adamw, batches, loss_fn, new_model


@pytest.mark.parametrize("settings", [Settings(), Settings(max_grad_norm=1.0, on_nan="ignore")])
def test_a_model_without_values_has_the_same_program(settings: Settings) -> None:
    with torch.device("meta"):
        meta = TinyGPT().train()
    found, expected = (
        capture_step(model, loss_fn, adamw(model), batches(1)[0], settings=settings)
        for model in (meta, new_model().train())
    )
    assert found.program.graph_module.code == expected.program.graph_module.code
    assert found.program.bindings == expected.program.bindings
    assert found.program.bound == expected.program.bound
    assert all(tensor.is_meta for tensor in meta.state_dict().values())


def test_a_model_in_part_without_values_stays_as_it_was() -> None:
    with torch.device("meta"):
        model = TinyGPT().train()
    model.norm = nn.BatchNorm1d(64)
    weight = model.norm.weight
    kept = weight.detach().clone()
    capture_step(model, loss_fn, adamw(model), batches(1)[0])
    assert model.norm.weight is weight
    assert torch.equal(weight, kept)
    assert model.embedding.weight.is_meta


def test_outlines_keep_identity_strides_and_flags_and_take_no_memory() -> None:
    huge = nn.Parameter(torch.empty(1 << 15, 1 << 15, device="meta"), requires_grad=False)
    turned = torch.empty(3, 5, device="meta").t()
    before = (huge.shape, turned.stride())
    outlines = Outlines({"huge": huge, "turned": turned})
    taken_bytes = own_bytes()
    outlines.enter()
    outlines.enter()
    assert own_bytes() - taken_bytes < huge.nbytes / 100
    assert huge.device.type == turned.device.type == "cpu"
    assert not huge.requires_grad
    assert isinstance(huge, nn.Parameter)
    outlines.leave()
    outlines.leave()
    assert huge.is_meta
    assert (huge.shape, turned.stride()) == before


def test_deterministic_programs_do_not_fill_outlines() -> None:
    tensor = torch.empty(1 << 28, device="meta")
    torch.use_deterministic_algorithms(True)
    try:
        with Outlines({"tensor": tensor}):
            # Memory as the kernel gives it is zero; a fill would have written NaN.
            assert float(tensor[12345]) == 0.0
    finally:
        torch.use_deterministic_algorithms(False)


def test_planning_is_measured() -> None:
    machine = resolve_machine("cpu-nvme", cache_dir=Path("unused"), read=read_blocks)
    found = training_planning.measure(2, 64, "256MiB", machine)
    assert found["parameters"] == 50257 * 64 + 1024 * 64 + 2 * (12 * 64 * 64 + 13 * 64) + 2 * 64
    # Parameters and two moments each, and what attention masks by.
    assert found["state_bytes"] >= 12 * found["parameters"]
    # Everything fits.
    assert found["gap"] == 0.0
    assert not any(found["link_bytes"].values())
    assert found["peak_process_bytes"] > 0


@pytest.mark.slow
def test_a_large_model_trains_as_pytorch_does(tmp_path: Path) -> None:
    output = tmp_path / "large.json"
    command = ["--layers", "2", "--budget", "56MiB", "--tokens", "32", "--eager"]
    command += ["--planning-s", "0.5"]
    command += ["--machine", "cpu-nvme", "--scratch", str(tmp_path), "-o", str(output)]
    assert training_large.main(command) == 0
    ours, eager = json.loads(output.read_text())["rows"]
    assert ours["losses"] == pytest.approx(eager["losses"], rel=1e-6)
    assert ours["measured_peak_bytes"] <= 56 << 20
