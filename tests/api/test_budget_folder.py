"""A budget's folder on the drive is where what leaves memory, and plans, are kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import gascompile


def test_what_leaves_memory_lies_where_the_budget_says(tmp_path: Path) -> None:
    model, x, drive = nn.Sequential(nn.Linear(64, 64)), torch.randn(2, 64), tmp_path / "drive"
    budget = gascompile.Budget(cpu="1GiB", nvme_path=str(drive))
    assert repr(budget).endswith(f", nvme_path={str(drive)!r})")
    with gascompile.compile(model, budget, (x,), machine="cpu-nvme") as compiled:
        assert torch.equal(compiled(x), model(x))
        assert any(drive.rglob("*.json")), "the plan is kept there"
    with pytest.raises(ValueError, match="lies in one folder: leave out nvme_path"):
        gascompile.compile(model, budget, (x,), machine="cpu-nvme", cache_dir=tmp_path / "other")
