"""Work on several threads: in order, no more at once than asked for, and no thread left behind."""

from __future__ import annotations

import _thread
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from gascompile.core.side_by_side import in_order
from gascompile.core.waiting import own_threads


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    yield
    assert not own_threads("gascompile-side")


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_results_come_in_order(num_threads: int) -> None:
    def work(i: int) -> int:
        time.sleep(0.002 * (i % 3))
        return i

    taken: list[int] = []
    in_order((partial(work, i) for i in range(20)), taken.append, num_threads)
    assert taken == list(range(20))


def test_nothing_to_do_is_done() -> None:
    in_order([], pytest.fail, 4)


def test_several_work_at_once_and_few_wait() -> None:
    together = threading.Barrier(3, timeout=30)
    asked = 0
    taken: list[int] = []

    def works() -> Iterator[Callable[[], int]]:
        nonlocal asked
        for _ in range(30):
            asked += 1
            assert asked - len(taken) <= 6
            yield together.wait

    in_order(works(), taken.append, 3)
    assert len(taken) == 30


@pytest.mark.parametrize("num_threads", [1, 3])
def test_the_first_error_is_raised_and_what_waits_is_not_done(num_threads: int) -> None:
    done: list[int] = []

    def work(i: int) -> int:
        if i >= 4:
            raise OSError(i)
        done.append(i)
        return i

    taken: list[int] = []
    with pytest.raises(OSError, match="4"):
        in_order((partial(work, i) for i in range(1000)), taken.append, num_threads)
    assert taken == sorted(done) == [0, 1, 2, 3]


def test_an_interrupt_ends_it_early() -> None:
    done: list[int] = []

    def work(i: int) -> None:
        time.sleep(0.01)
        done.append(i)
        if i == 5:
            _thread.interrupt_main()

    with pytest.raises(KeyboardInterrupt):
        in_order((partial(work, i) for i in range(1000)), lambda result: None, 2)
    assert len(done) < 100
