"""Signals wait for safe points, or for the end; handlers are as they were afterwards."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from gascompile.core import deferral
from gascompile.core.deferral import deferred, deferring, safe_point


class HandledError(Exception):
    """What the handler raises."""


def handler(number: int, frame: object) -> None:
    """Raise, as Python's own does for Ctrl-C."""
    raise HandledError(number)


@pytest.fixture(autouse=True)
def handled() -> Iterator[None]:
    """Let a signal have a handler that raises, and another one none."""
    before = signal.signal(signal.SIGUSR1, handler), signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGUSR1, before[0])
    signal.signal(signal.SIGUSR2, before[1])


def come() -> None:
    """Let the signal come, and its handler run."""
    signal.raise_signal(signal.SIGUSR1)


def test_a_signal_waits_for_the_end_and_is_not_lost() -> None:
    done = []

    def work() -> None:
        come()
        signal.raise_signal(signal.SIGUSR2)
        done.append(1)

    with pytest.raises(HandledError):
        deferred(work)
    assert done == [1]
    assert signal.getsignal(signal.SIGUSR1) is handler
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN
    assert deferred(lambda: 3) == 3


def test_a_safe_point_raises_and_what_comes_on_the_way_out_waits() -> None:
    left = []

    @deferring
    def inner() -> None:
        come()
        try:
            safe_point()
            left.append("not raised")
        finally:
            come()
            left.append("out")

    with pytest.raises(HandledError) as raised:
        deferred(inner)
    assert left == ["out"]
    assert isinstance(raised.value.__context__, HandledError)
    safe_point()
    with pytest.raises(HandledError):
        come()


def test_a_handler_that_is_set_meanwhile_stays() -> None:
    deferred(lambda: signal.signal(signal.SIGUSR1, signal.SIG_DFL))
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_who_asks_again_after_long_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferral, "_PATIENCE_S", 0.0)
    left = []

    def endless() -> None:
        come()
        try:
            while True:
                come()
        finally:
            left.append(1)

    with pytest.raises(HandledError):
        deferred(endless)
    assert left == [1]


def test_an_error_of_the_work_is_in_the_context_of_the_handlers() -> None:
    def work() -> None:
        come()
        raise ValueError

    with pytest.raises(HandledError) as raised:
        deferred(work)
    assert isinstance(raised.value.__context__, ValueError)


def test_other_threads_change_no_handlers() -> None:
    found = []
    other = threading.Thread(
        target=lambda: deferred(lambda: found.append(signal.getsignal(signal.SIGUSR1)))
    )
    other.start()
    other.join()
    assert found == [handler]
    with pytest.raises(HandledError):
        deferred(come)
