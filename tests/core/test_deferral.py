"""Signals wait for safe points, or for the end; handlers are as they were afterwards."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gascompile
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
    mine: dict[int, Any] = {
        signal.SIGUSR1: handler,
        signal.SIGUSR2: signal.SIG_IGN,
        signal.SIGINT: signal.default_int_handler,
    }
    before = {number: signal.signal(number, own) for number, own in mine.items()}
    yield
    for number, own in before.items():
        signal.signal(number, own)


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
        signal.raise_signal(signal.SIGINT)
        try:
            safe_point()
            left.append("not raised")
        finally:
            left.append("out")

    with pytest.raises(HandledError) as raised:
        deferred(inner)
    assert left == ["out"]
    assert isinstance(raised.value.__context__, KeyboardInterrupt)
    safe_point()
    with pytest.raises(HandledError):
        come()


class Interrupting(nn.Module):
    """Is interrupted by a signal while it is captured, once."""

    number: int | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        if self.number is not None:
            signal.raise_signal(self.number)
        return torch.relu(y)


def test_a_capture_is_interrupted_and_other_handlers_see_torch_as_it_is(tmp_path: Path) -> None:
    found = []
    signal.signal(signal.SIGUSR1, lambda *_: found.append(type(nn.Linear(2, 2)(torch.ones(2)))))
    model, x = Interrupting().eval(), torch.randn(3)
    compiled = gascompile.compile(model, "1MiB", machine="cpu-nvme", cache_dir=tmp_path)
    model.number = signal.SIGINT
    with pytest.raises(KeyboardInterrupt):
        compiled(x)
    assert torch._C._len_torch_dispatch_stack() == 0
    model.number = signal.SIGUSR1
    assert torch.equal(compiled(x), torch.relu(x + 1))
    assert set(found) == {torch.Tensor}


def test_one_that_raises_takes_no_other_along() -> None:
    seen = []
    signal.signal(signal.SIGUSR2, lambda number, _: seen.append(number))

    def work() -> None:
        come()
        signal.raise_signal(signal.SIGUSR2)

    with pytest.raises(HandledError):
        deferred(work)
    assert seen == [signal.SIGUSR2]


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
