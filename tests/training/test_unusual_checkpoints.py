"""Checkpoints of runs that are unusual: between the batches of an update, and of other orders of memory."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from gascompile import TrainingStep, compile_step
from gascompile.core.errors import CheckpointError
from tests.training.runs import MACHINE, PLANNING_S, adamw, batches, loss_fn, losses, new_model


def test_a_run_resumes_between_the_batches_of_an_update(tmp_path: Path) -> None:
    def start() -> TrainingStep:
        model = new_model().train()
        return compile_step(
            model,
            loss_fn,
            adamw(model),
            "64MiB",
            batches(1)[0],
            machine=MACHINE,
            cache_dir=tmp_path,
            accumulate=2,
            time_limit_s=PLANNING_S,
        )

    reference = new_model().train()
    optimizer = adamw(reference)
    torch.manual_seed(5)
    expected = []
    for number, batch in enumerate(batches(6)):
        loss = loss_fn(reference, batch)
        loss.backward()
        expected.append(float(loss.detach()))
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    with start() as step:
        torch.manual_seed(5)
        found = losses(step, 0, 3)
        step.save(tmp_path / "checkpoints")
    with start() as step:
        losses(step, 0, 1)
        step.load(tmp_path / "checkpoints")
        found += losses(step, 3, 6)
        assert step.num_steps == 3
    assert found == expected


def test_parameters_in_another_order_of_memory_come_back(tmp_path: Path) -> None:
    def start() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(1)
        layers = [nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)]
        model = nn.Sequential(layers[0], nn.ReLU(), layers[1])
        for weight in (layer.weight for layer in layers):
            weight.data = weight.detach().contiguous(memory_format=torch.channels_last)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

    def square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = model(batch).square().mean()
        return found

    def open_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> TrainingStep:
        return compile_step(
            model, square, optimizer, "64MiB", images, machine=MACHINE, cache_dir=tmp_path
        )

    images = torch.randn(2, 3, 12, 12).to(memory_format=torch.channels_last)
    model, optimizer = start()
    expected = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = square(model, images)
        loss.backward()
        optimizer.step()
        expected.append(float(loss.detach()))
    with open_step(*start()) as step:
        found = [float(step(images)) for _ in range(2)]
        step.save(tmp_path / "checkpoints")
        state = step.state_dict()
    with open_step(*start()) as step:
        step.load(tmp_path / "checkpoints")
        again = step.state_dict()
        for index, entry in state["optimizer"]["state"].items():
            for key, value in entry.items():
                assert torch.equal(again["optimizer"]["state"][index][key], value)
        found += [float(step(images)) for _ in range(2)]
    assert found == pytest.approx(expected, rel=1e-6)
    wanted = optimizer.state_dict()["state"][0]["exp_avg"]
    model, optimizer = start()
    with open_step(model, optimizer) as step:
        step.load_state_dict(state)
        for _ in range(2):
            step(images)
    assert torch.allclose(optimizer.state_dict()["state"][0]["exp_avg"], wanted, rtol=1e-5)


SPOILT: dict[str, object] = {
    "step": -1,
    "updates": {"0.weight": "many"},
    "pending": 3,
    "optimizer": None,
    "param_groups": [3],
    "optimizer_state": [[0, 1]],
    "extra": [],
}


def test_what_a_checkpoint_says_beside_tensors_is_read_before_anything_changes(
    tmp_path: Path,
) -> None:
    model = new_model().train()
    with compile_step(
        model, loss_fn, adamw(model), "64MiB", batches(1)[0], machine=MACHINE, cache_dir=tmp_path
    ) as step:
        folder = tmp_path / "checkpoints"
        saved = step.save(folder)
        step(batches(1)[0])
        before = step.state_dict()["model"]
        good = (saved / "state.json").read_text()
        texts = {name: json.dumps({**json.loads(good), name: v}) for name, v in SPOILT.items()}
        texts |= {"what it is": "[]", "not valid JSON": good[:-9]}
        for name, text in texts.items():
            (saved / "state.json").write_text(text)
            manifest = json.loads((saved / "manifest.json").read_text())
            manifest["files"]["state.json"] = {
                "bytes": len(text),
                "sha256": hashlib.sha256(text.encode()).hexdigest(),
            }
            (saved / "manifest.json").write_text(json.dumps(manifest))
            with pytest.raises(CheckpointError, match=name):
                step.load(folder)
        after = step.state_dict()["model"]
        assert all(torch.equal(after[name], value) for name, value in before.items())
