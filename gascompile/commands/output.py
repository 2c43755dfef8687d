"""What every verb prints: tables for people, one JSON document for programs, errors with an exit code.

With ``--json`` standard output carries that document and nothing else, whatever a model's own code
prints while it is built or traced.
"""

from __future__ import annotations

import contextlib
import errno
import json
import sys
from collections.abc import Iterable, Iterator, Sequence

import typer
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from gascompile.core.errors import (
    DeviceMapError,
    GASCompileError,
    InfeasiblePlanError,
    PlanVerificationError,
    StorageError,
)
from gascompile.core.serial import JsonValue, to_json

# Newer typer carries a click of its own, older ones import it; this is UsageError in both.
USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]


class _FullOutputError(StorageError):
    """Standard output takes no more, and so no error either."""


def emit(as_json: bool, data: JsonValue, *parts: RenderableType) -> None:
    """Print ``data`` as JSON, or ``parts`` for people.

    Raises:
        StorageError: standard output takes no more.
    """
    try:
        if as_json:
            sys.stdout.write(json.dumps(data, indent=1) + "\n")
        else:
            console = Console(highlight=False)
            for part in parts:
                console.print(part)
        sys.stdout.flush()
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise  # who reads has seen enough, of which the library's own end says nothing
        raise _FullOutputError(f"standard output cannot be written: {error.strerror}") from error


@contextlib.contextmanager
def reserved_stdout(as_json: bool) -> Iterator[None]:
    """Send what is printed meanwhile to standard error, so that only our document reaches the output."""
    if not as_json:
        yield
        return
    with contextlib.redirect_stdout(sys.stderr):
        yield


def fields(title: str, rows: Iterable[tuple[str, str]]) -> Table:
    """Return a two-column table of names and values."""
    table = Table(
        title=_title(title), title_justify="left", show_header=False, box=None, pad_edge=False
    )
    table.add_column(no_wrap=True, style="cyan")
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(Text(name), Text(value))
    return table


def grid(
    title: str, columns: Sequence[tuple[str, bool]], rows: Iterable[Sequence[str | Text]]
) -> Table:
    """Return a table with a header; ``columns`` are names and whether they hold numbers."""
    table = Table(
        title=_title(title), title_justify="left", box=None, pad_edge=False, header_style="bold"
    )
    for name, numeric in columns:
        table.add_column(
            Text(name), justify="right" if numeric else "left", overflow="fold", no_wrap=numeric
        )
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return table


def _title(text: str) -> Text:
    """Return a title, which may be a name that somebody else gave: brackets in it are text, not markup."""
    return Text(text, style="table.title")


def note(text: str, *, style: str = "") -> Text:
    """Return a line of its own; brackets in it are text, not markup."""
    return Text(text, style=style)


def counted(number: int, noun: str) -> str:
    """Return ``1 weight`` or ``2 weights``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def warnings_block(warnings: Iterable[str]) -> list[Text]:
    """Return one line per warning."""
    return [note(f"warning: {text}", style="yellow") for text in warnings]


def report_error(error: Exception, *, as_json: bool) -> None:
    """Print an error: a JSON document on standard output, where that takes it, or its message on standard error."""
    if as_json:
        with contextlib.suppress(_FullOutputError):
            emit(True, {"error": _error_json(error)})
            return
    Console(stderr=True, highlight=False).print(
        Text.assemble(("error: ", "bold red"), str(error)), soft_wrap=True
    )


def _error_json(error: Exception) -> dict[str, JsonValue]:
    data: dict[str, JsonValue] = {"type": type(error).__name__, "message": str(error)}
    if isinstance(error, InfeasiblePlanError):
        for name in ("required_bytes", "limit_bytes", "tier", "op"):
            data[name] = getattr(error, name)
        data["demands"] = to_json(error.demands)
    elif isinstance(error, PlanVerificationError):
        data["step"] = error.step
    elif isinstance(error, DeviceMapError):
        data["names"] = list(error.names)
    elif isinstance(error, typer.BadParameter):
        data["message"] = error.format_message()
    return data


class VerbGroup(typer.core.TyperGroup):
    """Runs a verb and turns its failure into a message and an exit code."""

    def invoke(self, ctx: typer.Context) -> object:  # type: ignore[override]
        """Run the verb named in ``ctx``; 1 for a failed job, 2 for wrong usage."""
        as_json = "--json" in ctx.args
        try:
            return super().invoke(ctx)
        except GASCompileError as error:
            report_error(error, as_json=as_json)
            raise typer.Exit(1) from error
        except USAGE_ERROR as error:
            if not as_json:
                raise
            report_error(error, as_json=True)
            raise typer.Exit(2) from error
