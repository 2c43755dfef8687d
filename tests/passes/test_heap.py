"""The rules of the walk outside the arena: what a hand-made plan holds per tier, and what is refused."""

from __future__ import annotations

import dataclasses

import pytest

from gascompile.core.errors import PlanVerificationError
from gascompile.core.machine import Link, Machine, Place
from gascompile.core.plan import Certificate, OpPlan, Plan, SolverStatus, TensorPlan, accounts
from gascompile.core.steps import Compute, Offload, Recompute, Release, Reload, Step, Wait
from gascompile.core.workload import OpSpec, TensorKind, TensorSpec, Workload
from gascompile.cost_models.simulate.walk import Walk

MACHINE = Machine(
    name="hand",
    places=(Place.named("gpu", 100), Place.named("cpu", 100)),
    links=(
        Link(source_tier="gpu", target_tier="cpu", bandwidth_bytes_per_s=1.0),
        Link(source_tier="cpu", target_tier="gpu", bandwidth_bytes_per_s=1.0),
    ),
)
OUT, BACK = "gpu->cpu", "cpu->gpu"
KINDS = {
    "w": (7, TensorKind.WEIGHT),
    "s": (5, TensorKind.STATE),
    "x": (3, TensorKind.ACTIVATION),
    "y": (20, TensorKind.ACTIVATION),
    "z": (2, TensorKind.ACTIVATION),
    "out": (1, TensorKind.OUTPUT),
    "in": (9, TensorKind.INPUT),
}
Ops = list[tuple[tuple[str, ...], tuple[str, ...]]]
CHAIN: Ops = [(("in",), ("x",)), (("x",), ("y",)), (("y",), ("z",)), (("x", "z"), ("out",))]
"""x is needed first and last; y is large in between."""


def plan_of(
    ops: Ops,
    steps: list[Step],
    *,
    homes: dict[str, str] | None = None,
    sites: dict[int, str] | None = None,
    repeats: bool = True,
    workspace: dict[int, int] | None = None,
) -> Plan:
    named = dict.fromkeys(name for reads, writes in ops for name in (*reads, *writes))
    workload = Workload(
        name="hand",
        repeats=repeats,
        tensors=tuple(TensorSpec(name=n, size_bytes=KINDS[n][0], kind=KINDS[n][1]) for n in named),
        ops=tuple(
            OpSpec(
                name=f"op{i}",
                time_s={"gpu": 1.0, "cpu": 2.0},
                reads=reads,
                writes=writes,
                workspace_bytes=(workspace or {}).get(i, 0),
            )
            for i, (reads, writes) in enumerate(ops)
        ),
    )
    return Plan(
        fingerprint={},
        strategy="hand",
        places=accounts(budget_bytes={"gpu": 100, "cpu": 100}, arena_bytes={"gpu": 0}),
        links=(),
        tensors={
            n: TensorPlan(
                home=(homes or {}).get(n, "gpu"), kind=KINDS[n][1], size_bytes=KINDS[n][0]
            )
            for n in named
        },
        ops=tuple(
            OpPlan(name=f"op{i}", site=(sites or {}).get(i, "gpu"), time_s=1.0)
            for i in range(len(ops))
        ),
        steps=tuple(steps),
        certificate=Certificate(
            predicted_s=1.0,
            lower_bound_s=1.0,
            limit_s=1.0,
            gap=0.0,
            status=SolverStatus.OPTIMAL,
            solve_s=0.0,
            binding="compute",
        ),
        workload=workload,
        machine=MACHINE,
    )


def heap(plan: Plan) -> dict[str, int]:
    """Return the peak bytes per tier."""
    return Walk(plan).run().peak


def out(op: int, name: str) -> Offload:
    return Offload(op=op, tensor=name, link=OUT, size_bytes=KINDS[name][0])


def back(op: int, name: str) -> Reload:
    return Reload(op=op, tensor=name, link=BACK, size_bytes=KINDS[name][0])


def wait(op: int, name: str) -> Wait:
    return Wait(op=op, tensor=name)


def drop(op: int, name: str) -> Release:
    return Release(op=op, tensor=name)


def runs(first: int, last: int) -> list[Step]:
    return [Compute(op=i) for i in range(first, last)]


MOVED: list[Step] = [
    *runs(0, 2),
    out(2, "x"),
    wait(2, "x"),
    drop(2, "x"),
    *runs(2, 3),
    back(3, "x"),
    wait(3, "x"),
    *runs(3, 4),
]


def test_nothing_moves() -> None:
    # x, y and z together while op2 runs.
    assert heap(plan_of(CHAIN, runs(0, 4))) == {"gpu": 25, "cpu": 0}


def test_a_moved_activation_makes_room() -> None:
    # op2 holds y and z; op1 holds x and y; the copy of x takes 3 bytes of the other tier.
    assert heap(plan_of(CHAIN, MOVED)) == {"gpu": 23, "cpu": 3}


def test_workspace_stands_beside_what_lives() -> None:
    assert heap(plan_of(CHAIN, MOVED, workspace={2: 4}))["gpu"] == 26


def test_a_recomputed_activation_makes_room() -> None:
    steps = [*runs(0, 2), drop(2, "x"), *runs(2, 3), Recompute(op=3, source=0), *runs(3, 4)]
    assert heap(plan_of(CHAIN, steps)) == {"gpu": 23, "cpu": 0}


def test_what_is_changed_later_may_be_recomputed_before() -> None:
    ops: Ops = [(("in",), ("x",)), (("in",), ("y",)), (("x", "y"), ("x",)), (("x",), ("out",))]
    steps = [*runs(0, 1), drop(1, "x"), *runs(1, 2), Recompute(op=2, source=0), *runs(2, 4)]
    assert heap(plan_of(ops, steps)) == {"gpu": 23, "cpu": 0}


STATE: Ops = [(("s",), ("x",)), (("x",), ("y",)), (("y", "s"), ("s", "out"))]


def test_a_dirty_state_rests_in_the_other_tier() -> None:
    steps: list[Step] = [
        wait(0, "s"),
        *runs(0, 1),
        drop(1, "s"),
        *runs(1, 2),
        back(2, "s"),
        wait(2, "s"),
        *runs(2, 3),
        out(3, "s"),
        wait(3, "s"),
        drop(3, "s"),
        back(3, "s"),
    ]
    # The state is there with x, away while y is made, back with y and the output.
    assert heap(plan_of(STATE, steps, homes={"s": "cpu"})) == {"gpu": 26, "cpu": 5}


def test_a_copy_out_may_cross_the_end() -> None:
    steps: list[Step] = [
        *runs(0, 1),
        wait(1, "s"),
        drop(1, "s"),
        *runs(1, 2),
        back(2, "s"),
        wait(2, "s"),
        *runs(2, 3),
        out(3, "s"),
    ]
    assert heap(plan_of(STATE, steps, homes={"s": "cpu"})) == {"gpu": 26, "cpu": 5}


def test_a_clean_weight_leaves_for_free_and_is_back_before_the_end() -> None:
    ops: Ops = [(("w",), ("x",)), (("x",), ("y",)), (("y", "w"), ("out",))]
    steps: list[Step] = [
        *runs(0, 1),
        drop(1, "w"),
        *runs(1, 2),
        back(2, "w"),
        wait(2, "w"),
        *runs(2, 3),
    ]
    assert heap(plan_of(ops, steps, homes={"w": "cpu"})) == {"gpu": 28, "cpu": 7}


def test_an_op_at_the_other_tier_reads_its_weight_there() -> None:
    ops: Ops = [(("in",), ("x",)), (("x", "w"), ("z",)), (("z",), ("out",))]
    steps: list[Step] = [
        *runs(0, 1),
        out(1, "x"),
        wait(1, "x"),
        *runs(1, 2),
        back(2, "z"),
        wait(2, "z"),
        *runs(2, 3),
    ]
    assert heap(plan_of(ops, steps, homes={"w": "cpu"}, sites={1: "cpu"})) == {"gpu": 3, "cpu": 12}


def test_an_op_at_the_other_tier_may_change_what_it_reads() -> None:
    ops: Ops = [(("in",), ("x",)), (("x",), ("x",)), (("x",), ("out",))]
    steps: list[Step] = [
        *runs(0, 1),
        out(1, "x"),
        wait(1, "x"),
        *runs(1, 2),
        back(2, "x"),
        wait(2, "x"),
        *runs(2, 3),
    ]
    assert heap(plan_of(ops, steps, sites={1: "cpu"})) == {"gpu": 4, "cpu": 3}


def without(steps: list[Step], index: int) -> list[Step]:
    return [step for i, step in enumerate(steps) if i != index]


UPDATED: Ops = [
    (("w",), ("x",)),
    (("x", "w"), ("z",)),
    (("z", "w", "s"), ("w", "s")),
    (("x",), ("out",)),
]
"""z is what a parameter w and its moment s are changed with, on the other tier."""
UPDATE: list[Step] = [
    wait(0, "w"),
    *runs(0, 2),
    drop(2, "w"),
    out(2, "z"),
    Wait(op=2, tensor="z", site="cpu"),
    *runs(2, 3),
    back(3, "w"),
    wait(3, "z"),
    *runs(3, 4),
]


def updated(steps: list[Step], **homes: str) -> Plan:
    return plan_of(UPDATED, steps, homes={"w": "cpu", "s": "cpu", **homes}, sites={2: "cpu"})


def test_what_lasts_is_changed_where_it_rests() -> None:
    # w, x and z, before it leaves and again when it comes back. There w and s, and z for a while.
    assert heap(updated(UPDATE)) == {"gpu": 12, "cpu": 14}


IN_PLACE: Ops = [(("in",), ("x",)), (("x",), ("x", "y")), (("y", "x"), ("out",))]
REFUSED: dict[str, tuple[Plan, str]] = {
    "never copied out": (plan_of(CHAIN, without(MOVED, 2)), "no step is moving"),
    "released in flight": (plan_of(CHAIN, without(MOVED, 3)), "while it is being copied"),
    "still there": (plan_of(CHAIN, without(MOVED, 4)), "still there"),
    "never brought back": (plan_of(CHAIN, without(MOVED, 6)), "no step is moving"),
    "never waited for": (plan_of(CHAIN, without(MOVED, 7)), "has not arrived"),
    "no good copy": (
        plan_of(CHAIN, [*runs(0, 2), drop(2, "x"), *runs(2, 3), back(3, "x")]),
        "no good copy",
    ),
    "nowhere else": (
        plan_of(STATE, [*runs(0, 1), drop(1, "s"), *runs(1, 3)]),
        "whose value is nowhere else",
    ),
    "stale": (
        plan_of(
            STATE,
            [*runs(0, 3), drop(3, "s"), back(3, "s"), wait(3, "s")],
            homes={"s": "cpu"},
        ),
        "nowhere else",
    ),
    "written while copied": (
        plan_of(IN_PLACE, [*runs(0, 1), out(1, "x"), *runs(1, 3)]),
        "while it is being copied",
    ),
    "recomputed from a changed value": (
        plan_of(
            [(("s",), ("x",)), (("x",), ("s", "y")), (("x", "y"), ("out",))],
            [*runs(0, 2), drop(2, "x"), Recompute(op=2, source=0), *runs(2, 3)],
        ),
        "another value",
    ),
    "recomputed, but changed since": (
        plan_of(IN_PLACE, [*runs(0, 2), drop(2, "x"), Recompute(op=2, source=0), *runs(2, 3)]),
        "does not make 'x' as it is now",
    ),
    "an output recomputed": (
        plan_of(
            [(("in",), ("out",)), (("in",), ("x",))],
            [*runs(0, 1), drop(1, "out"), *runs(1, 2), Recompute(op=2, source=0)],
        ),
        "computes the output 'out' again",
    ),
    "recomputed before it ran": (
        plan_of(CHAIN, [Recompute(op=0, source=1), *runs(0, 4)]),
        "has not run yet",
    ),
    "elsewhere at the end": (
        plan_of(STATE, [*runs(0, 3), out(3, "s"), wait(3, "s"), drop(3, "s")]),
        "ends the iteration elsewhere",
    ),
    "moving at the end": (
        plan_of(CHAIN, [*runs(0, 3), out(3, "x"), *runs(3, 4)]),
        "given up while it is being copied",
    ),
    "output elsewhere": (
        plan_of(CHAIN, [*MOVED, out(4, "out"), wait(4, "out"), drop(4, "out")]),
        "not on 'gpu' at the end",
    ),
    "over a link that is none": (
        plan_of(
            STATE,
            [
                wait(0, "s"),
                *runs(0, 3),
                dataclasses.replace(out(3, "s"), link="gpu->moon"),
            ],
            homes={"s": "cpu"},
        ),
        "'gpu->moon', which does not exist",
    ),
    "wrong way": (
        plan_of(CHAIN, [*runs(0, 2), dataclasses.replace(out(2, "x"), link=BACK), *runs(2, 4)]),
        "the wrong way",
    ),
    "wrong size": (
        plan_of(CHAIN, [*runs(0, 2), dataclasses.replace(out(2, "x"), size_bytes=4), *runs(2, 4)]),
        "of which 3 have to move",
    ),
    "changed beside a copy": (updated(without(UPDATE, 3)), "which lies elsewhere too"),
    "changed away from home": (updated(UPDATE, s="gpu"), "where it is not there"),
    "read before it is there": (updated(without(UPDATE, 5)), "where it has not arrived"),
    "freed before it is through": (updated(without(UPDATE, 8)), "being copied"),
    "back before it is changed": (
        updated([*UPDATE[:6], back(2, "w"), UPDATE[6], *UPDATE[8:]]),
        "while it is being copied",
    ),
    "waits where nothing comes": (
        updated([*UPDATE[:5], Wait(op=2, tensor="x", site="cpu"), *UPDATE[6:]]),
        "which does not come there",
    ),
    "waits where no op runs": (
        plan_of(CHAIN, [*MOVED[:3], Wait(op=2, tensor="x", site="cpu"), *MOVED[3:]]),
        "which does not come there",
    ),
    "weight of another tier": (
        plan_of([(("w",), ("out",))], runs(0, 1), homes={"w": "gpu"}, sites={0: "cpu"}),
        "where it is not there",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_broken_rule_is_refused(name: str) -> None:
    plan, words = REFUSED[name]
    with pytest.raises(PlanVerificationError, match=words):
        heap(plan)


ONCE: Ops = [(("w",), ("x",)), (("x", "s"), ("s", "out"))]


def test_what_runs_once_may_leave_a_copy_behind() -> None:
    # The state ends at home; that it is also where ops compute harms nobody, as nothing follows.
    steps = [*runs(0, 1), back(1, "s"), wait(1, "s"), *runs(1, 2), out(2, "s"), wait(2, "s")]
    assert heap(plan_of(ONCE, steps, homes={"s": "cpu"}, repeats=False)) == {"gpu": 16, "cpu": 5}
    with pytest.raises(PlanVerificationError, match="ends the iteration elsewhere"):
        heap(plan_of(ONCE, steps, homes={"s": "cpu"}))


def test_what_runs_once_ends_at_home() -> None:
    steps = [*runs(0, 1), back(1, "s"), wait(1, "s"), *runs(1, 2)]
    with pytest.raises(PlanVerificationError, match="'s' is not at home at the end"):
        heap(plan_of(ONCE, steps, homes={"s": "cpu"}, repeats=False))


def test_what_runs_once_finds_nothing_that_was_not_brought() -> None:
    with pytest.raises(PlanVerificationError, match="needs 'w' on 'gpu'"):
        heap(plan_of(ONCE, runs(0, 2), homes={"w": "cpu"}, repeats=False))
    heap(plan_of(ONCE, runs(0, 2), homes={"w": "cpu"}))
