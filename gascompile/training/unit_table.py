"""Unit table: the units of one step by what they were planned for."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

from gascompile.core.errors import CaptureError
from gascompile.training.planning.kinds import leaf_kinds
from gascompile.training.settings import Settings
from gascompile.training.unit import StepUnit
from gascompile.training.units import UnitMaker

_MOST_VALUES = 12
"""Plans for batches of one kind, each for other values in Python: capturing and planning take seconds."""
_Key = tuple[str, bool, frozenset[str]]
"""Kind of batch, whether it updates, and parameters that are updated beside those that the batch gives a gradient."""


class UnitTable:
    """Finds the unit for a batch, and keeps those that were made."""

    def __init__(self, maker: UnitMaker, settings: Settings) -> None:
        """Begin with none."""
        self._maker, self._settings = maker, settings
        self._units: dict[_Key, list[StepUnit]] = {}
        """One for each set of values that the loss reads in Python."""
        self._gradients: dict[str, frozenset[str]] = {}
        """Parameters that have a gradient, by kind of batch."""

    def __iter__(self) -> Iterator[StepUnit]:
        return chain.from_iterable(tuple(self._units.values()))

    def find(self, kind: str, *, updates: bool, pending: frozenset[str]) -> StepUnit | None:
        """Return the unit for batches of a kind and what the loss reads in Python today, if there is one.

        Args:
            pending: parameters that have gradients of batches before.
        """
        late = pending - self._gradients.get(kind, frozenset())
        for unit in self._units.get((kind, updates, late), ()):
            if unit.basis.changed() is None:
                return unit
        return None

    def make(
        self,
        kind: str,
        batch: Any,
        *,
        trains: bool,
        updates: bool,
        pending: frozenset[str],
        calls: bool = False,
    ) -> StepUnit:
        """Return a new unit; no transfer may be under way.

        Raises:
            CaptureError: what the loss reads in Python changes all the time.
            InfeasiblePlanError: the budget is too small; names the smallest feasible one.
            PlanMismatchError: another kind of batch than the one planned for, where that is not wanted.
        """
        others = [
            u for (k, *_), units in self._units.items() for u in units if u.trains and k != kind
        ]
        self._require_few(kind, updates=updates)
        self._settings.require_replan(leaf_kinds(batch), len(others) if trains else 0)
        try:
            does = self._settings.program(
                trains=trains, updates=updates, pending=pending, calls=calls
            )
            unit = self._maker.make(batch, does)
        finally:
            self._maker.leave()
        self._gradients[kind] = unit.program.gradients
        self._units.setdefault((kind, updates, pending - unit.program.gradients), []).append(unit)
        return unit

    def _require_few(self, kind: str, *, updates: bool) -> None:
        """Refuse to plan for ever new values.

        Raises:
            CaptureError: names one that changes.
        """
        alike = [
            u
            for (k, up, _), units in self._units.items()
            for u in units
            if (k, up) == (kind, updates)
        ]
        if len(alike) >= _MOST_VALUES:
            raise CaptureError(
                f"{len(alike)} plans were made for batches of one shape, and a value that the loss reads in Python "
                f"has changed again: {alike[-1].basis.changed()}. Keep it in a buffer of the model, or pass it in "
                "the batch as a tensor; it then changes without another plan"
            )

    def drop(self, unit: StepUnit) -> None:
        """Forget a unit under which no transfer is under way, and give its files back."""
        for units in self._units.values():
            if any(u is unit for u in units):
                units[:] = [u for u in units if u is not unit]
        unit.executor.close()

    def clear(self) -> list[StepUnit]:
        """Forget all units and return them."""
        units = list(self)
        self._units.clear()
        return units
