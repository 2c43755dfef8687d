"""Ranges in a profiler's trace: one for each step of the plan, under its name, and none without a profiler."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from gascompile.core.steps import Compute, Prefetch, Wait
from gascompile.runtime.run.profiled import PREFIX
from tests.runtime.toys import make_plan, mlp


def names_of(recorded: profile) -> Counter[str]:
    return Counter(e.name for e in recorded.events() or () if e.name.startswith(PREFIX))


def test_each_step_of_the_plan_has_a_range_of_its_name(tmp_path: Path) -> None:
    toy = mlp(tmp_path, repeats=False)
    kept = frozenset({"layers.1.weight"})
    plan = make_plan(toy.workload, residents=kept, seed=3)
    x = torch.randn(4, 96)
    with toy.session(plan) as session:
        executor = toy.executor(session, plan)
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            outputs = executor.run(x)
        found = names_of(recorded)
        for ours, eager in zip(outputs, toy.eager(x), strict=True):
            torch.testing.assert_close(ours, eager)
        runs = Counter(
            f"{PREFIX} run {plan.ops[s.op].name}" for s in plan.steps if isinstance(s, Compute)
        )
        moves = Counter(
            f"{PREFIX} {s.TAG} {s.tensor}" for s in plan.steps if isinstance(s, Prefetch | Wait)
        )
        assert len(moves) > 4
        assert {name: found[name] for name in runs | moves} == dict(runs | moves)
        assert found[f"{PREFIX} wait for resident weights"] >= 1
        # A range holds the kernels of its op.
        product = next(
            e for e in recorded.events() or () if e.name.startswith(f"{PREFIX} run linear")
        )
        assert any("linear" in child.name for child in product.cpu_children)


def test_a_profiler_changes_neither_results_nor_later_runs(tmp_path: Path) -> None:
    toy = mlp(tmp_path)
    plan = make_plan(toy.workload, seed=1)
    x = torch.randn(4, 96)
    with toy.session(plan) as session:
        executor = toy.executor(session, plan)
        before = executor.run(x)
        with profile(activities=[ProfilerActivity.CPU]) as inside:
            during = executor.run(x)
            again = executor.run(x)
        with profile(activities=[ProfilerActivity.CPU]) as outside:
            pass
        after = executor.run(x)
    for others in (during, again, after):
        assert all(torch.equal(a, b) for a, b in zip(before, others, strict=True))
    assert set(names_of(inside).values()) != {0}
    assert not names_of(outside)
    assert executor.last_run is not None
