"""Waits for drives that bring nothing are given up, once somebody has set a limit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gascompile.core import patience
from gascompile.core.errors import StorageError
from gascompile.core.waiting import Gate, OwnThread


class _Owner:
    pass


def _waits(clock: list[float], watch: patience.Watch, seconds: float) -> None:
    """Look every half second, for so long."""
    for _ in range(int(2 * seconds)):
        clock[0] += 0.5
        watch()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Yield the time by which patience is measured."""
    now = [100.0]

    class _Time:
        monotonic = staticmethod(lambda: now[0])

    monkeypatch.setattr(patience, "time", _Time)
    yield now
    # What these tests gave up is not dead for others.
    patience.arrived()


def test_alone_a_process_waits_for_as_long_as_it_takes(clock: list[float]) -> None:
    watch = patience.Watch("a read")
    _waits(clock, watch, 1000)


def test_what_brings_nothing_for_too_long_is_given_up(clock: list[float]) -> None:
    owner = _Owner()
    patience.limit(owner, 20.0)
    watch = patience.Watch("a read")
    _waits(clock, watch, 19)
    patience.arrived()
    _waits(clock, watch, 19)
    with pytest.raises(StorageError, match=r"for 20 s, which a read waits for.*Check the drives"):
        _waits(clock, watch, 2)


def test_after_that_waits_are_short_until_something_arrives(clock: list[float]) -> None:
    owner = _Owner()
    patience.limit(owner, 20.0)
    watch = patience.Watch("a read")
    with pytest.raises(StorageError):
        _waits(clock, watch, 21)
    patience.lift(owner)
    again = patience.Watch("the end of what moves")
    with pytest.raises(StorageError, match="the end of what moves"):
        _waits(clock, again, 1)
    patience.arrived()
    _waits(clock, patience.Watch("a read"), 1000)


def test_what_a_stopped_process_has_missed_does_not_count(clock: list[float]) -> None:
    owner = _Owner()
    patience.limit(owner, 20.0)
    watch = patience.Watch("a read")
    _waits(clock, watch, 15)
    clock[0] += 3600.0
    watch()
    _waits(clock, watch, 3)
    with pytest.raises(StorageError):
        _waits(clock, watch, 3)


def test_the_longest_limit_counts_and_none_outlives_its_owner(clock: list[float]) -> None:
    short, long = _Owner(), _Owner()
    patience.limit(short, 2.0)
    patience.limit(long, 50.0)
    watch = patience.Watch("a read")
    _waits(clock, watch, 40)
    del long
    with pytest.raises(StorageError):
        _waits(clock, watch, 1)


def test_a_gate_that_nobody_opens_and_a_thread_that_hangs() -> None:
    owner, gate = _Owner(), Gate()
    patience.limit(owner, 0.3)
    hung = OwnThread(gate.wait, "hung")
    with pytest.raises(StorageError):
        gate.wait(patience.Watch("a read"))
    with pytest.raises(StorageError):
        hung.join(patience.Watch("the end of a thread"))
    gate.open()
    gate.wait(patience.Watch("a read"))
    hung.join(patience.Watch("the end of a thread"))
    assert not hung.is_alive
