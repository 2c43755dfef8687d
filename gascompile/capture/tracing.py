"""Tracing: torch as it is while a model's call is followed."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules import module as torch_module

from gascompile.core.quick_traces import quick_traces
from gascompile.core.true_strides import true_strides

_ASSIGNED = r"The tensor attributes? (.*) (?:was|were) assigned during export"


@contextmanager
def tracing() -> Iterator[set[str]]:
    """Record no gradients, lay out fake results as kernels do, and leave out warnings of what is looked at anyway.

    Yields the attributes that the model sets to tensors it computes, once it is traced: torch puts back what they were.
    """
    assigned: set[str] = set()
    with (
        torch.no_grad(),
        warnings.catch_warnings(),
        true_strides(),
        quick_traces(),
        _no_hooks_left(),
    ):
        # What later calls find in one is looked at.
        warnings.filterwarnings("always", message=_ASSIGNED)
        _noting(assigned)
        yield assigned


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


def _noting(assigned: set[str]) -> None:
    """Take note of torch's warnings of attributes instead of showing them, until the filters are put back."""
    show = warnings.showwarning

    def noted(message: Warning | str, category: type[Warning], *args: Any, **kwargs: Any) -> None:
        found = re.match(_ASSIGNED, str(message))
        if found is None:
            show(message, category, *args, **kwargs)
            return
        names = (name.removeprefix("self.") for name in found[1].split(", "))
        # Recurrent layers set up their own list of weights again, an attribute that holds a list.
        assigned.update(name for name in names if "[" not in name)

    warnings.showwarning = noted
