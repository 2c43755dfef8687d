"""Optimizers that update by their own class, in planned steps: whole runs, and what they keep, against plain torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers.optimization import Adafactor as TransformersAdafactor

from gascompile.core.errors import CheckpointError, UnsupportedOpError
from gascompile.training.optimizers import optimizers
from tests.training.trials import TRANSFER_BYTES, Trial

Make = Callable[[nn.Module], torch.optim.Optimizer]
o = torch.optim


class Net(nn.Module):
    """Two matrices and what Muon does not take; one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(48, 96, bias=False), nn.Linear(96, 48, bias=False)
        self.fixed = nn.Linear(48, 48, bias=False).requires_grad_(requires_grad=False)
        self.norm = nn.LayerNorm(96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down(self.norm(torch.tanh(self.up(self.fixed(x)))))
        return found


def _loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return functional.mse_loss(model(batch[0]), batch[1])


BATCHES = [
    (torch.randn(4, 48, generator=made), torch.randn(4, 48, generator=made))
    for made in (torch.Generator().manual_seed(i) for i in range(10))
]


def _of(kind: Any, **options: Any) -> Make:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        matrices = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() == 1]
        groups = [{"params": matrices}, {"params": others, "lr": 3e-3}]
        made: torch.optim.Optimizer = kind(groups[: 1 if kind is o.Muon else 2], **options)
        return made

    return make


KINDS = {
    "amsgrad": _of(o.AdamW, amsgrad=True, fused=True),
    "rmsprop": _of(o.RMSprop, momentum=0.9, centered=True, weight_decay=0.1),
    "nadam": _of(o.NAdam, weight_decay=0.1, momentum_decay=0.1),
    "adagrad": _of(o.Adagrad, initial_accumulator_value=0.1),
    "muon": _of(o.Muon),
    "adafactor": _of(o.Adafactor, weight_decay=0.1),
    "transformers": _of(TransformersAdafactor, lr=1e-2, relative_step=False, scale_parameter=False),
}


def _scheduler(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def _trial(tmp_path: Path, make: Make, **options: Any) -> Trial:
    torch.manual_seed(0)
    return Trial(Net().train(), _loss, BATCHES, tmp_path, make, _scheduler, options=options)


def _same(found: Any, wanted: Any) -> bool:
    """Compare states of torch's: a count may be a tensor in one and a number in the other, ``RMS`` is none."""
    if isinstance(wanted, dict):
        keys = wanted.keys() - {"RMS"}
        return found.keys() - {"RMS"} == keys and all(_same(found[k], wanted[k]) for k in keys)
    return bool((torch.as_tensor(found) == torch.as_tensor(wanted)).all())


@pytest.mark.parametrize("kind", ["nadam", "muon", "adafactor"])
def test_runs_in_the_smallest_budget(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With moments in tiles on the drive, summed gradients, and rates that change."""
    monkeypatch.setattr(optimizers, "_TILE_BYTES", 4096)
    trial = _trial(tmp_path, KINDS[kind], accumulate=2)
    budget = trial.smallest_budget()
    result = trial.planned(budget)
    result.assert_equals(trial.eager())
    assert result.peak_bytes <= budget - TRANSFER_BYTES
    assert result.plan is not None
    assert result.plan.link_bytes["cpu->nvme"] > 0


@pytest.mark.parametrize("kind", KINDS)
def test_runs_go_on_in_torch_and_come_back(kind: str, tmp_path: Path) -> None:
    """Plain steps, planned ones, a checkpoint, plain ones: the optimizer's state is torch's throughout."""
    trial = _trial(tmp_path, KINDS[kind])
    model = copy.deepcopy(trial.model)
    theirs = copy.deepcopy(trial.model)
    optimizer, their_optimizer = trial.optimizer(model), trial.optimizer(theirs)

    def plain(net: nn.Module, updates: torch.optim.Optimizer, batch: Any) -> None:
        _loss(net, batch).backward()
        updates.step()
        updates.zero_grad()

    def agree(state: dict[str, Any]) -> None:
        wanted = their_optimizer.state_dict()["state"]
        # Torch lists entries that it has looked at, and left empty.
        wanted = {key: entry for key, entry in wanted.items() if entry}
        assert _same(state["optimizer"]["state"], wanted)
        assert _same(state["model"], theirs.state_dict())

    for batch in BATCHES[:2]:
        plain(model, optimizer, batch)
    for batch in BATCHES[:5]:
        plain(theirs, their_optimizer, batch)
    with trial.compiled(model, optimizer, None) as step:
        for batch in BATCHES[2:5]:
            step(batch)
        agree(step.state_dict())
        step.save(tmp_path / "saved")
        kept = step.state_dict()
    agree({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    for batch in BATCHES[5:7]:
        plain(theirs, their_optimizer, batch)
        plain(model, optimizer, batch)
    agree({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    for taken in (False, True):
        fresh = copy.deepcopy(trial.model)
        with trial.compiled(fresh, trial.optimizer(fresh), None) as step:
            if not taken:
                agree_at_start = trial.optimizer(fresh).state_dict()["state"]
                assert _same(step.state_dict()["optimizer"]["state"], agree_at_start)
            step.load_state_dict(kept) if taken else step.load(tmp_path / "saved")
            for batch in BATCHES[5:7]:
                step(batch)
            agree(step.state_dict())


def test_states_of_others_are_refused(tmp_path: Path) -> None:
    trial = _trial(tmp_path, KINDS["nadam"])
    model = copy.deepcopy(trial.model)
    with trial.compiled(model, trial.optimizer(model), None) as step:
        state = step.state_dict()
        step(BATCHES[0])
        other = step.state_dict()
        del other["optimizer"]["state"][0]["mu_product"]
        with pytest.raises(CheckpointError, match="no 'mu_product' of shape"):
            step.load_state_dict(other)
        step.load_state_dict(state)
    trial = _trial(tmp_path, KINDS["adagrad"])
    model = copy.deepcopy(trial.model)
    optimizer = trial.optimizer(model)
    optimizer.state[next(model.parameters())]["sum"].fill_(3.0)
    with pytest.raises(CheckpointError, match=r"'sum' of 'up.weight' is not 0\.1"):
        trial.compiled(model, optimizer, None)


def test_options_that_programs_have_in_them_stay(tmp_path: Path) -> None:
    trial = _trial(tmp_path, KINDS["rmsprop"])
    model = copy.deepcopy(trial.model)
    optimizer = trial.optimizer(model)
    with trial.compiled(model, optimizer, None) as step:
        step(BATCHES[0])
        optimizer.param_groups[0]["centered"] = False
        with pytest.raises(UnsupportedOpError, match="close the step and compile a new one"):
            step(BATCHES[1])
