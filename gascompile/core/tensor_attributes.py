"""Tensor attributes: what a program sets on a parameter or buffer, as on any object, and may read where it computes."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_OURS = {"_cover", "_viewed", "_views"}
"""Of tensors that an open training step has."""


def attributes_of(tensor: torch.Tensor) -> dict[str, Any]:
    """Return what was set on a tensor by others than us and, where it stands for another in a trace, than torch."""
    space = vars(tensor)
    if not space:
        return {}
    names = space.keys() - _OURS
    names -= _of_fakes() if isinstance(tensor, FakeTensor) else set()
    return {key: space[key] for key in names}


@cache
def _of_fakes() -> frozenset[str]:
    """Return what every fake tensor has, such as the mode that notes what is made of it."""
    return frozenset(vars(FakeTensorMode().from_tensor(torch.nn.Parameter(torch.empty(0)))))


def share_attributes(real: torch.Tensor, made: torch.Tensor) -> None:
    """Have ``made``, which stands for ``real`` in a trace, answer as that does."""
    for key, value in attributes_of(real).items():
        vars(made).setdefault(key, value)
