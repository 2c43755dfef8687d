"""A first call loads weights before its plan has kernels; what it opened for a plan that was not made is closed."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import gascompile
from gascompile.api.unit import Unit
from gascompile.core.config import CompileConfig
from gascompile.core.errors import UnsupportedOpError
from tests.waiting import eventually

_MODULE = "gascompile.api.compile.fused_unit"


class _Net(nn.Module):
    """Two layers, whose weights fit the budget together."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(256, 256), nn.Linear(256, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run it."""
        found: torch.Tensor = self.second(self.first(x).relu())
        return found


def _compiled(tmp_path: Path) -> tuple[_Net, Any]:
    """Return a model, and what is compiled of it without its values."""
    torch.manual_seed(0)
    net = _Net().eval()
    save_file(dict(net.state_dict()), tmp_path / "net.safetensors")
    bare = copy.deepcopy(net).to("meta")
    made = gascompile.compile(
        bare, "4MiB", checkpoint=tmp_path / "net.safetensors", cache_dir=tmp_path / "cache"
    )
    return net, made


def test_weights_arrive_before_there_are_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, made = _compiled(tmp_path)
    x = torch.randn(8, 256)
    arrived: list[bool] = []

    def late(unit: Unit, _config: CompileConfig) -> Unit:
        session = made._gascompile.session
        first = session.resident("first.weight")
        arrived.append(eventually(lambda: torch.equal(first, net.first.weight)))
        return unit

    monkeypatch.setattr(_MODULE, late)
    with made:
        assert torch.equal(made(x), net(x))
        assert arrived == [True]
        # The second plan's memory is the first one's: nothing is opened before that is closed.
        session = made._gascompile.session
        monkeypatch.setattr(_MODULE, lambda unit, _config: _still(made, session, unit))
        y = torch.randn(3, 4, 256)
        assert torch.equal(made(y), net(y))
        assert made._gascompile.session is not session


def _still(made: Any, session: object, unit: Unit) -> Unit:
    assert made._gascompile.session is session
    return unit


def test_what_was_opened_for_a_plan_that_is_not_made_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, made = _compiled(tmp_path)
    x = torch.randn(8, 256)
    opened: list[Any] = []

    def failing(_unit: Unit, _config: CompileConfig) -> Unit:
        opened.append(made._gascompile.session)
        raise UnsupportedOpError("no kernels today")

    with monkeypatch.context() as patch:
        patch.setattr(_MODULE, failing)
        with pytest.raises(UnsupportedOpError, match="today"):
            made(x)
    assert opened[0] is not None
    assert not opened[0].is_open
    assert made._gascompile.session is None
    with made:
        assert torch.equal(made(x), net(x))
