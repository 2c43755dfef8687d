"""Models with code of their own for loading weights: no checkpoint is read past it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import gascompile
from gascompile.core.errors import CheckpointError
from tests.training.runs import MACHINE


class Plain(nn.Module):
    """Has none."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 3), nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.layer(x))
        return out


class Overriding(Plain):
    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        state[f"{prefix}layer.weight"] = state[f"{prefix}layer.weight"] / 2
        super()._load_from_state_dict(state, prefix, *rest)


class Loading(Plain):
    def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict({k: v / 2 for k, v in state.items()}, strict, assign)


class Before(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.layer.register_load_state_dict_pre_hook(self.halve)

    @staticmethod
    def halve(_: nn.Module, state: dict[str, Any], prefix: str, *rest: object) -> None:
        state[f"{prefix}weight"] = state[f"{prefix}weight"] / 2


class After(Plain):
    def __init__(self) -> None:
        super().__init__()
        hooks: Any = self
        hooks.register_load_state_dict_post_hook(self.halve)

    @staticmethod
    def halve(model: Plain, _: object) -> None:
        model.layer.weight.data.mul_(0.5)


OWN = [Overriding, Loading, Before, After]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    save_file(Plain().state_dict(), tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def mean(model: nn.Module, batch: Any) -> torch.Tensor:
    out: torch.Tensor = model(batch[0])
    return out.square().mean()


@pytest.mark.parametrize("kind", OWN)
def test_code_for_loading_is_not_passed_over(kind: type[Plain], file: Path, tmp_path: Path) -> None:
    with torch.device("meta"):
        model, trained = kind().eval(), kind()
    with pytest.raises(CheckpointError, match=r"model\.load_state_dict first"):
        gascompile.compile(
            model, "64MiB", checkpoint=file, machine=MACHINE, cache_dir=tmp_path / "cache"
        )
    with pytest.raises(CheckpointError, match=r"model\.load_state_dict first"):
        gascompile.compile_step(
            trained,
            mean,
            torch.optim.SGD(trained.parameters(), lr=0.1),
            "64MiB",
            (torch.randn(4, 8),),
            checkpoint=file,
            machine=MACHINE,
            cache_dir=tmp_path / "cache",
        )


def _rename(_: nn.Module, state: dict[str, Any], *rest: object) -> None:
    state["bias"] = state.pop("layer.bias")


def _renaming(model: Any) -> None:
    model.register_state_dict_post_hook(_rename)


def _normed(model: Plain) -> None:
    model.layer = nn.utils.parametrizations.weight_norm(model.layer)


@pytest.mark.parametrize("change", [lambda _: None, _renaming, _normed])
def test_hooks_of_torch_and_on_saving_are_no_reason(change: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    source, eager = Plain(), Plain().eval()
    for model in (source, eager):
        change(model)
    state = {k: v.clone() for k, v in [*source.named_parameters(), *source.named_buffers()]}
    save_file(state, tmp_path / "model.safetensors")
    eager.load_state_dict(state)
    with torch.device("meta"):
        model = Plain().eval()
        change(model)
    x = torch.randn(4, 8)
    with torch.no_grad():
        compiled = gascompile.compile(
            model,
            "64MiB",
            (x,),
            checkpoint=tmp_path / "model.safetensors",
            machine=MACHINE,
            cache_dir=tmp_path / "cache",
        )
        torch.testing.assert_close(compiled(x), eager(x))
