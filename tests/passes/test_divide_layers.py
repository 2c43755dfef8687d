"""Layers in parts: the choice of shares against all of them, bounds that hold for each, division and its way back."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from gascompile.core.budget import Budget
from gascompile.core.machine import Link, Machine, MemoryRate, Place
from gascompile.core.workload import OpSpec, TensorKind, TensorSpec, Workload
from gascompile.passes.bounds.least_time import least_time
from gascompile.passes.bounds.site_segments import site_segments
from gascompile.passes.graph.divide import Division, divide, division_of, joined_ops
from gascompile.passes.model.problem import Problem, problem
from gascompile.passes.plan.make_plan import make_plan
from gascompile.passes.search.divide_layers import divide_layers
from gascompile.passes.search.site_routes import closed
from gascompile.passes.search.sites import searched

ROWS, COLUMNS = 256, 256
WEIGHT = ROWS * COLUMNS * 4
VALUE = 8 * ROWS * 4
LAYER_S = 0.016
"""On the tier that computes."""


def layer(name: str, given: str, *, times_slower: float) -> OpSpec:
    return OpSpec(
        name=name,
        time_s={"gpu": LAYER_S, "cpu": times_slower * LAYER_S},
        reads=(given, f"{name}.w"),
        writes=(f"%{name}",),
        splits={f"{name}.w": ROWS},
        cuts={f"{name}.w": ROWS},
    )


def chain(layers: int, times_slower: float = 1.0, *, pointwise: bool = False) -> Workload:
    """Return layers one after the other, of 16 ms each; between two is an op of no time that may be anywhere.

    It may be in the parts of the layer before it where it is ``pointwise``.
    """
    ops: list[OpSpec] = []
    tensors = [TensorSpec(name="%x", size_bytes=VALUE, kind=TensorKind.INPUT)]
    given = "%x"
    for k in range(layers):
        kind = TensorKind.OUTPUT if k + 1 == layers else TensorKind.ACTIVATION
        ops.append(layer(f"l{k}", given, times_slower=times_slower))
        ops.append(
            OpSpec(
                name=f"a{k}",
                time_s={"gpu": 0.0, "cpu": 0.0},
                reads=(f"%l{k}",),
                writes=(f"%a{k}",),
                cuts={f"%l{k}": ROWS} if pointwise else {},
            )
        )
        tensors += [
            TensorSpec(name=f"l{k}.w", size_bytes=WEIGHT, kind=TensorKind.WEIGHT),
            TensorSpec(name=f"%l{k}", size_bytes=VALUE, kind=TensorKind.ACTIVATION),
            TensorSpec(name=f"%a{k}", size_bytes=VALUE, kind=kind),
        ]
        given = f"%a{k}"
    return Workload(name="chain", repeats=True, tensors=tuple(tensors), ops=tuple(ops))


def machine(rate: float) -> Machine:
    ends = (("cpu", "gpu"), ("gpu", "cpu"))
    return Machine(
        name="two processors",
        places=(Place.named("gpu", 1 << 26), Place.named("cpu", 1 << 30)),
        links=tuple(
            Link(source_tier=a, target_tier=b, bandwidth_bytes_per_s=rate) for a, b in ends
        ),
        memory=tuple(MemoryRate(device=d, bandwidth_bytes_per_s=1e15) for d in ("gpu", "cpu")),
    )


def task_of(workload: Workload, where: Machine, held: float) -> Problem:
    """Return the problem of a budget that holds so many weights beside values of up to four."""
    return problem(workload, where, Budget(gpu=int(held * WEIGHT) + 5 * VALUE, cpu=1 << 28))


def every_share(task: Problem, held: float) -> dict[tuple[int, ...], float]:
    """Return the seconds of every choice of sixteenths of each layer, by the planner's own clock."""
    layers = [op for op in task.workload.ops if op.splits]
    found: dict[tuple[int, ...], float] = {}
    for shares in itertools.product(range(17), repeat=len(layers)):
        cuts = {
            f"{op.name}.w": (ROWS - ROWS * share // 16,)
            for op, share in zip(layers, shares, strict=True)
            if 0 < share < 16
        }
        names = {
            f"{op.name}.w[{ROWS - ROWS * share // 16}:{ROWS}]" if share < 16 else f"{op.name}.w"
            for op, share in zip(layers, shares, strict=True)
            if share
        }
        divided = task_of(
            divide(task.workload, task.machine, Division(cuts=cuts)), task.machine, held
        )
        sent = frozenset(i for i, w in enumerate(divided.weights) if w.name in names)
        best = searched(divided, "cpu", closed(divided, sent, "cpu"), math.inf, lambda _plan: True)
        if best is not None:
            found[shares] = best.seconds
    return found


@pytest.mark.parametrize(
    ("rate", "times_slower", "held", "pointwise"),
    [(2e8, 3.0, 1.2, False), (1e7, 2.0, 0.6, True), (4e6, 8.0, 1.0, False)],
)
def test_the_shares_are_as_good_as_the_best_of_all(
    rate: float, times_slower: float, held: float, pointwise: bool
) -> None:
    where, workload = machine(rate), chain(2, times_slower, pointwise=pointwise)
    task = task_of(workload, where, held)
    all_s = every_share(task, held)
    divided_s = min(
        time_s for shares, time_s in all_s.items() if any(0 < share < 16 for share in shares)
    )
    found = divide_layers(
        task, math.inf, lambda _plan: True, lambda form: task_of(form, where, held)
    )
    assert found is not None
    assert found.seconds <= divided_s * (1 + 0.02)
    # No bound is above any of them.
    assert site_segments(workload, where) <= min(all_s.values()) * (1 + 1e-9)
    assert least_time(workload, where, task.limits_bytes)[0] <= min(all_s.values()) * (1 + 1e-9)


def test_two_parts_overlap_with_their_copies() -> None:
    # All weights fit; halves take 8 ms on either side, beside which the input goes out (41 us) and half a result back.
    where, workload = machine(2e8), chain(3)
    task = task_of(workload, where, 3.5)
    found = divide_layers(
        task, math.inf, lambda _plan: True, lambda form: task_of(form, where, 3.5)
    )
    assert found is not None
    copies_s = (VALUE + VALUE / 2) / 2e8
    assert 3 * LAYER_S / 2 <= found.seconds <= 3 * (LAYER_S / 2 + copies_s)


def test_halves_of_what_is_between_two_layers_cross_both_ways_at_once() -> None:
    # A value crosses in 2 ms. A half layer takes 8, then halves change sides; the last one comes back.
    where, workload = machine(VALUE / 0.002), chain(3, pointwise=True)
    task = task_of(workload, where, 3.5)
    found = divide_layers(
        task, math.inf, lambda _plan: True, lambda form: task_of(form, where, 3.5)
    )
    assert found is not None
    assert found.seconds == pytest.approx(3 * 0.008 + 3 * 0.001, rel=0.01)
    joins = {op.name: op.reads for op in found.task.workload.ops if op.name[-2:] != "8]"}
    halves = ("%a0[0:128]", "%a0[128:256]")
    assert joins["a0"] == joins["a0[0:256]"] == halves
    assert "l0" not in joins and "a2[0:256]" not in joins


def test_what_is_changed_in_place_or_viewed_is_joined_once() -> None:
    workload, where = chain(2, pointwise=True), machine(1e8)
    division = Division(cuts={"l0.w": (64,), "l1.w": (64,)})
    first, act, *rest = workload.ops
    view = OpSpec(name="view", time_s={"gpu": 0.0}, reads=("%a0",))
    change = OpSpec(name="add_", time_s={"gpu": 0.0}, reads=("%l0",), writes=("%l0",))
    cases: list[tuple[tuple[OpSpec, ...], set[str]]] = [
        ((), {"l0"}),
        ((view,), {"l0"}),
        ((change,), set()),
    ]
    for between, apart in cases:
        ops = (first, *between, act, *rest) if change in between else (first, act, *between, *rest)
        names = {op.name for op in divide(replace(workload, ops=ops), where, division).ops}
        assert {name for name in ("l0", "l1") if name not in names} == apart | {"l1"}
        assert ("a0[0:256]" in names) == (not between)
        assert ("l0[0:256]" in names) is False


def test_what_is_faster_on_one_side_or_only_a_little_on_both_stays_whole() -> None:
    budget = Budget(gpu=4 * WEIGHT, cpu=1 << 28)
    for times_slower, in_parts in ((1.0, True), (30.0, False)):
        plan = make_plan(chain(2, times_slower), machine(2e8), budget, fingerprint={})
        assert bool(joined_ops(plan.workload.ops)) == in_parts
        assert not plan.warnings
        assert plan.certificate.lower_bound_s <= plan.certificate.predicted_s


def test_a_division_can_be_told_from_its_names() -> None:
    workload, where = chain(2), machine(1e8)
    for division in (
        Division(),
        Division(cuts={"l0.w": (64,), "l1.w": (32, 96)}),
        Division(cuts={"l1.w": (16,)}, tile_rows={"l0.w": 64}),
    ):
        divided = divide(workload, where, division)
        assert division_of(divided) == division
        assert divide(workload, where, division_of(divided)) == divided
        whole = {t.name: t.size_bytes for t in workload.tensors}
        kept = [t for t in divided.tensors if not t.name.startswith("%l")]
        assert sum(t.size_bytes for t in kept) == sum(
            size for name, size in whole.items() if not name.startswith("%l")
        )


def test_what_is_read_otherwise_or_cut_elsewhere_stays_whole() -> None:
    workload, where = chain(2), machine(1e8)
    first, *middle, last, end = workload.ops
    reader = OpSpec(name="sum", time_s={"gpu": 0.0}, reads=("l0.w",), writes=("%s",))
    value = TensorSpec(name="%s", size_bytes=4, kind=TensorKind.OUTPUT)
    bias = TensorSpec(name="b", size_bytes=4 * ROWS, kind=TensorKind.WEIGHT)

    def with_bias(op: OpSpec) -> OpSpec:
        cuts = {**op.cuts, "b": ROWS}
        return OpSpec(
            name=op.name, time_s=op.time_s, reads=(*op.reads, "b"), writes=op.writes, cuts=cuts
        )

    def of(ops: tuple[OpSpec, ...]) -> Workload:
        tensors = (*workload.tensors, value, bias)
        return Workload(name="odd", repeats=True, tensors=tensors, ops=ops)

    read = of((first, *middle, last, end, reader))
    division = Division(cuts={"l0.w": (64,)})
    assert divide(read, where, division).ops == read.ops
    shared = of((with_bias(first), *middle, with_bias(last), end))
    for cuts, names in (
        ({"l0.w": (64,), "l1.w": (96,)}, set()),
        ({"l0.w": (64,)}, set()),
        ({"l0.w": (64,), "l1.w": (64,)}, {"l0", "l1"}),
        ({"l0.w": (0,), "l1.w": (ROWS,)}, set()),
    ):
        assert joined_ops(divide(shared, where, Division(cuts=cuts)).ops) == names
