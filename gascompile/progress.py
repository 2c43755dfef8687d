"""Progress on long work: a rich bar or spinner on a terminal, nothing anywhere else."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def task(description: str, total_bytes: int | None = None) -> Iterator[Callable[[int], None]]:
    """Show ``description`` while the body runs; the yielded function advances it by a number of bytes.

    Without ``total_bytes`` a spinner with the elapsed time is shown.
    """
    if not sys.stderr.isatty():
        yield lambda size_bytes: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
        TransferSpeedColumn,
    )

    columns = [SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()]
    if total_bytes is not None:
        columns += [BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn()]
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        job = bar.add_task(description, total=total_bytes)
        yield lambda size_bytes: bar.advance(job, size_bytes)
