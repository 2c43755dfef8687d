"""Linear program: columns and rows by number, solved by HiGHS or, where that is missing, by CBC through PuLP.

The program is kept as plain lists until it is solved and then handed over in one piece: PuLP takes longer to
build most of our programs than HiGHS to solve them. How a solver ended is told in our own words; whatever is
not understood is an error. A search that a limit ended is not optimal.
"""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cache
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from gascompile.core.errors import SolverError

INFINITY = math.inf
_FEASIBLE_POINT = 2
"""HiGHS's ``kSolutionStatusFeasible``."""
_SMALL = 200
"""Columns up to which an integer program is not presolved: HiGHS 1.15 recurses without end there, and ends the process,
on one of 48 columns whose last bytes do not fit by a rounding error."""
Terms = Iterable[tuple[int, float]]
"""``(column, factor)``."""
# Neither solver's package carries types; their objects pass through as they are.
Untyped = Any


class Ending(Enum):
    """How a solver ended."""

    OPTIMAL = auto()
    STOPPED = auto()
    """Its work was done: it had as many pivots or nodes as it was granted."""
    OUT_OF_TIME = auto()
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

    def add_row(self, low: float, high: float, terms: Terms) -> int:
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
        gap_abs: float = 0.0,
        relaxed: bool = False,
        max_pivots: int | None = None,
        max_nodes: int | None = None,
    ) -> Outcome:
        """Return the best point found.

        Args:
            time_limit_s: wall seconds for building and solving.
            gap: relative gap at which an integer search may stop.
            gap_abs: the same in units of the objective.
            relaxed: let integer columns be fractional.
            max_pivots: iterations of the simplex method, where the solver counts them.
            max_nodes: nodes of an integer search, where the solver counts them.

        Raises:
            SolverError: the solver ended in a state that is not understood.
        """
        begun_s = time.perf_counter()
        name = solver_name()
        if name == "none":
            return Outcome(Ending.NO_SOLVER, name, (), (), INFINITY, -INFINITY)
        if name == "cbc":
            return _by_cbc(self, time_limit_s, gap, relaxed=relaxed)
        loaded = Loaded(self, relaxed=relaxed)
        left_s = max(0.05, time_limit_s - (time.perf_counter() - begun_s))
        options: dict[str, float] = {"time_limit": left_s, "mip_rel_gap": gap}
        options |= {"mip_abs_gap": gap_abs} if gap_abs else {}
        options |= {"simplex_iteration_limit": max_pivots} if max_pivots is not None else {}
        options |= {"mip_max_nodes": max_nodes} if max_nodes is not None else {}
        return loaded.solve(options)


class Loaded:
    """A program that HiGHS holds, whose bounds may change between solutions."""

    def __init__(self, program: LinearProgram, *, relaxed: bool = False) -> None:
        import highspy  # Not at the top: without HiGHS this module still loads.

        untyped: Untyped = highspy
        self._statuses = untyped.HighsModelStatus
        self._name = program.name
        self._num_rows = len(program.rows)
        self._continuous = relaxed or not any(program.integers)
        self._highs = _quiet_solver()()
        self._highs.setOptionValue("threads", 1)
        if not self._continuous and len(program.lows) <= _SMALL:
            self._highs.setOptionValue("presolve", "off")
        model = untyped.HighsLp()
        model.num_col_, model.num_row_ = len(program.lows), len(program.rows)
        model.col_cost_ = np.array(program.costs, dtype=np.float64)
        model.col_lower_ = np.array(program.lows, dtype=np.float64)
        model.col_upper_ = np.array(program.highs, dtype=np.float64)
        model.row_lower_ = np.array([low for low, _, _ in program.rows], dtype=np.float64)
        model.row_upper_ = np.array([high for _, high, _ in program.rows], dtype=np.float64)
        if not self._continuous:
            kinds = untyped.HighsVarType
            model.integrality_ = [
                kinds.kInteger if integer else kinds.kContinuous for integer in program.integers
            ]
        terms = [row for _, _, row in program.rows]
        count = sum(map(len, terms))
        model.a_matrix_.format_ = untyped.MatrixFormat.kRowwise
        model.a_matrix_.start_ = np.cumsum([0, *map(len, terms)], dtype=np.int32)
        model.a_matrix_.index_ = np.fromiter(chain.from_iterable(terms), np.int32, count)
        factors = chain.from_iterable(row.values() for row in terms)
        model.a_matrix_.value_ = np.fromiter(factors, np.float64, count)
        self._highs.passModel(model)

    def bound_row(self, row: int, low: float, high: float) -> None:
        """Change what a row may be."""
        self._highs.changeRowBounds(row, low, high)

    def bound_columns(self, highs: Sequence[float] | npt.NDArray[np.float64]) -> None:
        """Change what the first columns may be: from 0 to ``highs``."""
        count = len(highs)
        columns = np.arange(count, dtype=np.int32)
        self._highs.changeColsBounds(count, columns, np.zeros(count), np.array(highs))

    def solve(self, options: dict[str, float] | None = None) -> Outcome:
        """Return the best point found, with HiGHS's own names of options."""
        for name, value in (options or {}).items():
            self._highs.setOptionValue(name, value)
        self._highs.run()
        ending = self._ending()
        if ending is Ending.INFEASIBLE:
            return Outcome(ending, "highs", (), (), INFINITY, INFINITY)
        info = self._highs.getInfo()
        pivots = max(0, info.simplex_iteration_count)
        bound = info.objective_function_value if self._continuous else info.mip_dual_bound
        # A relaxation that was stopped has a value, but no bound.
        if (self._continuous and ending is not Ending.OPTIMAL) or not math.isfinite(bound):
            bound = -INFINITY
        if info.primal_solution_status != _FEASIBLE_POINT and ending is not Ending.OPTIMAL:
            return Outcome(ending, "highs", (), (), INFINITY, bound, pivots)
        point = self._highs.getSolution()
        has_duals = self._continuous and ending is Ending.OPTIMAL
        return Outcome(
            ending,
            "highs",
            tuple(point.col_value),
            tuple(point.row_dual) if has_duals else (),
            info.objective_function_value,
            bound,
            pivots,
        )

    def _ending(self) -> Ending:
        status, statuses = self._highs.getModelStatus(), self._statuses
        if status in (statuses.kOptimal, statuses.kModelEmpty):
            return Ending.OPTIMAL
        if status in (statuses.kInfeasible, statuses.kUnboundedOrInfeasible):
            return Ending.INFEASIBLE
        if status in (statuses.kIterationLimit, statuses.kSolutionLimit):
            return Ending.STOPPED
        if status == statuses.kTimeLimit:
            return Ending.OUT_OF_TIME
        raise SolverError(
            f"highs ended with status '{self._highs.modelStatusToString(status)}' on the program "
            f"'{self._name}' of {self._num_rows} rows"
        )


@cache
def _quiet_solver() -> Untyped:
    """Return HiGHS's class that says nothing: 1.16 prints as soon as it has callbacks, which is at birth."""
    import highspy

    untyped: Untyped = highspy

    def silenced(solver: Untyped) -> None:
        solver.setOptionValue("output_flag", False)
        untyped.Highs.enableCallbacks(solver)

    return type("QuietHighs", (untyped.Highs,), {"enableCallbacks": silenced})


def solver_name() -> str:
    """Return which solver there is: ``highs``, ``cbc`` or ``none``."""
    if importlib.util.find_spec("highspy") is not None:
        return "highs"
    return "cbc" if _cbc_path() else "none"


def _cbc_path() -> str | None:
    """Return the installed CBC, or the one that PuLP 3 brings along."""
    import pulp  # Not at the top: HiGHS mostly does without, and it takes 30 ms.

    bundled = getattr(pulp.PULP_CBC_CMD, "pulp_cbc_path", None)
    for path in (None, bundled):
        executable = pulp.COIN_CMD(msg=False, path=path).available()
        if executable:
            return str(executable)
    return None


def _by_cbc(program: LinearProgram, time_limit_s: float, gap: float, *, relaxed: bool) -> Outcome:
    """Return the best point that CBC finds; it tells of bounds only where it has finished."""
    import pulp  # Not at the top: HiGHS mostly does without, and it takes 30 ms.

    continuous = relaxed or not any(program.integers)
    model, columns, rows = _in_pulp(program, relaxed=relaxed)
    model.solve(
        pulp.COIN_CMD(
            msg=False,
            path=_cbc_path(),
            mip=not continuous,
            gapRel=gap,
            timeLimit=max(0.05, time_limit_s),
            threads=1,
        )
    )
    ending = _ending_of_cbc(model, program.name)
    count = len(program.rows)
    if ending is Ending.INFEASIBLE:
        return Outcome(ending, "cbc", (), (), INFINITY, INFINITY, count)
    values = tuple(column.varValue for column in columns)
    objective = pulp.value(model.objective)
    if None in values or objective is None:
        return Outcome(ending, "cbc", (), (), INFINITY, -INFINITY, count)
    proven = continuous and ending is Ending.OPTIMAL
    duals = [0.0] * count
    for i, row in rows:
        duals[i] += row.pi or 0.0
    return Outcome(
        ending,
        "cbc",
        values,
        tuple(duals) if proven else (),
        float(objective),
        float(objective) if proven else -INFINITY,
        count,
    )


def _in_pulp(
    program: LinearProgram, *, relaxed: bool
) -> tuple[Untyped, list[Untyped], list[tuple[int, Untyped]]]:
    import pulp  # Not at the top: HiGHS mostly does without, and it takes 30 ms.

    model = pulp.LpProblem(program.name, pulp.LpMinimize)
    columns = [
        model.add_variable(
            f"x{i}",
            None if low == -INFINITY else low,
            None if high == INFINITY else high,
            pulp.LpInteger if integer and not relaxed else pulp.LpContinuous,
        )
        for i, (low, high, integer) in enumerate(
            zip(program.lows, program.highs, program.integers, strict=True)
        )
    ]
    costs = {columns[i]: cost for i, cost in enumerate(program.costs) if cost}
    model.setObjective(pulp.LpAffineExpression(costs))
    rows: list[tuple[int, Untyped]] = []
    for i, (low, high, terms) in enumerate(program.rows):
        factors = {columns[column]: factor for column, factor in terms.items()}
        sides = [(pulp.LpConstraintEQ, low)] if low == high else []
        if not sides:
            sides += [(pulp.LpConstraintGE, low)] if low > -INFINITY else []
            sides += [(pulp.LpConstraintLE, high)] if high < INFINITY else []
        for sense, side in sides:
            expression = pulp.LpAffineExpression(factors)
            row = pulp.LpConstraint(expression, sense, f"r{i}_{sense + 1}", side)
            model.addConstraint(row)
            rows.append((i, row))
    return model, columns, rows


def _ending_of_cbc(model: Untyped, name: str) -> Ending:
    import pulp  # Not at the top: HiGHS mostly does without, and it takes 30 ms.

    match (model.status, model.sol_status):
        case (pulp.LpStatusOptimal, pulp.LpSolutionOptimal):
            return Ending.OPTIMAL
        # PuLP calls a search that the clock ended optimal; only the solution's status tells.
        case (pulp.LpStatusOptimal, pulp.LpSolutionIntegerFeasible):
            return Ending.OUT_OF_TIME
        case (pulp.LpStatusNotSolved, pulp.LpSolutionNoSolutionFound):
            return Ending.OUT_OF_TIME
        case (pulp.LpStatusInfeasible, pulp.LpSolutionInfeasible):
            return Ending.INFEASIBLE
        case (status, solution):
            raise SolverError(
                f"cbc ended with status '{pulp.LpStatus.get(status, status)}' and solution "
                f"'{pulp.LpSolution.get(solution, solution)}' on the program '{name}'"
            )
