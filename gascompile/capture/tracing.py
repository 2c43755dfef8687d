"""Tracing: torch as it is while a model's call is followed."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.modules import module as torch_module

from gascompile.core.quick_traces import quick_traces
from gascompile.core.true_strides import true_strides


@contextmanager
def tracing() -> Iterator[None]:
    """Record no gradients, lay out fake results as kernels do, and leave out warnings of what is looked at anyway."""
    with (
        torch.no_grad(),
        warnings.catch_warnings(),
        true_strides(),
        quick_traces(),
        _no_hooks_left(),
    ):
        # Recurrent layers set up their own list of weights again while they are traced.
        warnings.filterwarnings("ignore", message=r".*\._flat_weights\[")
        # What later calls find in one is looked at.
        warnings.filterwarnings("ignore", message=r".*assigned during export")
        yield


@contextmanager
def _no_hooks_left() -> Iterator[None]:
    """Take back torch's hooks on the buffers of all modules: 2.11 leaves them behind where a trace fails."""
    hooks = torch_module._global_buffer_registration_hooks
    before = list(hooks)
    try:
        yield
    finally:
        left = [key for key in list(hooks) if key not in before]
        for key in left:
            # Others may have set theirs meanwhile.
            if str(getattr(hooks.get(key), "__module__", "")).startswith("torch."):
                hooks.pop(key, None)
