"""Runs that are disturbed raise, and leave the compiled model usable."""

from __future__ import annotations

import errno
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import gascompile
from tests.integration.net import BUDGET, Build, Net


def run_often(compiled: gascompile.CompiledModel, inputs: dict[str, torch.Tensor]) -> None:
    for _ in range(3):
        compiled(**inputs)


def test_read_error_in_the_middle_of_a_run(
    build: Build, inputs: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = build()
    wanted = compiled(**inputs)
    real, calls = os.preadv, 0

    def failing(descriptor: int, buffers: Any, offset: int) -> int:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(descriptor, buffers, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", failing)
        with pytest.raises(
            gascompile.StorageError, match=r"layers\..*(Input/output error).*check the drive"
        ):
            run_often(compiled, inputs)
    for _ in range(2):
        assert torch.equal(compiled(**inputs), wanted)


def test_interrupt_in_a_run_leaves_the_model_usable(
    build: Build, inputs: dict[str, torch.Tensor]
) -> None:
    compiled = build()
    wanted = compiled(**inputs)
    interrupted = 0
    for delay_s in (0.0005, 0.001, 0.002, 0.004, 0.008):
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        try:
            signal.setitimer(signal.ITIMER_REAL, delay_s)
            for _ in range(50):
                compiled(**inputs)
        except KeyboardInterrupt:
            interrupted += 1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
        assert torch.equal(compiled(**inputs), wanted)
    assert interrupted == 5


def test_threads_with_different_inputs_take_turns(cache: Path) -> None:
    model = Net().eval()
    compiled = gascompile.compile(model, BUDGET, cache_dir=cache)
    wrong: list[int] = []

    def work(rows: int) -> None:
        x = torch.randn(rows, 1024)
        with torch.no_grad():
            wanted = model(x)
        close = [torch.allclose(compiled(x), wanted, atol=1e-5) for _ in range(5)]
        wrong.append(close.count(False))

    threads = [threading.Thread(target=work, args=(rows,)) for rows in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [0, 0, 0]


def test_a_closed_model_opens_again(build: Build, inputs: dict[str, torch.Tensor]) -> None:
    with build() as compiled:
        wanted = compiled(**inputs)
    assert torch.equal(compiled(**inputs), wanted)
