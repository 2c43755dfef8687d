"""Differences between plans that were written by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from gascompile.core.budget import Budget
from gascompile.core.machine import Machine
from gascompile.core.steps import Compute, Release, Step, Wait
from gascompile.core.workload import TensorKind, Workload
from gascompile.passes.explain.diff import Change, diff
from gascompile.passes.plan.make_plan import make_plan
from tests.cost_models.hand_plans import MB, fetch, hand_plan, machine, streaming, training
from tests.passes.planning import (
    budget_at,
    cpu_machine,
    gpu_machine,
    machines,
    workload,
    workloads,
)
from tests.scale import SCALE


def test_the_same_plan() -> None:
    found = diff(streaming(), streaming())
    assert found.identical
    assert found.change_s == 0


def test_a_resident_weight_changes_home_moves_and_time() -> None:
    # w1 stays, and w0 is fetched while op1 runs: 4 s for it, of which op1 hides none (no room before).
    kept = hand_plan(
        {"w0": 4, "w1": 2},
        [("w0", "", 1.0), ("w1", "", 1.0)],
        [Compute(op=0), Compute(op=1)],
        addresses={"w0": 0, "w1": 5 * MB // 4096 * 4096},
    )
    found = diff(streaming(), kept)
    assert found.same_workload
    assert found.change_s == pytest.approx(2.0 - 8.0)
    homes = [(h.tensor, h.size_bytes, h.before, h.after) for h in found.homes]
    assert homes == [("w0", 4 * MB, "cpu", "gpu"), ("w1", 2 * MB, "cpu", "gpu")]
    moves = [(m.tensor, m.before, m.after) for m in found.moves]
    assert moves == [("w0", {"cpu->gpu": 4 * MB}, {}), ("w1", {"cpu->gpu": 2 * MB}, {})]
    assert found.summary[0] == Change(name="predicted", unit="s", before=8.0, after=2.0)
    moved = Change(name="moved over cpu->gpu", unit="bytes", before=6 * MB, after=0)
    assert moved in found.summary
    assert found.sites == ()


def test_sites_and_reruns() -> None:
    plan = training()
    elsewhere = replace(plan, ops=(replace(plan.ops[0], site="cpu", time_s=8.0), *plan.ops[1:]))
    (site,) = diff(plan, elsewhere).sites
    assert (site.op, site.before, site.after, site.after_s) == ("op0", "gpu", "cpu", 8.0)
    without = [step for step in plan.steps if type(step).__name__ != "Recompute"]
    moves = diff(plan, replace(plan, steps=tuple(without))).moves
    assert [(m.tensor, m.before, m.after) for m in moves] == [("a1", {"recompute": 2 * MB}, {})]


def test_the_tier_that_computes_is_not_a_change_of_home() -> None:
    task = workload("ab")
    here = make_plan(task, cpu_machine(), Budget(), fingerprint={})
    there = make_plan(task, gpu_machine(), Budget(), fingerprint={})
    found = diff(here, there)
    assert here.tensors["a"].home != there.tensors["a"].home
    assert found.homes == ()
    assert {site.after for site in found.sites} == {"gpu"}


def test_links_of_machines_of_one_name() -> None:
    plan = streaming()
    faster = replace(plan, machine=machine(in_bandwidth=2 * MB))
    (change,) = diff(plan, faster).summary
    assert change.name == "links"
    assert "cpu->gpu 0.001 GB/s" in str(change.before)
    assert "cpu->gpu 0.002 GB/s" in str(change.after)


def _using_w0() -> list[Step]:
    return [
        Wait(op=0, tensor="w0", address=0),
        Compute(op=0),
        Release(op=1, tensor="w0", address=0),
    ]


def test_another_workload_is_compared_by_name() -> None:
    steps = _using_w0()
    other = hand_plan(
        {"w0": 4, "w9": 1},
        [("w0", "", 1.0), ("w9", "", 1.0), ("", "", 1.0)],
        [fetch(0, "w0", 4), *steps, Compute(op=1), Compute(op=2)],
        homes={"w0": "cpu"},
        addresses={"w9": 8 * MB // 4096 * 4096},
        repeats=False,
    )
    found = diff(streaming(), other)
    assert not found.same_workload
    assert not found.identical
    assert found.only_before == ("w1",)
    assert found.only_after == ("w9", "op2")
    assert found.homes == ()


def test_tiles_are_compared_as_the_weight_they_are_part_of() -> None:
    steps = _using_w0()
    whole = hand_plan(
        {"w0": 4}, [("w0", "", 2.0)], [*steps, fetch(1, "w0", 4)], homes={"w0": "cpu"}
    )
    tiles = hand_plan(
        {"w0[0:1]": 3, "w0[1:2]": 1},
        [("w0[0:1]", "", 1.5), ("w0[1:2]", "", 0.5)],
        [
            Compute(op=0),
            fetch(1, "w0[1:2]", 1, 4 * MB // 4096 * 4096),
            Wait(op=1, tensor="w0[1:2]", address=4 * MB // 4096 * 4096),
            Compute(op=1),
            Release(op=2, tensor="w0[1:2]", address=4 * MB // 4096 * 4096),
        ],
        homes={"w0[1:2]": "cpu"},
        addresses={"w0[0:1]": 0},
    )
    names = tuple(replace(op, name=f"op0[{i}:{i + 1}]") for i, op in enumerate(tiles.ops))
    found = diff(whole, replace(tiles, ops=names))
    assert found.same_workload
    assert found.change_s == pytest.approx(3.0 - 6.0)
    assert [(h.tensor, h.before, h.after) for h in found.homes] == [
        ("w0", "cpu", "cpu 25%, gpu 75%")
    ]
    assert [m.after for m in found.moves] == [{"cpu->gpu": MB}]
    assert found.sites == ()
    assert Change(name="form", unit="", before="whole weights", after="2 tiles") in found.summary


@settings(max_examples=12 * SCALE, deadline=None)
@given(task=workloads(), on=machines())
def test_backwards_is_the_opposite(task: Workload, on: Machine) -> None:
    plans = [
        make_plan(
            task, on, Budget.of(budget_at(share, task, on), on), fingerprint={}, time_limit_s=1.0
        )
        for share in (0.0, 0.6)
    ]
    there, back = diff(*plans), diff(*reversed(plans))
    assert there.change_s == -back.change_s
    assert there.identical == back.identical
    assert {(h.tensor, h.before, h.after) for h in there.homes} == {
        (h.tensor, h.after, h.before) for h in back.homes
    }
    # Weights alone have a choice here; what lives elsewhere also moves another number of times.
    assert {h.kind for h in there.homes} <= {TensorKind.WEIGHT}
