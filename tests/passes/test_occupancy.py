"""The bound from what shares the arena: by hand, and against every placement of small workloads."""

from __future__ import annotations

import math
from itertools import product

import pytest
from hypothesis import given, settings

from gascompile.core.budget import Budget
from gascompile.core.machine import Machine
from gascompile.core.sizes import reserve_bytes
from gascompile.core.workload import Workload
from gascompile.passes.bounds.occupancy import occupancy
from gascompile.passes.model.problem import Placement, Problem, problem
from gascompile.passes.search.search import best_staging
from tests.passes.planning import (
    UNIT,
    budget_at,
    cpu_machine,
    gpu_machine,
    machines,
    shares,
    workload,
    workloads,
)

SLOT = reserve_bytes(UNIT)


def bound(task: Workload, machine: Machine, arena_bytes: int) -> float:
    asked = problem(task, machine, Budget.of(arena_bytes, machine))
    return occupancy(asked, arena_bytes, enough_s=math.inf, time_limit_s=30)


def test_what_fits_costs_no_more_than_its_ops() -> None:
    assert bound(workload(["a", "b"], seconds=0.5), cpu_machine(), 2 * SLOT) == 1.0


def test_in_one_slot_ops_and_loads_take_turns() -> None:
    task = workload(list("abcd"), seconds=0.5)
    assert bound(task, cpu_machine(), SLOT) == pytest.approx(4 * 1.0 + 4 * 0.5, rel=1e-5)


def test_in_two_slots_loads_run_beside_ops_or_one_weight_stays() -> None:
    task = workload(list("abcd"), seconds=0.5)
    # Streaming all takes 4 s. With one resident the others share a slot: 3 s of loads, 1.5 s of ops.
    assert bound(task, cpu_machine(), 2 * SLOT) == pytest.approx(4.0, rel=1e-5)
    slow = workload(list("abcd"), seconds=0.2)
    # Now the resident's way is faster: 3 s of loads and three ops of 0.2 s.
    assert bound(slow, cpu_machine(), 2 * SLOT) == pytest.approx(3.6, rel=1e-5)


def test_a_long_op_lets_through_no_more_than_the_region_holds() -> None:
    task = workload([*"abcdef", ""], seconds=[0.0] * 6 + [10.0])
    # Beside the op two loads, or one and a resident; four more need a second each.
    assert bound(task, cpu_machine(), 2 * SLOT) == pytest.approx(14.0, rel=5e-3)


def test_two_links_need_room_for_two() -> None:
    task = workload(list("abcdefgh"), seconds=0.0)
    # In one slot the links take turns, at best all over the faster one, two units a second.
    assert bound(task, gpu_machine(), SLOT) == pytest.approx(4.0, rel=1e-5)
    # In two slots both carry, three units a second; one resident leaves seven for one link.
    assert bound(task, gpu_machine(), 2 * SLOT) == pytest.approx(8 / 3, rel=1e-5)


def test_what_one_tier_cannot_hold_comes_from_the_other() -> None:
    task = workload(list("abcdefgh"), seconds=0.0)
    small = gpu_machine(cpu_bytes=2 * UNIT)
    # Six over the slow link; or one resident, and in the slot that is left five and two take turns.
    assert bound(task, small, 2 * SLOT) == pytest.approx(6.0, rel=1e-5)


def test_the_bound_is_kept_when_the_clock_ends_the_search() -> None:
    task = workload(list("abcd"), seconds=0.5)
    asked = problem(task, cpu_machine(), Budget(cpu=SLOT))
    assert occupancy(asked, SLOT, enough_s=math.inf, time_limit_s=0.0) == asked.compute_s


@settings(max_examples=40)
@given(workloads(max_weights=4, max_ops=7), machines(), shares())
def test_no_schedule_beats_the_bound(task: Workload, machine: Machine, share: float) -> None:
    asked = problem(task, machine, Budget.of(budget_at(share, task, machine), machine))
    arena_bytes = asked.arena_limit_bytes
    bound_s = occupancy(asked, arena_bytes, enough_s=math.inf, time_limit_s=30)
    homes = (None, *range(len(asked.links)))
    for link_of in product(homes, repeat=len(asked.weights)):
        placement = Placement(strategy="any", link_of=link_of)
        if not _fits(asked, placement):
            continue
        found = best_staging(asked, placement, arena_bytes)
        if found is not None:
            assert bound_s <= found.seconds * (1 + 1e-9)


def _fits(asked: Problem, placement: Placement) -> bool:
    held = dict.fromkeys(asked.room_bytes, 0)
    for weight, link in zip(asked.weights, placement.link_of, strict=True):
        if link is not None:
            held[asked.links[link].source_tier] += weight.size_bytes
    return all(size <= asked.room_bytes[tier] for tier, size in held.items())
