"""Timelines that add up in the head."""

from __future__ import annotations

import random

import pytest

from gascompile.core.machine import Link, Machine, Pipe, Place
from gascompile.core.reports import Stall, Timeline
from gascompile.core.steps import Compute, Prefetch, Release, Step, Wait
from gascompile.core.workload import OpSpec
from gascompile.cost_models.simulate.events import (
    COMPUTE,
    PREFETCH,
    WAIT,
    Event,
    EventProgram,
    steady_seconds,
)
from gascompile.cost_models.simulate.replay import replay, up_front_transfers

LINK = Link(source_tier="nvme", target_tier="cpu", bandwidth_bytes_per_s=10.0, latency_s=0.5)
TIERS = (Place.named("cpu", 100), Place.named("nvme", 100))
MACHINE = Machine(name="toy", places=TIERS, links=(LINK,))


def prefetch(op: int, tensor: str, size_bytes: int, address: int = 0, link: str = "") -> Prefetch:
    name = link or LINK.name
    return Prefetch(op=op, tensor=tensor, link=name, size_bytes=size_bytes, address=address)


def run(
    steps: list[Step], times: list[float], machine: Machine = MACHINE, *, repeats: bool = True
) -> Timeline:
    ops = [OpSpec(name=f"op{i}", time_s={}) for i in range(len(times))]
    return replay(steps, ops, times, machine, repeats=repeats)


def test_a_load_that_is_issued_at_its_wait_is_a_stall() -> None:
    steps: list[Step] = [
        prefetch(0, "a", 20),
        Wait(op=0, tensor="a", address=0),
        Compute(op=0),
        Release(op=1, tensor="a", address=0),
        Compute(op=1),
    ]
    timeline = run(steps, [1.0, 3.0])
    # 0.5 s latency and 2 s of transfer, then 4 s of ops.
    assert timeline.seconds == timeline.first_iteration_s == 6.5
    assert timeline.stalls == (Stall(op=0, tensor="a", time_s=2.5),)
    assert timeline.link_bytes == {"nvme->cpu": 20}
    assert timeline.link_busy_s == {"nvme->cpu": 2.5}


def test_a_load_for_the_next_iteration_hides_behind_the_end_of_this_one() -> None:
    steps: list[Step] = [
        Wait(op=0, tensor="a", address=0),
        Compute(op=0),
        Release(op=1, tensor="a", address=0),
        prefetch(1, "a", 20),
        Compute(op=1),
    ]
    timeline = run(steps, [1.0, 3.0])
    assert timeline.seconds == 4.0
    assert timeline.stalls == ()
    # The first iteration has nobody before it.
    assert timeline.first_iteration_s == 6.5


def test_a_link_serves_in_the_order_of_the_prefetches() -> None:
    steps: list[Step] = [
        prefetch(0, "late", 20, 0),
        prefetch(0, "early", 20, 100),
        Wait(op=0, tensor="early", address=100),
        Compute(op=0),
        Wait(op=1, tensor="late", address=0),
        Compute(op=1),
        Release(op=2, tensor="early", address=100),
        Release(op=2, tensor="late", address=0),
    ]
    assert run(steps, [1.0, 1.0], repeats=False).seconds == 7.0


def test_two_links_run_at_once_and_a_pipe_holds_them_back() -> None:
    second = Link(source_tier="disk", target_tier="cpu", bandwidth_bytes_per_s=10.0)
    first = Link(source_tier="nvme", target_tier="cpu", bandwidth_bytes_per_s=10.0)
    free = Machine(name="two", places=TIERS, links=(first, second))
    steps: list[Step] = [
        prefetch(0, "a", 20, 0),
        prefetch(0, "b", 20, 100, "disk->cpu"),
        Wait(op=0, tensor="a", address=0),
        Wait(op=0, tensor="b", address=100),
        Compute(op=0),
    ]
    assert run(steps, [1.0], free, repeats=False).seconds == 3.0
    shared = tuple(
        Link(
            source_tier=link.source_tier,
            target_tier="cpu",
            bandwidth_bytes_per_s=10.0,
            shared=("uplink",),
        )
        for link in free.links
    )
    pipe = Pipe(name="uplink", bandwidth_bytes_per_s=10.0)
    tight = Machine(name="tight", places=TIERS, links=shared, pipes=(pipe,))
    assert run(steps, [1.0], tight, repeats=False).seconds == 5.0


def test_residents_are_loaded_in_the_first_iteration_alone() -> None:
    ops = [OpSpec(name="f", time_s={}), OpSpec(name="g", time_s={}, reads=("r",))]
    steps = [Compute(op=0), Compute(op=1)]
    timeline = replay(
        steps, ops, [1.0, 1.0], MACHINE, repeats=True, resident_bytes={"r": 20, "unread": 9}
    )
    assert (timeline.seconds, timeline.first_iteration_s) == (2.0, 3.5)


def test_what_is_waited_for_before_it_is_prefetched_goes_up_front() -> None:
    steps: list[Step] = [
        Wait(op=0, tensor="a", address=0),
        Compute(op=0),
        Release(op=1, tensor="a", address=0),
        prefetch(1, "b", 1, 8),
        Wait(op=1, tensor="b", address=8),
        Compute(op=1),
        Release(op=2, tensor="b", address=8),
        prefetch(2, "a", 1, 0),
    ]
    assert up_front_transfers(steps) == [7]


def test_a_wait_without_a_prefetch_is_named() -> None:
    with pytest.raises(ValueError, match="'a'"):
        run([Wait(op=0, tensor="a", address=0), Compute(op=0)], [1.0])


def test_no_ops_take_no_time() -> None:
    assert run([], []).seconds == 0.0


@pytest.mark.parametrize("seed", range(40))
def test_the_steady_state_is_the_mean_of_a_long_run(seed: int) -> None:
    """Random cyclic programs: the eigenvalue is what thousands of iterations converge to."""
    chance = random.Random(seed)
    count = chance.randint(1, 5)
    events: list[Event] = []
    for copy in range(count):
        events += [(WAIT, copy, 0.0), (COMPUTE, copy, chance.random())]
        events.append((PREFETCH, copy, chance.random()))
    program = EventProgram(
        events=events,
        link_of=[chance.randrange(2) for _ in range(count)],
        pipes_of=[
            ((0, chance.random() / 2),) if chance.random() < 0.5 else () for _ in range(count)
        ],
        repeats=True,
        num_links=2,
        num_pipes=1,
    )
    rounds = 4000
    whole = EventProgram(
        events=[*((PREFETCH, c, s) for k, c, s in events if k == PREFETCH), *events * rounds],
        link_of=program.link_of,
        pipes_of=program.pipes_of,
        repeats=False,
        num_links=2,
        num_pipes=1,
    )
    assert steady_seconds(program) == pytest.approx(steady_seconds(whole) / rounds, rel=5e-3)
