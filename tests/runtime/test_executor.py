"""A plan's run equals eager, whatever the plan, the timing and what went wrong before."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.runtime.toys import LINK, make_plan, mlp


@pytest.mark.parametrize("seed", range(12))
def test_streamed_equals_eager(tmp_path: Path, seed: int) -> None:
    toy = mlp(tmp_path)
    residents = frozenset(n for i, n in enumerate(toy.weights) if (seed >> (i % 4)) & 1)
    plan = make_plan(toy.workload, residents=residents, seed=seed)
    with toy.session(plan) as session:
        executor = toy.executor(session, plan)
        twin = toy.executor(session, plan, overlap=False)
        for run in range(4):
            x = torch.randn(4, 96)
            for ours, eager in zip(executor.run(x), toy.eager(x), strict=True):
                torch.testing.assert_close(ours, eager)
            report = executor.last_run
            assert report is not None
            loaded = sum(toy.sources[n].size_bytes for n in residents) if not run else 0
            assert report.link_bytes.get(LINK, 0) == plan.link_bytes[LINK] + loaded
        outputs = executor.run(x)
        for ours, other in zip(outputs, twin.run(x), strict=True):
            assert torch.equal(ours, other)
