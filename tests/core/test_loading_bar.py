"""The bar of weights that load: drawn at once, or from when the terminal is free for it."""

from __future__ import annotations

import queue
import sys

import pytest

from gascompile.core import progress
from gascompile.core.progress import LoadingBar
from gascompile.core.waiting import own_threads
from tests.waiting import eventually

_NAME = "gascompile-bar"


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return what is drawn on a terminal that stands in for the real one."""
    messages: list[tuple[int, int]] = []

    def draw(_description: str, given: queue.SimpleQueue[tuple[int, int] | None]) -> None:
        while (message := given.get()) is not None:
            messages.append(message)

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(progress, "_draw", draw)
    return messages


def test_a_bar_that_waits_shows_what_came_before_once_it_may(drawn: list[tuple[int, int]]) -> None:
    bar = LoadingBar("Loading", waits=True)
    bar(1, 2)
    assert own_threads(_NAME) == []
    bar.show()
    bar.show()
    assert eventually(lambda: own_threads(_NAME) == [_NAME])
    bar(2, 2)
    bar.close()
    assert drawn == [(1, 2), (2, 2)]


def test_a_bar_that_was_never_shown_ends(drawn: list[tuple[int, int]]) -> None:
    bar = LoadingBar("Loading", waits=True)
    bar(1, 2)
    bar.close()
    assert drawn == []


def test_a_bar_that_does_not_wait_is_drawn_at_once(drawn: list[tuple[int, int]]) -> None:
    bar = LoadingBar("Loading")
    bar(2, 2)
    bar.close()
    assert drawn == [(2, 2)]
