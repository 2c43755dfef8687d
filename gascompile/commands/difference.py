"""``diff``: what distinguishes two plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType

from gascompile.commands import options as opt
from gascompile.commands.output import emit, grid, note
from gascompile.commands.plans import read_plan
from gascompile.core import serial
from gascompile.core.sizes import format_size, format_time

if TYPE_CHECKING:  # help and wrong usage need not wait for the passes
    from gascompile.passes.explain.diff import Change, PlanDiff

_SHOWN = 12
"""Rows of a table for people; JSON has all."""

Before = Annotated[
    Path, typer.Argument(metavar="A", help="A plan file or a bundle.", show_default=False)
]
After = Annotated[
    Path, typer.Argument(metavar="B", help="The one to compare with it.", show_default=False)
]


def diff_verb(a: Before, b: After, json: opt.JsonFlag = False) -> None:
    """Show what is different between two plans, most important first.

    Example: [bold]gascompile diff small.plan.json large.plan.json[/bold]
    """
    from gascompile.passes.explain.diff import diff
    from gascompile.passes.verify.walk import verify

    plans = [read_plan(a), read_plan(b)]
    for made in plans:
        verify(made)
    difference = diff(*plans)
    data = {"identical": difference.identical, **_fields(difference)}
    emit(json, data, *_parts(difference))


def _fields(difference: PlanDiff) -> dict[str, serial.JsonValue]:
    data = serial.to_json(difference)
    assert isinstance(data, dict)
    return data


def _parts(difference: PlanDiff) -> list[RenderableType]:
    if difference.identical:
        return [note("The plans do the same.")]
    parts: list[RenderableType] = [
        note(f"A: {difference.before}\nB: {difference.after}\n{_verdict(difference)}")
    ]
    if not difference.same_workload:
        parts.append(
            note(
                "The workloads differ; tensors and ops are compared by name as far as both have them.",
                style="yellow",
            )
        )
    rows = [(c.name, _value(c, c.before), _value(c, c.after), _step(c)) for c in difference.summary]
    columns = [("", False), ("A", False), ("B", False), ("change", True)]
    parts += _table("What differs", columns, rows)
    parts += _table(
        "Homes",
        [("tensor", False), ("size", True), ("A", False), ("B", False)],
        [(h.tensor, format_size(h.size_bytes), h.before, h.after) for h in difference.homes],
    )
    parts += _table(
        "Moves per iteration",
        [("tensor", False), ("size", True), ("A", False), ("B", False)],
        [
            (m.tensor, format_size(m.size_bytes), _moves(m.before), _moves(m.after))
            for m in difference.moves
        ],
    )
    parts += _table(
        "Ops",
        [("op", False), ("A", False), ("B", False)],
        [
            (
                s.op,
                f"{s.before}, {format_time(s.before_s)}",
                f"{s.after}, {format_time(s.after_s)}",
            )
            for s in difference.sites
        ],
    )
    for name, names in (("A", difference.only_before), ("B", difference.only_after)):
        if names:
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            parts.append(note(f"Only in {name}: {', '.join(names[:_SHOWN])}{more}"))
    return parts


def _verdict(difference: PlanDiff) -> str:
    if not difference.change_s:
        return "Both take the same time."
    word = "slower" if difference.change_s > 0 else "faster"
    return f"B is {format_time(abs(difference.change_s))} per iteration {word}."


def _table(
    title: str, columns: Sequence[tuple[str, bool]], rows: Sequence[Sequence[str]]
) -> list[RenderableType]:
    """Return a table of the first rows and a line about the others; nothing where there are none."""
    if not rows:
        return []
    parts: list[RenderableType] = [grid(title, columns, rows[:_SHOWN])]
    if len(rows) > _SHOWN:
        parts.append(note(f"and {len(rows) - _SHOWN} more; --json has all"))
    return parts


def _value(change: Change, value: float | str | None) -> str:
    if value is None:
        return "none"
    if isinstance(value, str):
        return value
    return format_time(value) if change.unit == "s" else format_size(value)


def _step(change: Change) -> str:
    a, b = change.before, change.after
    if isinstance(a, str) or isinstance(b, str) or a is None or b is None:
        return ""
    sign = "-" if b < a else "+"
    shown = format_time(abs(b - a)) if change.unit == "s" else format_size(abs(b - a))
    share = f" ({(b - a) / a:+.1%})" if a and abs(b - a) < 10 * a else ""
    return f"{sign}{shown}{share}"


def _moves(moved: Mapping[str, int]) -> str:
    return ", ".join(f"{way} {format_size(size)}" for way, size in moved.items()) or "stays"
