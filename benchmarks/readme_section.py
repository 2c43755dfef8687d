"""The newest result of a benchmark between two markers of the README: written there, or compared with it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def replaced(text: str, body: str, begin: str, end: str) -> str:
    """Return ``text`` with ``body`` between the markers.

    Raises:
        SystemExit: the markers are not there exactly once and in order.
    """
    before, has_begin, rest = text.partition(begin)
    _, has_end, after = rest.partition(end)
    if not has_begin or not has_end or begin in rest or end in after:
        raise SystemExit(f"the text needs {begin} and {end}, once each and in this order")
    return f"{before}{begin}\n{body}\n{end}{after}"


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return rows as a table of Markdown."""
    lines = [titles, ["---:"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def read_result(path: Path) -> dict[str, Any]:
    """Read a result file; raises ``SystemExit`` where it holds none."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SystemExit(f"cannot read {path}: {error}; measure again or remove it") from error
    if not isinstance(data, dict):
        raise SystemExit(f"{path} holds no result; measure again or remove it")
    return data


def fill_in(
    argv: Sequence[str] | None,
    *,
    about: str | None,
    markers: tuple[str, str],
    newest: Callable[[Path], Path | None],
    render: Callable[[dict[str, Any], str], str],
    missing: str,
) -> int:
    """Fill in the README; 1 where there is no result, or where ``--check`` finds another table.

    Args:
        argv: arguments of the command.
        about: what it says of itself.
        markers: the first and the last line of the section.
        newest: finds the result file in a folder.
        render: returns a result as Markdown; told where it can be looked up.
        missing: what to say where there is none, about the folder.
    """
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    options = parser.parse_args(argv)
    path = newest(options.results)
    if path is None:
        sys.stderr.write(missing.format(options.results) + "\n")
        return 1
    old = options.readme.read_text(encoding="utf-8")
    body = render(read_result(path), f"benchmarks/results/{path.name}")
    new = replaced(old, body, *markers)
    if options.check:
        if new != old:
            sys.stderr.write(
                f"{options.readme.name} does not show {path.name}; run it without --check\n"
            )
        return int(new != old)
    options.readme.write_text(new, encoding="utf-8")
    return 0
