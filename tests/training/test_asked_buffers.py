"""What a loss asks of buffers besides their values: a change of it is no change that an open step leaves unseen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gascompile
from gascompile.core.errors import OpenStepError, UnsupportedOpError


class _Kept(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("sc", torch.ones(3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sc: Any = self.sc
        asked = (sc is None, hasattr(self, "zz"), len(self.state_dict()))
        facts = () if sc is None else (sc.shape, sc.stride(), sc.dtype, sc.requires_grad)
        y: torch.Tensor = self.linear(x)
        return y * (len(str((*asked, *facts))) % 7)


def _loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch).pow(2).mean()
    return loss


@pytest.mark.parametrize(
    "edit",
    [
        lambda m: setattr(m, "sc", torch.ones(5)),
        lambda m: setattr(m, "sc", None),
        lambda m: setattr(m.sc, "data", torch.ones(9)),
        lambda m: setattr(m.sc, "data", m.sc.data.double()),
        lambda m: m.sc.resize_(1, 3),
        lambda m: m.sc.t_(),
        lambda m: m.sc.requires_grad_(),
        lambda m: m.register_buffer("zz", None),
        lambda m: m.register_buffer("zz", torch.ones(2)),
        lambda m: m._non_persistent_buffers_set.add("sc"),
    ],
)
def test_an_edit_is_refused(
    edit: Callable[[Any], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GASCOMPILE_CACHE_DIR", str(tmp_path / "cache"))
    model, batch = _Kept(), torch.ones(2, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gascompile.compile_step(model, _loss, optimizer, "64MiB", example_batch=batch) as step:
        step(batch)

        def go_on() -> None:
            edit(model)
            step(batch)

        with pytest.raises((OpenStepError, UnsupportedOpError)):
            go_on()
