"""Runs that are disturbed raise, and leave the compiled model usable."""

from __future__ import annotations

import errno
import os
import signal
from typing import Any

import pytest
import torch

import gascompile
from tests.integration.net import Build


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
