"""What all parts have in common: asked figures beside measured ones, tables, and one file for parts run apart."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from gascompile.commands.output import grid

Result = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a part may use, and how much it is to do."""

    folder: Path
    toy: bool = False
    kills: int = 50
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of ``compile_step``, beside each part's own."""


@dataclass(slots=True)
class Found:
    """What a part has found: rows of a table, and the asked figures beside the measured ones."""

    rows: list[Result] = field(default_factory=list)
    checks: list[Result] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def at_most(self, what: str, measured: float | None, asked: float) -> None:
        """Note a figure that was asked to be no more than ``asked``; ``None`` where it was not had."""
        self._note(what, measured, f"<= {asked:g}", measured is not None and measured <= asked)

    def at_least(self, what: str, measured: float | None, asked: float) -> None:
        """Note a figure that was asked to be no less than ``asked``."""
        self._note(what, measured, f">= {asked:g}", measured is not None and measured >= asked)

    def true(self, what: str, measured: bool | None) -> None:
        """Note something that was asked to hold."""
        self._note(what, measured, "holds", bool(measured))

    def _note(self, what: str, measured: Any, asked: str, met: bool) -> None:
        self.checks.append({"what": what, "asked": asked, "measured": measured, "met": met})

    def result(self) -> Result:
        """Return what goes into the result file."""
        return {"checks": self.checks, "rows": self.rows, "notes": self.notes}


def relative(found: Sequence[float], wanted: Sequence[float]) -> float:
    """Return the largest difference of two runs' losses, relative to the second's."""
    return max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True))


def shown(value: Any) -> str:
    """Return a figure for people."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1e-3 or abs(value) >= 1e4 else f"{value:.3f}"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(shown, value))
    return "-" if value is None else str(value)


def tables(name: str, result: Result) -> list[Table]:
    """Return the rows and the checks of a part as tables."""
    made = []
    if rows := result["rows"]:
        columns = list(dict.fromkeys(key for row in rows for key in row if not key.startswith("_")))
        heads = [(column, number > 0) for number, column in enumerate(columns)]
        cells = [[shown(row.get(column)) for column in columns] for row in rows]
        made.append(grid(f"{name}, load {result['load']:.1f}", heads, cells))
    heads = [("asked of it", False), ("asked", True), ("measured", True), ("met", True)]
    cells = [
        [check["what"], check["asked"], shown(check["measured"]), shown(check["met"])]
        for check in result["checks"]
    ]
    made.append(grid(name, heads, cells))
    return made


def merged(path: Path, result: Result) -> Result:
    """Return ``result`` with the parts that the file has already and that were not run now."""
    if not path.exists():
        return result
    before = json.loads(path.read_text(encoding="utf-8"))
    return {**result, "parts": {**before.get("parts", {}), **result["parts"]}}
