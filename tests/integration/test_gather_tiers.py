"""Rows from RAM on the emulated accelerator: eager's bits, and the memory that the plan says."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import gascompile
from gascompile.core.budget import Budget
from gascompile.core.plan import Plan
from gascompile.core.sizes import GIB, MIB


class Looked(nn.Module):
    """A table of 8 MiB of which most rows are asked for, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8192, 256)
        self.layer = nn.Linear(256, 64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(self.table(ids))
        return out


def test_rows_come_from_ram_bit_for_bit(tmp_path: Path) -> None:
    # Threads that read have pinned memory; how many, and how much of it, was measured on this machine.
    cpu_bytes = GIB
    torch.manual_seed(0)
    model = Looked().eval()
    ids = torch.randint(0, 8192, (4, 700))
    budget = Budget(gpu=7 * MIB, cpu=cpu_bytes)
    with gascompile.compile(
        model, budget, (ids,), machine="emulated", cache_dir=tmp_path, fuse="off"
    ) as compiled:
        rows = next(op for op in compiled.plan.workload.ops if op.gathers)
        assert rows.gather_tier == "cpu"
        for seed in range(2):
            torch.manual_seed(seed)
            other = torch.randint(0, 8192, (4, 700))
            with torch.no_grad():
                assert torch.equal(compiled(other), model(other))
        run = compiled.last_run
        assert run is not None
        assert run.peak_bytes["cpu"] <= cpu_bytes
        link = "cpu->gpu"
        assert compiled.plan.link_bytes[link] >= 4 * 700 * 256 * 4
        # Whether they came from the drive or from RAM: each on the link that the plan says.
        moved = {name: size for name, size in run.link_bytes.items() if size}
        planned = {name: size for name, size in compiled.plan.link_bytes.items() if size}
        assert moved == planned
        compiled.plan.save(tmp_path / "plan.json")
        assert Plan.load(tmp_path / "plan.json") == compiled.plan
