"""Figures of benchmarks beside what was asked of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table


def asked(
    what: str, figure: float, *, least: float | None = None, most: float | None = None
) -> dict[str, Any]:
    """Return a figure, in words what it is, and whether it lies within its limits."""
    holds = (least is None or figure >= least) and (most is None or figure <= most)
    return {"figure": figure, "of": what, "least": least, "most": most, "holds": holds}


def show_parts(title: str, parts: Mapping[str, Mapping[str, Any]], console: Console) -> None:
    """Print a line for each part: its figure, or its error."""
    table = Table(title=title)
    for column in ("part", "figure", "asked", "same results", "holds"):
        table.add_column(column)
    for part, found in parts.items():
        if "error" in found:
            table.add_row(part, found["error"][-200:], "", "", "no")
            continue
        least, most = found["least"], found["most"]
        limit = f"at least {least}" if least is not None else f"at most {most}"
        words = ["yes" if found[key] else "no" for key in ("equal", "holds")]
        table.add_row(part, f"{found['figure']:.3f} {found['of']}", limit, *words)
    console.print(table)
