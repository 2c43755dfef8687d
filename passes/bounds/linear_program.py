"""Linear program: columns and rows by number, solved through PuLP by HiGHS or, where that is missing, CBC.

The program is kept as plain lists until it is solved, so that building one costs little. What the solver
says is matched as a pair of status and solution status, and told in our own words. A search that the
clock ended is not optimal, whatever PuLP calls it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import pulp

from gascompile.core.errors import SolverError

INFINITY = math.inf
_FEASIBLE_POINT = 2
"""HiGHS's ``kSolutionStatusFeasible``."""
# PuLP carries no types; its expressions and variables pass through as they are.
Expression = Any


class Ending(Enum):
    """How a solver ended."""

    OPTIMAL = auto()
    STOPPED = auto()
    """The clock ended the search."""
    INFEASIBLE = auto()
    NO_SOLVER = auto()
    """Neither HiGHS nor CBC is installed."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a solver found."""

    ending: Ending
    solver: str
    """``highs``, ``cbc`` or ``none``."""
    values: tuple[float, ...]
    """Per column; empty where there is no feasible point."""
    duals: tuple[float, ...]
    """Per row, of an optimal relaxation; else empty."""
    objective: float
    """Infinite where there is no feasible point."""
    bound: float
    """No solution is below it; minus infinity where nothing is proven, infinity where none exists."""
    pivots: int = 0
    """Iterations of the simplex method; rows where the solver does not tell."""


@dataclass(slots=True)
class LinearProgram:
    """A program to be minimised."""

    name: str
    lows: list[float] = field(default_factory=list)
    highs: list[float] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)
    integers: list[bool] = field(default_factory=list)
    rows: list[tuple[float, float, dict[int, float]]] = field(default_factory=list)

    def add_variable(
        self, low: float = 0.0, high: float = INFINITY, *, cost: float = 0.0, integer: bool = False
    ) -> int:
        """Add a column and return its number."""
        self.lows.append(low)
        self.highs.append(high)
        self.costs.append(cost)
        self.integers.append(integer)
        return len(self.lows) - 1

    def add_row(self, low: float, high: float, terms: Iterable[tuple[int, float]]) -> int:
        """Add ``low <= sum of factor * column <= high`` and return the row's number.

        Terms of the same column are added up.
        """
        row: dict[int, float] = {}
        for column, factor in terms:
            row[column] = row.get(column, 0.0) + factor
        self.rows.append((low, high, row))
        return len(self.rows) - 1

    def solve(
        self,
        *,
        time_limit_s: float,
        gap: float = 0.0,
        relaxed: bool = False,
        max_pivots: int | None = None,
    ) -> Outcome:
        """Return the best point found.

        Args:
            time_limit_s: wall seconds for building and solving.
            gap: relative gap at which an integer search may stop.
            relaxed: let integer columns be fractional.
            max_pivots: iterations of the simplex method, where the solver counts them.

        Raises:
            SolverError: the solver ended in a state that is not understood.
        """
        begun_s = time.perf_counter()
        name = solver_name()
        if name == "none":
            return Outcome(Ending.NO_SOLVER, name, (), (), INFINITY, -INFINITY)
        program, columns, rows = self._build(relaxed=relaxed)
        left_s = max(0.05, time_limit_s - (time.perf_counter() - begun_s))
        continuous = relaxed or not any(self.integers)
        program.solve(_solver(name, left_s, gap, continuous, max_pivots))
        ending = _ending(program, self.name, name)
        if ending is Ending.INFEASIBLE:
            return Outcome(ending, name, (), (), INFINITY, INFINITY)
        return self._extract(program, columns, rows, ending, name, relaxed=relaxed)

    def _build(self, *, relaxed: bool) -> tuple[Expression, list[Expression], list[Expression]]:
        program = pulp.LpProblem(self.name, pulp.LpMinimize)
        columns = [
            program.add_variable(
                f"x{i}",
                None if low == -INFINITY else low,
                None if high == INFINITY else high,
                pulp.LpInteger if integer and not relaxed else pulp.LpContinuous,
            )
            for i, (low, high, integer) in enumerate(
                zip(self.lows, self.highs, self.integers, strict=True)
            )
        ]
        costs = {columns[i]: cost for i, cost in enumerate(self.costs) if cost}
        program.setObjective(pulp.LpAffineExpression(costs))
        rows: list[Expression] = []
        for i, (low, high, terms) in enumerate(self.rows):
            factors = {columns[column]: factor for column, factor in terms.items()}
            sides = [(pulp.LpConstraintEQ, low)] if low == high else []
            if not sides:
                sides += [(pulp.LpConstraintGE, low)] if low > -INFINITY else []
                sides += [(pulp.LpConstraintLE, high)] if high < INFINITY else []
            for sense, side in sides:
                expression = pulp.LpAffineExpression(factors)
                row = pulp.LpConstraint(expression, sense, f"r{i}_{sense + 1}", side)
                program.addConstraint(row)
                rows.append((i, row))
        return program, columns, rows

    def _extract(
        self,
        program: Expression,
        columns: list[Expression],
        rows: list[Expression],
        ending: Ending,
        name: str,
        *,
        relaxed: bool,
    ) -> Outcome:
        continuous = relaxed or not any(self.integers)
        values = tuple(column.varValue for column in columns)
        objective = pulp.value(program.objective)
        feasible = None not in values and objective is not None
        bound = -INFINITY
        pivots = len(self.rows)
        if name == "highs":
            info = program.solverModel.getInfo()
            pivots = max(0, info.simplex_iteration_count)
            feasible = feasible and info.primal_solution_status == _FEASIBLE_POINT
            # A relaxation that was stopped has a value, but no bound.
            bound = info.objective_function_value if continuous else info.mip_dual_bound
        elif feasible and ending is Ending.OPTIMAL and continuous:
            bound = objective
        if (continuous and ending is Ending.STOPPED) or not math.isfinite(bound):
            bound = -INFINITY
        duals: tuple[float, ...] = ()
        if continuous and ending is Ending.OPTIMAL:
            found = [0.0] * len(self.rows)
            for i, row in rows:
                found[i] += row.pi or 0.0
            duals = tuple(found)
        if not feasible:
            return Outcome(ending, name, (), (), INFINITY, bound, pivots)
        return Outcome(ending, name, values, duals, float(objective or 0.0), bound, pivots)


def solver_name() -> str:
    """Return which solver there is: ``highs``, ``cbc`` or ``none``."""
    if pulp.HiGHS().available():
        return "highs"
    return "cbc" if _cbc_path() else "none"


def _cbc_path() -> str | None:
    """Return the installed CBC, or the one that PuLP 3 brings along."""
    bundled = getattr(pulp.PULP_CBC_CMD, "pulp_cbc_path", None)
    for path in (None, bundled):
        found = pulp.COIN_CMD(msg=False, path=path).available()
        if found:
            return str(found)
    return None


def _solver(
    name: str, time_limit_s: float, gap: float, continuous: bool, max_pivots: int | None
) -> Expression:
    if name == "highs":
        counted = {"simplex_iteration_limit": max_pivots} if max_pivots is not None else {}
        return pulp.HiGHS(
            msg=False, mip=not continuous, gapRel=gap, timeLimit=time_limit_s, threads=1, **counted
        )
    return pulp.COIN_CMD(
        msg=False,
        path=_cbc_path(),
        mip=not continuous,
        gapRel=gap,
        timeLimit=time_limit_s,
        threads=1,
    )


def _ending(program: Expression, name: str, solver: str) -> Ending:
    match (program.status, program.sol_status):
        case (pulp.LpStatusOptimal, pulp.LpSolutionOptimal):
            return Ending.OPTIMAL
        # PuLP calls a search that the clock ended optimal; only the solution's status tells.
        case (pulp.LpStatusOptimal, pulp.LpSolutionIntegerFeasible):
            return Ending.STOPPED
        case (pulp.LpStatusNotSolved, pulp.LpSolutionNoSolutionFound):
            return Ending.STOPPED
        case (pulp.LpStatusInfeasible, pulp.LpSolutionInfeasible):
            return Ending.INFEASIBLE
        case (status, solution):
            raise SolverError(
                f"{solver} ended with status '{pulp.LpStatus.get(status, status)}' and solution "
                f"'{pulp.LpSolution.get(solution, solution)}' on the program '{name}'"
            )
