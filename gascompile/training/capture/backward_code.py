"""Backward code: what autograd calls of the program's is recorded like what runs in the forward pass.

Hooks, backward passes of functions and of custom ops, and what checkpoints compute again read values, too.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch

from gascompile.capture.record.record import Recorder

_ENGINE = "_engine_run_backward"
"""Through which all of torch starts a backward pass."""


@contextmanager
def backward_recorded(recorder: Recorder) -> Iterator[None]:
    """Record each backward pass of this thread, a nested one as well."""
    autograd = cast(Any, torch.autograd)
    thread, real = threading.get_ident(), getattr(autograd, _ENGINE)

    def run(*args: Any, **kwargs: Any) -> Any:
        # Where nothing of Python's is to run, listening to torch alone would double the time of a trace.
        if threading.get_ident() != thread or not recorder.calls_back:
            return real(*args, **kwargs)
        with recorder.running():
            return real(*args, **kwargs)

    setattr(autograd, _ENGINE, run)
    try:
        yield
    finally:
        setattr(autograd, _ENGINE, real)
