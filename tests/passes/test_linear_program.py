"""Small programs solved by hand, and how each ending is told."""

from __future__ import annotations

import pulp
import pytest

from gascompile.core.errors import SolverError
from gascompile.passes.bounds import linear_program
from gascompile.passes.bounds.linear_program import INFINITY, Ending, LinearProgram, solver_name


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
    monkeypatch.setattr(pulp.HiGHS, "available", lambda self: False)
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


@pytest.mark.parametrize(
    ("status", "solution", "ending"),
    [
        (pulp.LpStatusOptimal, pulp.LpSolutionOptimal, Ending.OPTIMAL),
        (pulp.LpStatusOptimal, pulp.LpSolutionIntegerFeasible, Ending.STOPPED),
        (pulp.LpStatusNotSolved, pulp.LpSolutionNoSolutionFound, Ending.STOPPED),
        (pulp.LpStatusInfeasible, pulp.LpSolutionInfeasible, Ending.INFEASIBLE),
    ],
)
def test_endings(
    monkeypatch: pytest.MonkeyPatch, status: int, solution: int, ending: Ending
) -> None:
    end_with(monkeypatch, status, solution)
    assert knapsack().solve(time_limit_s=10).ending is ending


def test_a_stopped_relaxation_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    end_with(monkeypatch, pulp.LpStatusOptimal, pulp.LpSolutionIntegerFeasible)
    assert knapsack().solve(time_limit_s=10, relaxed=True).bound == -INFINITY


@pytest.mark.parametrize(
    ("status", "solution"),
    [
        (pulp.LpStatusUnbounded, pulp.LpSolutionUnbounded),
        (pulp.LpStatusUndefined, pulp.LpSolutionNoSolutionFound),
        (17, 17),
    ],
)
def test_an_ending_that_is_not_understood_is_an_error(
    monkeypatch: pytest.MonkeyPatch, status: int, solution: int
) -> None:
    end_with(monkeypatch, status, solution)
    with pytest.raises(SolverError, match="ended with status"):
        knapsack().solve(time_limit_s=10)


def end_with(monkeypatch: pytest.MonkeyPatch, status: int, solution: int) -> None:
    """Make the solver claim an ending after it has solved."""
    solve = pulp.LpProblem.solve

    def claim(program: pulp.LpProblem, solver: pulp.LpSolver) -> None:
        solve(program, solver)
        program.status, program.sol_status = status, solution

    monkeypatch.setattr(pulp.LpProblem, "solve", claim)
