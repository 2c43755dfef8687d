"""Tensor attributes: what a program sets on a parameter or buffer, as on any object, and may read where it computes."""

from __future__ import annotations

from typing import Any

import torch

_OURS = {"_cover", "_viewed", "_views"}
"""Of tensors that an open training step has."""


def attributes_of(tensor: torch.Tensor) -> dict[str, Any]:
    """Return what was set on a tensor by others than us."""
    space = vars(tensor)
    return {key: space[key] for key in space.keys() - _OURS} if space else {}


def share_attributes(real: torch.Tensor, made: torch.Tensor) -> None:
    """Have ``made``, which stands for ``real`` in a trace, answer as that does."""
    for key, value in attributes_of(real).items():
        vars(made).setdefault(key, value)
