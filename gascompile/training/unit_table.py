"""Unit table: the units of one step by what they were planned for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gascompile.training.kinds import leaf_kinds
from gascompile.training.settings import Settings
from gascompile.training.units import Unit, UnitMaker

_Key = tuple[str, bool, frozenset[str]]
"""Kind of batch, whether it updates, and parameters that are updated beside those that the batch gives a gradient."""


class UnitTable:
    """Finds the unit for a batch, and keeps those that were made."""

    def __init__(self, maker: UnitMaker, settings: Settings) -> None:
        """Begin with none."""
        self._maker, self._settings = maker, settings
        self._units: dict[_Key, Unit] = {}
        self._gradients: dict[str, frozenset[str]] = {}
        """Parameters that have a gradient, by kind of batch."""

    def __iter__(self) -> Iterator[Unit]:
        return iter(tuple(self._units.values()))

    def find(self, kind: str, *, updates: bool, pending: frozenset[str]) -> Unit | None:
        """Return the unit for batches of a kind, if there is one.

        Args:
            pending: parameters that have gradients of batches before.
        """
        late = pending - self._gradients.get(kind, frozenset())
        return self._units.get((kind, updates, late))

    def make(
        self, kind: str, batch: Any, *, trains: bool, updates: bool, pending: frozenset[str]
    ) -> Unit:
        """Return a new unit; no transfer may be under way.

        Raises:
            InfeasiblePlanError: the budget is too small; names the smallest feasible one.
            PlanMismatchError: another kind of batch than the one planned for, where that is not wanted.
        """
        others = [u for (k, *_), u in self._units.items() if u.trains and k != kind]
        self._settings.require_replan(leaf_kinds(batch), len(others) if trains else 0)
        try:
            unit = self._maker.make(batch, trains=trains, updates=updates, pending=pending)
        finally:
            self._maker.leave()
        self._gradients[kind] = unit.program.gradients
        self._units[kind, updates, pending - unit.program.gradients] = unit
        return unit

    def clear(self) -> list[Unit]:
        """Forget all units and return them."""
        found = list(self)
        self._units.clear()
        return found
