"""A plan that cannot run as it claims is refused; an interpreter of its own says which ones cannot."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gascompile.core.budget import Budget
from gascompile.core.errors import PlanVerificationError
from gascompile.core.machine import Machine
from gascompile.core.plan import Certificate, OpPlan, Plan, TensorPlan
from gascompile.core.sizes import reserve_bytes
from gascompile.core.steps import Compute, Prefetch, Release, Step, Wait
from gascompile.core.workload import TensorKind, Workload
from gascompile.passes.plan.make_plan import make_plan
from gascompile.passes.verify.walk import verify
from tests.passes.planning import (
    PAGE,
    UNIT,
    breaks,
    budget_at,
    cpu_machine,
    gpu_machine,
    machines,
    shares,
    workload,
    workloads,
)
from tests.scale import SCALE

SLOT = reserve_bytes(UNIT)
Edited = TypeVar("Edited", Step, TensorPlan, Plan, Certificate)
Mutation = Callable[[Plan, random.Random], Plan | None]


def with_steps(plan: Plan, steps: Sequence[Step]) -> Plan:
    """Return the plan with other steps, their op indices and link bytes made to match."""
    renumbered: list[Step] = []
    upcoming = 0
    moved = dict.fromkeys(plan.link_bytes, 0)
    for step in steps:
        renumbered.append(dataclasses.replace(step, op=upcoming))
        upcoming += isinstance(step, Compute)
        if isinstance(step, Prefetch) and step.link in moved:
            moved[step.link] += step.size_bytes
    return dataclasses.replace(plan.with_accounts(link_bytes=moved), steps=tuple(renumbered))


def changed(value: Edited, name: str, new: object) -> Edited:
    """Return a frozen value with one field replaced, whatever the field's type."""
    copy = dataclasses.replace(value)
    object.__setattr__(copy, name, new)
    return copy


def drop(kind: type) -> Mutation:
    def mutate(plan: Plan, chance: random.Random) -> Plan | None:
        found = [i for i, step in enumerate(plan.steps) if isinstance(step, kind)]
        if not found:
            return None
        i = chance.choice(found)
        return with_steps(plan, [*plan.steps[:i], *plan.steps[i + 1 :]])

    return mutate


def move(kind: type) -> Mutation:
    def mutate(plan: Plan, chance: random.Random) -> Plan | None:
        found = [i for i, step in enumerate(plan.steps) if isinstance(step, kind)]
        if not found:
            return None
        steps = list(plan.steps)
        step = steps.pop(chance.choice(found))
        steps.insert(chance.randrange(len(steps) + 1), step)
        return with_steps(plan, steps)

    return mutate


def double(plan: Plan, chance: random.Random) -> Plan | None:
    steps = list(plan.steps)
    steps.insert(chance.randrange(len(steps) + 1), chance.choice(steps))
    return with_steps(plan, steps)


def swap_steps(plan: Plan, chance: random.Random) -> Plan | None:
    steps = list(plan.steps)
    i, j = chance.randrange(len(steps)), chance.randrange(len(steps))
    steps[i], steps[j] = steps[j], steps[i]
    return with_steps(plan, steps)


def edit_step(kind: type, name: str, values: Callable[[Plan, random.Random], object]) -> Mutation:
    def mutate(plan: Plan, chance: random.Random) -> Plan | None:
        found = [i for i, step in enumerate(plan.steps) if isinstance(step, kind)]
        if not found:
            return None
        steps = list(plan.steps)
        i = chance.choice(found)
        steps[i] = changed(steps[i], name, values(plan, chance))
        return dataclasses.replace(plan, steps=tuple(steps))

    return mutate


def move_staged_copy(plan: Plan, chance: random.Random) -> Plan | None:
    """Give all moves of one weight another address."""
    streamed = sorted({step.tensor for step in plan.steps if isinstance(step, Prefetch)})
    if not streamed:
        return None
    name, address = chance.choice(streamed), some_address(plan, chance)
    steps = [
        step
        if not isinstance(step, (Prefetch, Wait, Release)) or step.tensor != name
        else dataclasses.replace(step, address=address)
        for step in plan.steps
    ]
    return dataclasses.replace(plan, steps=tuple(steps))


def swap_addresses(plan: Plan, chance: random.Random) -> Plan | None:
    streamed = sorted({(s.tensor, s.address) for s in plan.steps if isinstance(s, Prefetch)})
    if len(streamed) < 2:
        return None
    (one, first), (other, second) = chance.sample(streamed, 2)
    to: dict[tuple[str, int | None], int] = {(one, first): second, (other, second): first}
    steps = [
        dataclasses.replace(step, address=to[step.tensor, step.address])
        if isinstance(step, (Prefetch, Wait, Release)) and (step.tensor, step.address) in to
        else step
        for step in plan.steps
    ]
    return dataclasses.replace(plan, steps=tuple(steps))


def edit_tensor(name: str, values: Callable[[Plan, random.Random], object]) -> Mutation:
    def mutate(plan: Plan, chance: random.Random) -> Plan | None:
        weights = [n for n, t in plan.tensors.items() if t.kind == TensorKind.WEIGHT]
        chosen = chance.choice(weights)
        edited = changed(plan.tensors[chosen], name, values(plan, chance))
        return dataclasses.replace(plan, tensors={**plan.tensors, chosen: edited})

    return mutate


def some_address(plan: Plan, chance: random.Random) -> int:
    arena = next(iter(plan.arena_bytes.values()))
    return PAGE * chance.randrange(-1, arena // PAGE + 2) + chance.choice((0, 0, 0, 512))


def some_tensor(plan: Plan, chance: random.Random) -> str:
    return chance.choice([*plan.tensors, "nothing"])


def some_home(plan: Plan, chance: random.Random) -> str:
    return chance.choice([*plan.machine.tiers, "moon"])


def shrink_arena(plan: Plan, chance: random.Random) -> Plan | None:
    ((tier, size),) = plan.arena_bytes.items()
    if not size:
        return None
    return plan.with_accounts(arena_bytes={tier: size - PAGE})


MUTATIONS: dict[str, Mutation] = {
    "drop wait": drop(Wait),
    "drop release": drop(Release),
    "drop prefetch": drop(Prefetch),
    "drop compute": drop(Compute),
    "move wait": move(Wait),
    "move release": move(Release),
    "move prefetch": move(Prefetch),
    "move compute": move(Compute),
    "double a step": double,
    "swap steps": swap_steps,
    "prefetch size": edit_step(Prefetch, "size_bytes", lambda _, c: c.randrange(10**6)),
    "prefetch address": edit_step(Prefetch, "address", some_address),
    "wait address": edit_step(Wait, "address", some_address),
    "release address": edit_step(Release, "address", some_address),
    "prefetch tensor": edit_step(Prefetch, "tensor", some_tensor),
    "wait tensor": edit_step(Wait, "tensor", some_tensor),
    "release tensor": edit_step(Release, "tensor", some_tensor),
    "prefetch link": edit_step(
        Prefetch, "link", lambda p, c: c.choice([*p.link_bytes, "moon->gpu"])
    ),
    "op of a move": edit_step(Wait, "op", lambda p, c: c.randrange(-1, len(p.ops) + 2)),
    "op of a compute": edit_step(Compute, "op", lambda p, c: c.randrange(-1, len(p.ops) + 2)),
    "address of a staged copy": move_staged_copy,
    "swapped addresses": swap_addresses,
    "home": edit_tensor("home", some_home),
    "resident address": edit_tensor("address", some_address),
    "size in the plan": edit_tensor("size_bytes", lambda _, c: c.randrange(10**6)),
    "kind in the plan": edit_tensor("kind", lambda _, c: TensorKind.STATE),
    "shrunk arena": shrink_arena,
}


def refused(plan: Plan) -> bool:
    try:
        verify(plan)
    except PlanVerificationError:
        return True
    return False


@settings(max_examples=24 * SCALE, suppress_health_check=[HealthCheck.too_slow])
@given(workloads(), machines(), shares(), st.integers(0, 2**32))
def test_whatever_breaks_a_run_is_refused(
    task: Workload, machine: Machine, share: float, seed: int
) -> None:
    """Some thousand corruptions; those that happen to be harmless may be accepted."""
    budget = Budget.of(budget_at(share, task, machine), machine)
    plan = make_plan(task, machine, budget, fingerprint={})
    assert not refused(plan)
    assert breaks(plan) == ""
    chance = random.Random(seed)
    for name, mutation in MUTATIONS.items():
        corrupt = mutation(plan, chance)
        if corrupt is not None and corrupt != plan and (wrong := breaks(corrupt)):
            assert refused(corrupt), f"{name}: {wrong}"


def streaming_plan() -> Plan:
    machine = gpu_machine()
    budget = Budget(gpu=3 * SLOT, cpu=machine.tiers["cpu"].size_bytes)
    return make_plan(workload(["a", "b", "c", "d", "e"]), machine, budget, fingerprint={})


def false_claims() -> dict[str, Plan]:
    plan = streaming_plan()
    peak, budget, op = plan.peak_bytes, plan.budget_bytes, plan.ops[0]
    left = budget["gpu"] - peak["gpu"]
    reserving = dataclasses.replace(plan.places[0], reserved_bytes=left + 1)

    def with_op(op: OpPlan) -> Plan:
        return changed(plan, "ops", (op, *plan.ops[1:]))

    def certified(name: str, value: object) -> Plan:
        return changed(plan, "certificate", changed(plan.certificate, name, value))

    return {
        "link bytes": plan.with_accounts(link_bytes={n: b + 1 for n, b in plan.link_bytes.items()}),
        "no link bytes": plan.with_accounts(link_bytes={}),
        "peak": plan.with_accounts(peak_bytes={**peak, "gpu": peak["gpu"] - 1}),
        "slow peak": plan.with_accounts(peak_bytes={**peak, "nvme": 1}),
        "budget": plan.with_accounts(budget_bytes={**budget, "gpu": peak["gpu"] - 1}),
        "no budget": plan.with_accounts(budget_bytes={}),
        "two arenas": plan.with_accounts(arena_bytes={**plan.arena_bytes, "cpu": 1}),
        "no arena": plan.with_accounts(arena_bytes={}),
        "reserved": dataclasses.replace(plan, places=(reserving, *plan.places[1:])),
        "beside tensors": plan.with_accounts(beside_bytes={"cpu": 1}),
        "less than nothing": plan.with_accounts(
            beside_bytes={"cpu": -1}, peak_bytes={**peak, "cpu": peak["cpu"] - 1}
        ),
        "two accounts": dataclasses.replace(plan, places=(*plan.places, plan.places[0])),
        "two accounts of a link": dataclasses.replace(plan, links=(*plan.links, plan.links[0])),
        "op name": with_op(dataclasses.replace(op, name="x")),
        "op site": with_op(dataclasses.replace(op, site="nvme")),
        "op time": with_op(dataclasses.replace(op, time_s=0.5)),
        "fewer ops": changed(plan, "ops", plan.ops[1:]),
        "unplaced": changed(plan, "tensors", {n: t for n, t in plan.tensors.items() if n != "a"}),
        "predicted": certified("predicted_s", plan.certificate.predicted_s * 0.9),
        "lower bound": certified("lower_bound_s", plan.certificate.predicted_s * 1.1),
        "limit": certified("limit_s", plan.certificate.limit_s * 0.9),
        "gap": certified("gap", plan.certificate.gap + 0.1),
        "not a number": certified("lower_bound_s", float("nan")),
        "binding": certified("binding", "moon"),
    }


@pytest.mark.parametrize("name", false_claims())
def test_a_false_claim_is_refused(name: str) -> None:
    verify(streaming_plan())
    with pytest.raises(PlanVerificationError, match="refused"):
        verify(false_claims()[name])


def test_an_inconsistent_workload_is_refused() -> None:
    plan = streaming_plan()
    task = plan.workload
    twice = dataclasses.replace(task, tensors=(*task.tensors, task.tensors[0]))
    negative = dataclasses.replace(task.tensors[0], size_bytes=-1)
    lost = dataclasses.replace(task, tensors=task.tensors[1:])
    for broken in (twice, dataclasses.replace(task, tensors=(negative, *task.tensors[1:])), lost):
        with pytest.raises(PlanVerificationError):
            verify(dataclasses.replace(plan, workload=broken))


def test_the_offending_step_is_named() -> None:
    task = workload(["a", "b"])
    plan = make_plan(task, cpu_machine(), Budget(cpu=SLOT), fingerprint={})
    steps = [step for step in plan.steps if not isinstance(step, Wait)]
    with pytest.raises(PlanVerificationError, match="op 'op0' needs 'a'") as caught:
        verify(with_steps(plan, steps))
    assert caught.value.step == 1
