"""Small programs solved by hand, and how each ending is told."""

from __future__ import annotations

import importlib.util
import random
from typing import Any

import pytest

from gascompile.core.errors import SolverError
from gascompile.passes.bounds import linear_program
from gascompile.passes.bounds.linear_program import (
    INFINITY,
    Ending,
    LinearProgram,
    Loaded,
    solver_name,
)


def knapsack() -> LinearProgram:
    """Return: carry 3 of value 4, 4 of value 5 and 5 of value 6 within 7."""
    program = LinearProgram("knapsack")
    columns = [program.add_variable(0, 1, cost=-value, integer=True) for value in (4, 5, 6)]
    program.add_row(-INFINITY, 7, zip(columns, (3.0, 4.0, 5.0), strict=True))
    return program


def test_integers() -> None:
    found = knapsack().solve(time_limit_s=10)
    assert (found.ending, found.values) == (Ending.OPTIMAL, (1.0, 1.0, 0.0))
    assert found.objective == -9.0
    assert found.bound == pytest.approx(-9.0)


def test_a_solver_is_silenced_before_it_can_speak(monkeypatch: pytest.MonkeyPatch) -> None:
    highspy = pytest.importorskip("highspy")
    speaks: list[bool] = []
    enabled = highspy.Highs.enableCallbacks

    def speaking(solver: Any) -> None:
        speaks.append(solver.getOptionValue("output_flag")[1])
        enabled(solver)

    monkeypatch.setattr(highspy.Highs, "enableCallbacks", speaking)
    assert Loaded(knapsack()).solve().objective == -9.0
    assert speaks == [False]


def test_the_relaxation_bounds_the_integers() -> None:
    program = LinearProgram("halves")
    columns = [program.add_variable(0, 1, cost=-1, integer=True) for _ in range(2)]
    program.add_row(-INFINITY, 3, [(column, 2.0) for column in columns])
    relaxed = program.solve(time_limit_s=10, relaxed=True)
    assert relaxed.objective == pytest.approx(-1.5)
    assert relaxed.bound == pytest.approx(-1.5)
    assert list(relaxed.duals) == pytest.approx([-0.5])
    assert program.solve(time_limit_s=10).objective == -1.0


def test_rows_between_two_limits_and_terms_that_repeat() -> None:
    program = LinearProgram("row")
    x, y = program.add_variable(-INFINITY, cost=1), program.add_variable(0, 5, cost=-1)
    program.add_row(2, 8, [(x, 1.0), (x, 1.0), (y, 1.0)])
    program.add_row(1, 1, [(x, 1.0)])
    found = program.solve(time_limit_s=10)
    assert found.values == (1.0, 5.0)
    assert found.objective == -4.0


def test_what_has_no_solution() -> None:
    program = LinearProgram("none")
    program.add_row(2, 3, [(program.add_variable(0, 1), 1.0)])
    found = program.solve(time_limit_s=10)
    assert (found.ending, found.values) == (Ending.INFEASIBLE, ())
    assert found.bound == INFINITY


def test_no_columns_cost_nothing() -> None:
    found = LinearProgram("empty").solve(time_limit_s=10)
    assert (found.ending, found.objective) == (Ending.OPTIMAL, 0.0)


def test_cbc_where_highs_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    if solver_name() == "none":
        pytest.skip("there is no CBC here")
    found = knapsack().solve(time_limit_s=10)
    assert (found.solver, found.values) == ("cbc", (1.0, 1.0, 0.0))
    relaxed = knapsack().solve(time_limit_s=10, relaxed=True)
    assert relaxed.bound == pytest.approx(relaxed.objective)
    assert relaxed.objective <= found.objective


def test_no_solver_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_program, "solver_name", lambda: "none")
    found = knapsack().solve(time_limit_s=10)
    assert (found.ending, found.values, found.bound) == (Ending.NO_SOLVER, (), -INFINITY)


def packing() -> LinearProgram:
    """Return sixty things in forty sacks, which neither presolve nor the first node settles."""
    chance = random.Random(0)
    program = LinearProgram("packing")
    columns = [
        program.add_variable(0, 1, cost=-chance.randint(10, 20), integer=True) for _ in range(60)
    ]
    for _ in range(40):
        picked = chance.sample(columns, 12)
        program.add_row(-INFINITY, 40, [(column, chance.randint(5, 25)) for column in picked])
    return program


def test_a_search_that_its_nodes_end_is_not_optimal() -> None:
    found = packing().solve(time_limit_s=30, max_nodes=0)
    assert found.ending is Ending.STOPPED
    assert found.bound < packing().solve(time_limit_s=30).objective


def test_a_stopped_relaxation_proves_nothing() -> None:
    found = packing().solve(time_limit_s=30, relaxed=True, max_pivots=1)
    assert (found.ending, found.bound, found.duals) == (Ending.STOPPED, -INFINITY, ())


def test_an_ending_that_is_not_understood_is_an_error() -> None:
    program = LinearProgram("unbounded")
    program.add_variable(-INFINITY, cost=1)
    with pytest.raises(SolverError, match="ended with status"):
        program.solve(time_limit_s=10)


def test_bounds_that_change_between_solutions() -> None:
    program = LinearProgram("line")
    x = program.add_variable(cost=1.0)
    program.add_row(2, INFINITY, [(x, 1.0)])
    loaded = Loaded(program)
    assert loaded.solve().objective == 2.0
    loaded.bound_row(0, 5, INFINITY)
    assert loaded.solve().objective == 5.0
    loaded.bound_columns([4.0])
    assert loaded.solve().ending is Ending.INFEASIBLE
