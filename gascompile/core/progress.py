"""Progress on long work: a rich bar or spinner on a terminal, nothing anywhere else."""

from __future__ import annotations

import queue
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial

from gascompile.core.waiting import OwnThread

_SILENT: ContextVar[bool] = ContextVar("_SILENT", default=False)
"""Whether a bar that covers everything below is shown already: a terminal has room for one."""


@contextmanager
def task(description: str, total_bytes: int | None = None) -> Iterator[Callable[[int], None]]:
    """Show ``description`` while the body runs; the yielded function advances it by a number of bytes.

    Without ``total_bytes`` a spinner with the elapsed time is shown.
    """
    if _SILENT.get() or not sys.stderr.isatty():
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

    columns = [SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()]
    if total_bytes is not None:
        columns += [BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn()]
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        job = bar.add_task(description, total=total_bytes)
        yield lambda size_bytes: bar.advance(job, size_bytes)


@contextmanager
def stages(description: str, num_stages: int) -> Iterator[Callable[[str], None]]:
    """Show a bar of ``num_stages`` steps while the body runs; the yielded function names the one that begins.

    Bars of what is done in between are not shown.
    """
    if not sys.stderr.isatty():
        yield lambda name: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TimeElapsedColumn(),
    )
    token = _SILENT.set(True)
    try:
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            job = bar.add_task(description, total=num_stages)
            begun = -1

            def begin(name: str) -> None:
                nonlocal begun
                begun += 1
                bar.update(job, description=f"{description}: {name}", completed=begun)

            yield begin
    finally:
        _SILENT.reset(token)


class LoadingBar:
    """A bar for resident weights that load in the background while the first call already runs.

    Made to be called from a reading thread with bytes done and bytes in all; silent off a terminal. A thread of
    its own draws it: an interrupt of the caller's leaves none of the terminal's locks behind.
    """

    def __init__(self, description: str, *, waits: bool = False) -> None:
        """Prepare the bar; one that ``waits``, as another is on the terminal, comes with ``show``."""
        self._description, self._is_seen = description, sys.stderr.isatty()
        self._messages: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
        self._drawer: OwnThread | None = None
        weakref.finalize(self, self._messages.put, None).atexit = False
        if not waits:
            self.show()

    def show(self) -> None:
        """Let the bar be drawn from now on; idempotent."""
        if self._is_seen and self._drawer is None:
            draw = partial(_draw, self._description, self._messages)
            self._drawer = OwnThread(draw, "gascompile-bar")

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        """Show that ``done_bytes`` of ``total_bytes`` have arrived."""
        if self._is_seen:
            self._messages.put((done_bytes, total_bytes))

    def close(self) -> None:
        """Remove the bar, also where loading ended early; idempotent."""
        if self._drawer is not None:
            self._messages.put(None)
            self._drawer.join()


def _draw(description: str, messages: queue.SimpleQueue[tuple[int, int] | None]) -> None:
    message = messages.get()
    if message is None:
        return
    shown_bytes, total_bytes = 0, message[1]
    with task(description, total_bytes) as advance:
        while message is not None:
            advance(message[0] - shown_bytes)
            shown_bytes = message[0]
            message = messages.get() if shown_bytes < total_bytes else None
