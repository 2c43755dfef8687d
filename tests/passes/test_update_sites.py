"""Updates elsewhere: which may go, and plans that are never slower for it, by two clocks that share no code."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from gascompile.core.budget import Budget
from gascompile.core.errors import InfeasiblePlanError
from gascompile.core.machine import Link, Machine, Place
from gascompile.core.plan import Plan
from gascompile.core.steps import Offload, Reload
from gascompile.core.workload import OpSpec, TensorKind, TensorSpec, Workload
from gascompile.cost_models.simulate.trace import trace
from gascompile.passes.intervals.update_groups import update_groups
from gascompile.passes.plan.make_plan import make_plan
from gascompile.passes.verify.walk import verify

MACHINE = Machine(
    name="two processors",
    places=(Place.named("gpu", 1000), Place.named("cpu", 10_000), Place.named("nvme", 10_000)),
    links=(
        Link(source_tier="cpu", target_tier="gpu", bandwidth_bytes_per_s=20.0),
        Link(source_tier="gpu", target_tier="cpu", bandwidth_bytes_per_s=10.0),
        Link(source_tier="nvme", target_tier="gpu", bandwidth_bytes_per_s=8.0),
        Link(source_tier="gpu", target_tier="nvme", bandwidth_bytes_per_s=8.0),
    ),
)
PLANNING_S = 1.0
"""What is compared differs by much more than longer searches would find."""


def op(
    name: str, reads: str, writes: str, seconds: float = 0.4, there_s: float | None = None
) -> OpSpec:
    times = {"gpu": seconds} | ({} if there_s is None else {"cpu": there_s})
    return OpSpec(name=name, time_s=times, reads=(*reads.split(),), writes=(*writes.split(),))


def step_of(layers: int, chance: random.Random, *, everywhere: bool = True) -> Workload:
    """Return a training step of so many layers, each with a parameter and its moments."""
    sizes = [chance.randint(4, 12) for _ in range(layers)]
    there_s = [chance.uniform(0.5, 4.0) if everywhere else None for _ in range(layers)]
    tensors = [TensorSpec(name="x", size_bytes=2, kind=TensorKind.INPUT)]
    for i, size in enumerate(sizes):
        tensors += [
            TensorSpec(name=f"w{i}", size_bytes=size, kind=TensorKind.WEIGHT),
            TensorSpec(name=f"s{i}", size_bytes=2 * size, kind=TensorKind.STATE),
            TensorSpec(name=f"a{i}", size_bytes=3, kind=TensorKind.ACTIVATION),
            TensorSpec(name=f"d{i}", size_bytes=3, kind=TensorKind.ACTIVATION),
            TensorSpec(name=f"g{i}", size_bytes=size, kind=TensorKind.ACTIVATION),
        ]
    tensors.append(TensorSpec(name="loss", size_bytes=1, kind=TensorKind.OUTPUT))
    before = ["x", *(f"a{i}" for i in range(layers))]
    ops = [op(f"f{i}", f"{before[i]} w{i}", f"a{i}") for i in range(layers)]
    ops.append(op("l", before[-1], f"loss d{layers - 1}", 0.5))
    for i in reversed(range(layers)):
        ops.append(op(f"m{i}", f"{before[i]} d{i}", f"g{i}"))
        if i:
            ops.append(op(f"b{i}", f"d{i} w{i}", f"d{i - 1}"))
        ops.append(op(f"u{i}", f"w{i} s{i} g{i}", f"w{i} s{i}", 0.5, there_s[i]))
    return Workload(name="step", repeats=True, tensors=tuple(tensors), ops=tuple(ops))


def planned(workload: Workload, gpu_bytes: int) -> Plan | None:
    try:
        return make_plan(
            workload,
            MACHINE,
            Budget(gpu=gpu_bytes),
            fingerprint={},
            time_limit_s=PLANNING_S,
            move_all=True,
            has_arena=False,
        )
    except InfeasiblePlanError:
        return None


@pytest.mark.parametrize(
    ("layers", "seed", "gpu_bytes"), [(2, 0, 36), (2, 1, 45), (3, 1, 36)], ids=str
)
def test_plans_are_no_slower_for_it_and_their_clocks_agree(
    layers: int, seed: int, gpu_bytes: int
) -> None:
    one = planned(step_of(layers, random.Random(seed), everywhere=False), gpu_bytes)
    other = planned(step_of(layers, random.Random(seed)), gpu_bytes)
    assert other is not None
    verify(other)
    sent = {o.name for o in other.ops if o.site == "cpu"}
    # Where nothing fits without, it has to; where everything stays, nothing is gained.
    assert bool(sent) == ((layers, seed) != (2, 1))
    found_s = other.certificate.predicted_s
    if one is not None:
        least_s = one.certificate.predicted_s
        assert found_s < least_s if sent else found_s == pytest.approx(least_s)
    assert (one is None) == (layers == 2 and seed == 0)
    moved = {s.tensor for s in other.steps if isinstance(s, (Offload, Reload))}
    assert not moved & {name.replace("u", "s") for name in sent}
    assert trace(other).seconds == pytest.approx(found_s)
    assert other.certificate.limit_s <= found_s * (1 + 1e-9)


def changed_op(workload: Workload, name: str, **changes: object) -> Workload:
    ops = tuple(replace(o, **changes) if o.name == name else o for o in workload.ops)  # type: ignore[arg-type]
    return replace(workload, ops=ops)


def test_what_goes_elsewhere_is_all_that_changes_a_tensor_and_reads_one_result() -> None:
    step = step_of(2, random.Random(0))
    u1, u0 = update_groups(step, MACHINE, "cpu")
    assert [step.ops[i].name for i in (*u1.ops, *u0.ops)] == ["u1", "u0"]
    assert (u0.gradient, u0.shared, u0.apart) == ("g0", ("w0",), ("s0",))

    def able(other: Workload) -> list[str]:
        return [other.ops[g.ops[0]].name for g in update_groups(other, MACHINE, "cpu")]

    # Without seconds there, with a second result, with a moment that something else reads or changes too.
    assert able(changed_op(step, "u0", time_s={"gpu": 1.0})) == ["u1"]
    assert able(changed_op(step, "u0", reads=("w0", "s0", "g0", "d0"))) == ["u1"]
    assert able(changed_op(step, "m0", writes=("g0", "s0"))) == ["u1"]
    # One whose parameter is read afterwards, and two that share a gradient.
    assert able(changed_op(step, "u0", reads=("w1", "w0", "s0", "g0"))) == []
    assert able(changed_op(step, "u0", reads=("w0", "s0", "g1"))) == []
    # Tiles of one parameter go together.
    tiles = (*step.ops, op("v0", "w0 t0 g0", "w0 t0", 0.5, 1.0))
    tensors = (*step.tensors, TensorSpec(name="t0", size_bytes=4, kind=TensorKind.STATE))
    group = update_groups(replace(step, ops=tiles, tensors=tensors), MACHINE, "cpu")[1]
    assert [tiles[i].name for i in group.ops] == ["u0", "v0"]
    assert group.apart == ("s0", "t0")
    # What takes a link longer to begin than to carry stays.
    slow = [replace(link, latency_s=1e3) for link in MACHINE.links]
    assert update_groups(step, replace(MACHINE, links=tuple(slow)), "cpu") == []
