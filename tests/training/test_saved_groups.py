"""Checkpoints of optimizers with tensors in their groups, and of models that are not those of the step any more."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gascompile import compile_step
from gascompile.core.errors import CheckpointError, UnsupportedOpError
from tests.training.runs import MACHINE


class Net(nn.Module):
    """A layer with a buffer that is saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(8))
        self.register_buffer("shift", torch.zeros(8), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x) * self.scale + self.shift
        return out


def _loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch).square().mean()
    return loss


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> Any:
    batch = torch.ones(4, 8)
    return compile_step(
        model, _loss, optimizer, "64MiB", batch, machine=MACHINE, cache_dir=folder / "cache"
    )


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "a tensor": lambda m: torch.optim.AdamW(m.parameters(), lr=torch.tensor(0.01), fused=True),
    "tensors in a pair": lambda m: torch.optim.AdamW(
        m.parameters(),
        lr=torch.tensor(0.01),
        betas=(torch.tensor(0.9), torch.tensor(0.99)),
        foreach=False,
    ),
    "a tensor of SGD": lambda m: torch.optim.SGD(
        m.parameters(), lr=torch.tensor(0.01), momentum=0.9
    ),
    "lists": lambda m: torch.optim.AdamW(
        [{"params": m.parameters(), "layers": [1, [2, 3]], "names": ("a",)}], fused=True
    ),
}


def _types(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [type(value), *map(_types, value)]
    return type(value)


def _decay(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        group["lr"] *= 0.9  # in place where it is a tensor


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_groups_come_back_as_they_were(name: str, tmp_path: Path) -> None:
    batches = [torch.full((4, 8), 1.0 + number) for number in range(8)]
    made = OPTIMIZERS[name]

    def started() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Net()
        return model, made(model)

    twin, theirs = started()
    for batch in batches:
        theirs.zero_grad()
        _loss(twin, batch).backward()
        theirs.step()
        _decay(theirs)
    model, optimizer = started()
    with _step(model, optimizer, tmp_path) as step:
        for batch in batches[:4]:
            step(batch)
            _decay(optimizer)
        step.save(tmp_path / "saved")
    model, optimizer = started()
    with _step(model, optimizer, tmp_path) as step:
        step.load(tmp_path / "saved")
        for batch in batches[4:]:
            step(batch)
            _decay(optimizer)
    (own,), (other,) = optimizer.param_groups, theirs.param_groups
    assert {key: _types(value) for key, value in own.items()} == {
        key: _types(value) for key, value in other.items()
    }
    assert {k: v for k, v in own.items() if k != "params"} == {
        k: v for k, v in other.items() if k != "params"
    }
    # Updates are those of the fused kernel, which some of these do not ask for.
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=1e-6, atol=1e-7)


def _other_parameter(model: Any) -> None:
    model.layer.weight = nn.Parameter(torch.ones(8, 8))


def _other_module(model: Any) -> None:
    model.layer = nn.Linear(8, 8)


def _other_buffer(model: Any) -> None:
    model.scale = torch.full((8,), 2.0)


def _other_unsaved_buffer(model: Any) -> None:
    model.shift = torch.full((8,), 2.0)


def _more(model: Any) -> None:
    model.register_buffer("more", torch.ones(3))


def _less(model: Any) -> None:
    model.scale = None


@pytest.mark.parametrize(
    "change", [_other_parameter, _other_module, _other_buffer, _other_unsaved_buffer, _more, _less]
)
def test_what_a_model_is_given_since_is_never_left_out(
    change: Callable[[Any], None], tmp_path: Path
) -> None:
    model, batch = Net(), torch.ones(4, 8)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with _step(model, optimizer, tmp_path) as step:
        step(batch)
        kept = step.save(tmp_path / "saved")
        wanted = copy.deepcopy(step.state_dict())
        change(model)
        for refused in (
            lambda: step.save(tmp_path / "saved"),
            lambda: step.load(tmp_path / "saved"),
            lambda: step.load_state_dict(wanted),
            step.state_dict,
        ):
            with pytest.raises(UnsupportedOpError, match="other modules, parameters or buffers"):
                refused()
    assert kept.is_dir()
    fresh = Net()
    with _step(fresh, torch.optim.AdamW(fresh.parameters(), fused=True), tmp_path) as step:
        step.load(tmp_path / "saved")
        for key, value in step.state_dict()["model"].items():
            assert torch.equal(value, wanted["model"][key])
        step(batch)


class TwoNames(nn.Module):
    """Writes to a buffer that has two names."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8)
        self.register_buffer("mean", torch.ones(8))
        self.register_buffer("same", self.mean)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.lerp_(x.detach().mean(0), 0.1)
        out: torch.Tensor = self.layer(x) * self.mean * self.same
        return out


def test_one_tensor_twice_in_a_batch(tmp_path: Path) -> None:
    def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = (model(batch[0]) - batch[1]).square().mean()
        return loss

    model = TwoNames()
    twin = copy.deepcopy(model)
    optimizer, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin))
    x, y = torch.randn(4, 8), torch.randn(4, 8)
    with compile_step(
        model, loss_of, optimizer, "64MiB", machine=MACHINE, cache_dir=tmp_path
    ) as step:
        for batch in ((x, x), (x, y), (y, y), (y, x)):
            theirs.zero_grad()
            wanted = loss_of(twin, batch)
            wanted.backward()
            theirs.step()
            assert torch.equal(step(batch), wanted.detach())
    assert torch.equal(model.mean, twin.mean)


def test_a_checkpoint_without_a_number_for_a_tensor_changes_nothing(tmp_path: Path) -> None:
    model, batch = Net(), torch.ones(4, 8)
    optimizer = torch.optim.AdamW([{"params": model.parameters(), "mark": "a"}], fused=True)
    with _step(model, optimizer, tmp_path) as step:
        step(batch)
        step.save(tmp_path / "saved")
    fresh = Net()
    optimizer = torch.optim.AdamW(
        [{"params": fresh.parameters(), "mark": torch.tensor(1.0)}], fused=True
    )
    with _step(fresh, optimizer, tmp_path) as step:
        with pytest.raises(CheckpointError, match="a tensor where the checkpoint has 'a'"):
            step.load(tmp_path / "saved")
        assert torch.equal(step.state_dict()["model"]["layer.weight"], Net().layer.weight)
        step(batch)
