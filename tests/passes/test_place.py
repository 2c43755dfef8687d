"""The integer program: its bound is below every schedule, and its endings are told apart."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings

from gascompile.core.budget import Budget
from gascompile.core.machine import Link, Machine
from gascompile.core.sizes import reserve_bytes
from gascompile.core.workload import Workload
from gascompile.passes.bounds.shadow_prices import Solution
from gascompile.passes.model.problem import Placement, Problem, problem
from gascompile.passes.search.place import place
from gascompile.passes.search.search import best_staging
from tests.passes.planning import (
    UNIT,
    budget_at,
    cpu_machine,
    gpu_machine,
    llama,
    machines,
    shares,
    workload,
    workloads,
)

SLOT = reserve_bytes(UNIT)


def asked(task: Workload, machine: Machine, budget_bytes: int) -> Problem:
    return problem(task, machine, Budget.of(budget_bytes, machine))


def test_everything_that_fits_stays() -> None:
    # A load takes longer than both ops: behind longer ones, one that is for nothing would cost nothing.
    task = asked(workload(["a", "b"], seconds=0.25), cpu_machine(), 2 * SLOT)
    found = place(task, 2 * SLOT, time_limit_s=5, mip_gap=0.0)
    assert found.placement is not None
    assert found.placement.link_of == (None, None)
    assert found.bound_s == pytest.approx(0.5, rel=1e-5)


def test_one_slot_bounds_the_time_by_loads_and_ops_in_turn() -> None:
    task = asked(workload(["a", "b"]), cpu_machine(), SLOT)
    found = place(task, SLOT, time_limit_s=5, mip_gap=0.0)
    assert found.placement is not None
    assert found.placement.streamed == (0, 1)
    assert found.bound_s == pytest.approx(4.0, rel=1e-3)


def test_the_cheaper_weight_stays() -> None:
    task = asked(workload(["a", "b", "c"], sizes={"b": 2 * UNIT}, seconds=0.0), cpu_machine(), 1)
    found = place(task, 3 * SLOT, time_limit_s=5, mip_gap=0.0)
    assert found.placement is not None
    # Streaming the large one needs two slots and 2 s; streaming the others through one slot, too.
    assert found.bound_s == pytest.approx(2.0, rel=1e-2)


def test_an_arena_below_the_least_has_no_placement() -> None:
    task = asked(workload(["ab", "c"]), cpu_machine(), SLOT)
    found = place(task, SLOT, time_limit_s=5, mip_gap=0.0)
    assert (found.placement, found.bound_s, found.timed_out) == (None, float("inf"), False)


def test_a_small_cpu_tier_is_respected() -> None:
    machine = gpu_machine(cpu_bytes=2 * UNIT)
    task = asked(workload(list("abcdef"), seconds=0.0), machine, 2 * SLOT)
    found = place(task, 2 * SLOT, time_limit_s=5, mip_gap=0.0)
    assert found.placement is not None
    over_cpu = [link for link in found.placement.link_of if link == 0]
    assert task.links[0].name == "cpu->gpu"
    assert len(over_cpu) <= 2


@settings(max_examples=25)
@given(workloads(max_weights=4, max_ops=7), machines(), shares())
def test_no_schedule_beats_the_bound(task: Workload, machine: Machine, share: float) -> None:
    """Try every home of every weight with every size of the staging region."""
    question = asked(task, machine, budget_at(share, task, machine))
    arena_bytes = question.arena_limit_bytes
    bounds = [
        place(question, arena_bytes, time_limit_s=5, mip_gap=0.0, relaxed=relaxed).bound_s
        for relaxed in (True, False)
    ]
    choices: list[tuple[int | None, ...]] = [()]
    for _ in question.weights:
        choices = [(*c, link) for c in choices for link in (None, *range(len(question.links)))]
    for link_of in choices:
        pairs = [
            (i, j)
            for i, link in enumerate(link_of)
            for j in range(len(question.weights[i].uses) - 1)
            if link is not None
        ]
        for kept in combinations(pairs, min(1, len(pairs))):
            placement = Placement(strategy="any", link_of=link_of, kept=frozenset(kept))
            found = best_staging(question, placement, arena_bytes)
            if found is not None and fits(question, placement):
                assert max(bounds) <= found.seconds * (1 + 1e-9)


def fits(question: Problem, placement: Placement) -> bool:
    held = dict.fromkeys(question.room_bytes, 0)
    for weight, link in zip(question.weights, placement.link_of, strict=True):
        if link is not None:
            held[question.links[link].source_tier] += weight.size_bytes
    return all(size <= question.room_bytes[tier] for tier, size in held.items())


def test_a_large_model_is_bounded_in_seconds() -> None:
    task, machine = llama(80, 0.0115e-3)
    question = asked(task, machine, 6 << 30)
    found = place(question, question.arena_limit_bytes, time_limit_s=20, mip_gap=0.03, relaxed=True)
    assert found.bound_s > 0.9 * (14.6e9 - (6 << 30)) / 3e9


@settings(max_examples=25)
@given(workloads(max_weights=6), machines(), shares())
def test_prices_are_the_slopes_of_the_relaxed_time(
    task: Workload, machine: Machine, share: float
) -> None:
    """The time is convex in the arena: the price lies between the slopes on both sides."""
    question = asked(task, machine, budget_at(share, task, machine))
    arena_bytes = question.arena_limit_bytes
    step = max(8192, arena_bytes // 50)

    def relaxed(size_bytes: int, of: Problem = question) -> Solution:
        return place(of, size_bytes, time_limit_s=5, mip_gap=0.0, relaxed=True)

    here = relaxed(arena_bytes)
    more, less = relaxed(arena_bytes + step), relaxed(arena_bytes - step)
    noise = 3e-6 * here.bound_s
    assert here.memory_price_s_per_byte >= 0
    assert here.bound_s - more.bound_s <= here.memory_price_s_per_byte * step + noise
    assert less.bound_s - here.bound_s >= here.memory_price_s_per_byte * step - noise
    assert set(here.link_price_s) == {link.name for link in question.links}
    for link in question.links:
        faster, slower = (
            relaxed(arena_bytes, asked(task, _with_rate(machine, link, factor), 0)).bound_s
            for factor in (1.01, 0.99)
        )
        assert here.bound_s - faster <= here.link_price_s[link.name] * 0.011 + noise
        assert slower - here.bound_s >= here.link_price_s[link.name] * 0.009 - noise


def _with_rate(machine: Machine, link: Link, factor: float) -> Machine:
    rate = link.bandwidth_bytes_per_s * factor
    links = tuple(
        replace(other, bandwidth_bytes_per_s=rate) if other == link else other
        for other in machine.links
    )
    return replace(machine, links=links)
