"""``weights="auto"``: a plan is made with each form of the weights, and the least predicted time decides."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from gascompile.core.errors import InfeasiblePlanError, UnsupportedOpError
from gascompile.core.program import Program
from gascompile.core.sizes import format_time
from gascompile.formats.layout import is_read_packed
from gascompile.passes.graph.change_formats import change_formats
from gascompile.precision.choice import TRIED as PACKED
from gascompile.precision.choice import choose_forms, is_stored_losslessly
from gascompile.precision.sensitivity import Sensitivity

_log = logging.getLogger("gascompile")

TRIED = (None, "bf16", "int8", "int4")
"""The forms, from what loses nothing to what loses most; ``None`` moves weights as they are stored."""
TIE = 0.01
"""A form has to be faster by this share than one that loses less: predictions are no better than that."""


@dataclass(slots=True)
class Forming:
    """Gives one captured program the forms that its weights move in."""

    program: Program
    """With weights as they are computed in."""
    stored: Mapping[str, str]
    """Dtype of every weight in its file."""
    measured: Callable[[Program], Mapping[str, Sensitivity] | None] | None
    """Given the program that moves its weights as they are stored, gives their sensitivities; called once at most."""
    interleaved: Mapping[str, int] = field(default_factory=dict)
    """Heads of the weights whose rows lie pair by pair in their file."""
    _measured: list[Mapping[str, Sensitivity] | None] = field(default_factory=list)

    def formed(self, weights: str | None, predicted_s: Callable[[Program], float]) -> Program:
        """Return the program as ``weights`` asks for it; ``auto`` needs ``predicted_s``.

        Raises:
            UnsupportedOpError: no weight can have the form.
            InfeasiblePlanError: of ``auto``, where the budget is too small in every form.
        """
        return fastest_form(self._in, predicted_s) if weights == "auto" else self._in(weights)

    def _in(self, weights: str | None) -> Program:
        is_packed = any(map(is_read_packed, self.stored.values()))
        sensitivities = self._sensitivities() if weights in PACKED and not is_packed else None
        forms = choose_forms(self.program, self.stored, weights, sensitivities, self.interleaved)
        return change_formats(self.program, forms)

    def _sensitivities(self) -> Mapping[str, Sensitivity] | None:
        if not self._measured:
            measured = None
            if self.measured is not None and is_stored_losslessly(self.program, self.stored):
                measured = self.measured(self._in(None))
            self._measured.append(measured)
        return self._measured[0]


@dataclass(frozen=True, slots=True)
class _Trial:
    weights: str | None
    program: Program
    time_s: float


def fastest_form(
    formed: Callable[[str | None], Program], predicted_s: Callable[[Program], float]
) -> Program:
    """Return the program in the form that runs fastest, or in the least lossy one of those that tie.

    Args:
        formed: gives the program in a form of ``TRIED``.
        predicted_s: plans a program and gives the seconds of one run.

    Raises:
        InfeasiblePlanError: the budget is too small in every form; of the form that needs least.
    """
    trials: list[_Trial] = []
    refused: list[InfeasiblePlanError] = []
    for weights in TRIED:
        try:
            program = formed(weights)
        except UnsupportedOpError as error:
            if weights is None:
                raise
            _log.info("weights cannot move as %s: %s", weights, error)
            continue
        if any(trial.program.forms == program.forms for trial in trials):
            continue
        try:
            trials.append(_Trial(weights, program, predicted_s(program)))
        except InfeasiblePlanError as error:
            refused.append(error)
    if not trials:
        raise min(refused, key=lambda error: error.required_bytes)
    limit_s = min(trial.time_s for trial in trials) * (1 + TIE)
    chosen = next(trial for trial in trials if trial.time_s <= limit_s)
    times = ", ".join(f"{t.weights or 'as stored'} {format_time(t.time_s)}" for t in trials)
    _log.info("weights move %s: predicted are %s", chosen.weights or "as stored", times)
    return chosen.program
