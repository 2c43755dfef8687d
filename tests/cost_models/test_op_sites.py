"""Ops on two sites: times that can be added in the head, and the trace that says the same."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gascompile.core.machine import Link, Machine, Place
from gascompile.core.op_sites import plan_sites
from gascompile.core.steps import Compute, Offload, Prefetch, Release, Reload, Step, Wait
from gascompile.core.workload import OpSpec
from gascompile.cost_models.simulate.replay import replay, replay_plan
from gascompile.cost_models.simulate.trace import trace
from tests.passes.test_sites import chain, planned, towers

MACHINE = Machine(
    name="two sites",
    places=(Place.named("gpu", 1 << 30), Place.named("cpu", 1 << 30)),
    links=(
        Link(source_tier="cpu", target_tier="gpu", bandwidth_bytes_per_s=10.0),
        Link(source_tier="gpu", target_tier="cpu", bandwidth_bytes_per_s=10.0),
    ),
)


def op(name: str, seconds: float, reads: str, writes: str) -> OpSpec:
    return OpSpec(
        name=name,
        time_s={"gpu": seconds, "cpu": seconds},
        reads=(*reads.split(),),
        writes=(writes,),
    )


def seconds(ops: list[OpSpec], sites: str, steps: list[Step], *, repeats: bool = False) -> float:
    where = ["cpu" if letter == "c" else "gpu" for letter in sites]
    times = [spec.time_s["gpu"] for spec in ops]
    return replay(steps, ops, times, MACHINE, repeats=repeats, sites=where).seconds


def out(at: int, tensor: str, size_bytes: int) -> Offload:
    return Offload(op=at, tensor=tensor, link="gpu->cpu", size_bytes=size_bytes)


def back(at: int, tensor: str, size_bytes: int) -> Reload:
    return Reload(op=at, tensor=tensor, link="cpu->gpu", size_bytes=size_bytes)


def test_ops_that_need_nothing_of_each_other_run_at_once() -> None:
    ops = [op("a", 5.0, "x", "a"), op("b", 4.0, "x", "b"), op("c", 1.0, "a b", "c")]
    steps: list[Step] = [Compute(op=0), Compute(op=1), back(2, "b", 10), Wait(op=2, tensor="b")]
    steps.append(Compute(op=2))
    # The copy of b, one second, starts when both are there: at 5, where the accelerator is done with a.
    assert seconds(ops, "gcg", steps) == pytest.approx(5 + 1 + 1)
    assert seconds(ops, "ggg", [Compute(op=0), Compute(op=1), Compute(op=2)]) == pytest.approx(10)


def test_a_copy_out_starts_when_it_is_made_and_holds_both_at_its_end() -> None:
    ops = [op("a", 2.0, "x", "a"), op("b", 3.0, "x", "b"), op("c", 4.0, "a", "c")]
    early: list[Step] = [
        *(Compute(op=0), out(1, "a", 10), Compute(op=1), Wait(op=2, tensor="a"), Compute(op=2)),
        *(back(3, "c", 20), Wait(op=3, tensor="c")),
    ]
    # a is out at 3, where c begins on the processor; b ends at 5, c at 7, its copy at 9.
    assert seconds(ops, "ggc", early) == pytest.approx(9)
    late = [early[0], early[2], replace(out(2, "a", 10), op=2), *early[3:]]
    # Asked for after b only, a is out at 6, and the accelerator waits, too.
    assert seconds(ops, "ggc", late) == pytest.approx(6 + 4 + 2)


def test_what_an_op_elsewhere_changes_is_fetched_when_it_is_done() -> None:
    ops = [
        op("a", 1.0, "x w", "g"),
        OpSpec(name="u", time_s={"gpu": 4.0, "cpu": 4.0}, reads=("g", "w"), writes=("w",)),
        op("b", 1.0, "x", "b"),
        op("c", 1.0, "w b", "c"),
    ]
    steps: list[Step] = [
        *(Compute(op=0), out(1, "g", 20), Wait(op=1, tensor="g", site="cpu"), Compute(op=1)),
        *(Compute(op=2), Wait(op=3, tensor="g"), back(3, "w", 30), Wait(op=3, tensor="w")),
        Compute(op=3),
    ]
    times = [spec.time_s["gpu"] for spec in ops]
    where = ["gpu", "cpu", "gpu", "gpu"]

    def took(steps: list[Step], ops: list[OpSpec]) -> float:
        more = replay(steps, ops, times, MACHINE, repeats=False, sites=where, lasting={"w"})
        return more.seconds

    # g is there at 3, w is changed at 7 and back at 10; b ends at 2.
    assert took(steps, ops) == pytest.approx(11)
    # Waited for by the accelerator at once, g holds b up as well; nothing else is later for it.
    held = [*steps[:2], Wait(op=1, tensor="g"), *steps[3:5], *steps[6:]]
    assert took(held, ops) == pytest.approx(11)
    long = [replace(spec, time_s={"gpu": 9.0}) if spec.name == "b" else spec for spec in ops]
    times[2] = 9.0
    # b ends at 10, where w is asked for.
    assert took(steps, long) == pytest.approx(10 + 3 + 1)
    assert took(held, long) == pytest.approx(12 + 3 + 1)


def test_a_copy_between_sites_goes_beside_weights_which_come_later_for_it() -> None:
    ops = [op("a", 1.0, "x", "a"), op("b", 1.0, "a w", "b")]
    load = Prefetch(op=0, tensor="w", link="cpu->gpu", size_bytes=100, address=0)
    steps: list[Step] = [
        *(load, Compute(op=0), back(1, "a", 10), Wait(op=1, tensor="w", address=0)),
        *(Wait(op=1, tensor="a"), Compute(op=1), Release(op=2, tensor="w", address=0)),
    ]
    # The weight takes 10 seconds from 0 on; a does not queue behind it.
    assert seconds(ops, "cg", steps) == pytest.approx(11)
    assert seconds(ops, "cg", steps, repeats=True) == pytest.approx(11)
    small = [replace(load, size_bytes=5), *steps[1:]]
    assert seconds(ops, "cg", small) == pytest.approx(1 + 1 + 1)


@pytest.mark.parametrize("cpu_s", [0.5, 1.0, 3.0])
def test_the_trace_says_what_the_replay_says(cpu_s: float) -> None:
    plans = [
        planned(towers(3, gpu_s=1.0, cpu_s=cpu_s), 2.0, 2),
        planned(chain(6, gpu_s=1.0, cpu_s=cpu_s), 5.0, 1),
    ]
    for plan in plans:
        assert plan_sites(plan) is not None
        found = trace(plan)
        assert found.seconds == pytest.approx(replay_plan(plan).seconds)
        assert max(span.ended_s for span in found.ops) <= found.seconds + 1e-9
        by_site: dict[str, float] = {}
        for span in found.ops:
            # One after the other at each site.
            assert span.begun_s >= by_site.get(span.site, 0.0) - 1e-9
            by_site[span.site] = span.ended_s
        assert found.memory["cpu"].peak_bytes <= plan.peak_bytes["cpu"]
