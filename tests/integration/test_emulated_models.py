"""Models on the emulated accelerator, full and smallest budget: results as eager, bytes as planned, budget kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import gascompile
from gascompile.api.device_budget import placed_bytes
from gascompile.runtime.memory.pinned import pinned_bytes
from tests import zoo
from tests.zoo import assert_same, eager

MACHINE = "emulated"
NAMES = ("convnet", "bert")


@pytest.mark.parametrize("name", NAMES)
def test_equal_to_eager_in_the_accelerators_budget(name: str, cache: Path) -> None:
    model, inputs = zoo.make(name)
    expected = eager(model, inputs)
    with pytest.raises(gascompile.InfeasiblePlanError) as error:
        gascompile.compile(model, 0, example_inputs=inputs, machine=MACHINE, cache_dir=cache)
    smallest = error.value.required_bytes
    whole = gascompile.plan(model, example_inputs=inputs, machine=MACHINE, cache_dir=cache)
    # Inputs are copied to the accelerator, too.
    full = whole.peak_bytes["gpu"] + placed_bytes(whole.workload, whole.machine)
    assert smallest < full
    for budget in (full, smallest):
        with gascompile.compile(
            model, budget, example_inputs=inputs, machine=MACHINE, cache_dir=cache
        ) as compiled:
            for _ in range(2):
                assert_same(compiled(**inputs), expected)
                report = compiled.last_run
                assert report is not None
                assert 0 < report.peak_bytes["gpu"] <= budget
                assert report.peak_bytes["cpu"] == pinned_bytes(compiled.plan)
            assert report is not None
            moved = {link: count for link, count in report.link_bytes.items() if count}
            planned = {link: count for link, count in compiled.plan.link_bytes.items() if count}
            assert moved == planned
            assert bool(moved) == (budget == smallest)


def test_the_hosts_budget_holds_what_bytes_pass_through(cache: Path) -> None:
    model, inputs = zoo.make("tied")
    options: dict[str, Any] = {
        "example_inputs": inputs,
        "machine": MACHINE,
        "cache_dir": cache,
    }
    with pytest.raises(gascompile.InfeasiblePlanError, match="pinned memory for") as error:
        gascompile.compile(model, gascompile.Budget(cpu=1), **options)
    assert error.value.tier == "cpu"
    passing = error.value.required_bytes
    with pytest.raises(gascompile.InfeasiblePlanError) as least:
        gascompile.compile(model, 0, **options)
    homes = set()
    for room in (0, 20_000, 1 << 20):
        budget = gascompile.Budget(gpu=least.value.required_bytes, cpu=passing + room)
        with gascompile.compile(model, budget, **options) as compiled:
            assert compiled.plan.budget_bytes["cpu"] == passing + room
            assert_same(compiled(**inputs), eager(model, inputs))
            report = compiled.last_run
            assert report is not None
            assert passing <= report.peak_bytes["cpu"] <= passing + room
            homes.add(report.peak_bytes["cpu"])
    assert min(homes) == passing < max(homes)
