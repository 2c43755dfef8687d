"""Lightning's Trainer with planned steps, against the same Trainer without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gascompile.core.errors import UnsupportedOpError
from tests.training.runs import PLANNING_S
from tests.training.trials import MACHINE

lightning = pytest.importorskip("lightning.pytorch")
pytestmark = pytest.mark.filterwarnings("ignore")


def _module(**steps: Any) -> Any:
    from gascompile.integrations import lightning as _  # noqa: F401 - it has to import beside the library

    class Module(lightning.LightningModule):  # type: ignore[misc,name-defined,unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(
                nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Dropout(0.2), nn.Linear(64, 16)
            )

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
            self.log("loss", loss, on_step=False, on_epoch=True)
            self.log_dict({"again": loss.detach()})
            return {"loss": loss}

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("held_out", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
            }

    return type("Module", (Module,), steps)()


def _data(count: int = 28) -> Any:
    made = torch.Generator().manual_seed(1)
    inputs, wanted = torch.randn(count, 16, generator=made), torch.randn(count, 16, generator=made)
    return DataLoader(TensorDataset(inputs, wanted), batch_size=4)


def _trained(
    module: Any, folder: Path, *, planned: bool, resume: Path | None = None, **options: Any
) -> Any:
    from gascompile.integrations.lightning import GasStrategy

    steps = {"machine": MACHINE, "cache_dir": folder, "time_limit_s": PLANNING_S}
    strategy = GasStrategy("6MiB", step_options=steps) if planned else "auto"
    trainer = lightning.Trainer(
        **{"max_epochs": 2, **options},
        accelerator="cpu",
        strategy=strategy,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    torch.manual_seed(7)
    trainer.fit(module, _data(), _data(8), ckpt_path=resume)
    return trainer


@pytest.mark.parametrize(
    "options",
    [{"accumulate_grad_batches": 2}, {"precision": "bf16-mixed"}, {"gradient_clip_val": 0.1}],
    ids=["accumulated", "bf16", "clipped"],
)
def test_fit_is_that_of_lightning(options: dict[str, Any], tmp_path: Path) -> None:
    """Weights, what is logged and the rates; validation between epochs, and updates that end with the data."""
    theirs, ours = _module(), _module()
    wanted = _trained(theirs, tmp_path, planned=False, **options)
    found = _trained(ours, tmp_path, planned=True, **options)
    for name, value in theirs.state_dict().items():
        if "gradient_clip_val" in options:
            torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(ours.state_dict()[name], value), name
    assert found.callback_metrics.keys() == wanted.callback_metrics.keys()
    for name, value in wanted.callback_metrics.items():
        torch.testing.assert_close(found.callback_metrics[name], value)
    assert found.global_step == wanted.global_step
    assert found.optimizers[0].param_groups[0]["lr"] == wanted.optimizers[0].param_groups[0]["lr"]


def test_checkpoints_are_those_of_lightning(tmp_path: Path) -> None:
    """Written while the step is open, and resumed by either."""
    saved = tmp_path / "saved.ckpt"

    def save(self: Any, *_: Any) -> None:
        if self.global_step == 9:
            assert self.trainer.strategy.step is not None
            self.trainer.save_checkpoint(saved)

    ours = _module(on_train_batch_end=save)
    _trained(ours, tmp_path, planned=True)
    state = torch.load(saved, weights_only=False)
    assert state["optimizer_states"][0]["state"][0]["step"] == 9
    assert state["state_dict"]["net.0.weight"].shape == (64, 16)
    theirs, resumed = _module(), _module()
    _trained(theirs, tmp_path, planned=False, resume=saved)
    _trained(resumed, tmp_path, planned=True, resume=saved)
    for name, value in theirs.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name


def _looks_at_epoch(self: Any, batch: Any, batch_idx: int) -> Any:
    return self.net(batch[0]).square().mean() * (1 + self.current_epoch)


def _looks_at_number(self: Any, batch: Any, batch_idx: int) -> Any:
    return self.net(batch[0]).square().mean() * (0.5 if batch_idx % 2 else 1.0)


def _logs_more(self: Any, batch: Any, batch_idx: int) -> Any:
    found = self.net(batch[0])
    self.log("largest", found.max())
    return found.square().mean()


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ({"training_step": _looks_at_epoch}, "looks at the trainer, such as current_epoch"),
        ({"training_step": _looks_at_number}, "looks at batch_idx"),
        ({"training_step": _logs_more}, "logs 'largest', which is not the loss"),
        ({"on_after_backward": lambda _: None}, "has the hook 'on_after_backward'"),
        ({"automatic_optimization": False}, "steps them by itself"),
    ],
)
def test_what_a_planned_step_would_leave_out_is_refused(
    steps: dict[str, Any], said: str, tmp_path: Path
) -> None:
    module = _module(**steps)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(UnsupportedOpError, match=said):
        _trained(module, tmp_path, planned=True)
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])
