"""What tensors and ops of a hand-made training iteration would cost if they were treated otherwise."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gascompile.core.plan import Plan
from gascompile.core.steps import Compute, Recompute, Release, Wait
from gascompile.passes.explain.explain import OpExplanation, TensorExplanation, explain
from gascompile.passes.explain.other_moves import other_moves
from gascompile.passes.explain.other_sites import other_sites
from tests.cost_models.hand_plans import MB, fetch, hand_plan, machine, training


def _prices(plan: Plan, name: str) -> dict[tuple[str, str], float | None]:
    return {(other.choice, other.way): other.seconds for other in other_moves(plan, name)}


def test_an_activation_that_moves() -> None:
    # Six ops and the rerun of op1 take 14 s; as planned, 2 s of waiting for a0 are added.
    assert _prices(training(), "a0") == {
        ("keep", ""): pytest.approx(14.0),
        ("recompute", "op0"): pytest.approx(16.0),
    }
    kept = other_moves(training(), "a0")[0]
    assert kept.change_s == pytest.approx(-2.0)
    # The peak is that of op3, when a0 is back in both cases.
    assert kept.peak_change_bytes == 0


def test_an_activation_that_is_recomputed_and_one_that_stays() -> None:
    assert _prices(training(), "a1") == {("keep", ""): pytest.approx(14.0)}
    # a2 lies unused while op1 runs again: 2 s, the time of one transfer.
    assert _prices(training(), "a2") == {
        ("move", "cpu"): pytest.approx(18.0),
        ("recompute", "op2"): pytest.approx(18.0),
    }
    assert _prices(training(), "g1") == {}


def test_a_variant_that_does_not_fit_says_by_how_much() -> None:
    plan = hand_plan(
        {"a0": 4, "a1": 3, "a2": 1},
        [("", "a0", 4.0), ("", "a1", 4.0), ("a1", "a2", 4.0), ("a0 a2", "", 4.0)],
        [
            Compute(op=0),
            Release(op=1, tensor="a0"),
            Compute(op=1),
            Compute(op=2),
            Recompute(op=3, source=0),
            Compute(op=3),
        ],
        budget=7 * MB,
    )
    kept, moved = other_moves(plan, "a0")
    assert (kept.choice, kept.seconds) == ("keep", None)
    assert kept.obstacle == "gpu would lack 976.56 KiB"
    assert (moved.choice, moved.way) == ("move", "cpu")
    assert moved.obstacle == "gpu would lack 976.56 KiB"
    found = explain(plan, "a0")
    assert isinstance(found, TensorExplanation)
    assert found.reason == (
        "it is dropped and computed again by 'op0': kept, gpu would lack 976.56 KiB"
    )


def test_a_state_could_live_elsewhere() -> None:
    # 1 s to come before op0 and 1 s to go after op5, with nothing to hide behind: a step at each end.
    assert _prices(training(), "s0") == {("move", "cpu"): pytest.approx(18.0)}


def test_a_recompute_whose_inputs_are_overwritten_is_refused() -> None:
    plan = hand_plan(
        {"s0": 1, "a0": 1, "a1": 1},
        [("s0", "a0", 1.0), ("s0", "s0", 1.0), ("a0", "a1", 1.0)],
        [Compute(op=0), Compute(op=1), Compute(op=2)],
    )
    again = next(other for other in other_moves(plan, "a0") if other.choice == "recompute")
    assert again.seconds is None
    assert "another value of 's0'" in again.obstacle


def test_ops_on_other_sites() -> None:
    # 8 s on the CPU instead of 2 s, a0 and g1 there in 4 s and g0 back in 2 s.
    (other,) = other_sites(training(), 4)
    assert (other.site, other.op_s, other.copied_bytes) == ("cpu", 8.0, 6 * MB)
    assert other.change_s == pytest.approx(6 + 4 + 2)
    (again,) = other_sites(training(), 1)
    assert (again.seconds, again.obstacle) == (None, "it is run again for another op")


def test_an_op_goes_where_its_weight_rests() -> None:
    # Streamed, w0 takes 9 s of each iteration; on the CPU the op takes 4 s, and x and y 1 s each.
    plan = hand_plan(
        {"x0": 1, "w0": 9, "a0": 1, "y0": 1},
        [("x0", "a0", 1.0), ("a0 w0", "y0", 1.0)],
        [
            Compute(op=0),
            fetch(1, "w0", 9, None),
            Wait(op=1, tensor="w0"),
            Compute(op=1),
            Release(op=2, tensor="w0"),
        ],
        homes={"w0": "cpu"},
    )
    assert plan.certificate.predicted_s == pytest.approx(11.0)
    (other,) = other_sites(plan, 1)
    assert other.seconds == pytest.approx(1 + 1 + 4 + 1)
    found = explain(plan, "op1")
    assert isinstance(found, OpExplanation)
    assert found.sites == (other,)
    assert [(stall.tensor, stall.time_s) for stall in found.stalls] == [("w0", 9.0)]


def test_obstacles_of_sites() -> None:
    plan = hand_plan(
        {"w0": 1, "a0": 1},
        [("w0", "a0", 1.0), ("w0 a0", "", 1.0)],
        [Compute(op=0), Compute(op=1)],
        addresses={"w0": 0},
    )
    assert other_sites(plan, 0)[0].obstacle == "other ops read its weight 'w0' on gpu too"
    bare = replace(plan, machine=replace(machine(), links=()))
    assert "no links" in other_sites(bare, 1)[0].obstacle
