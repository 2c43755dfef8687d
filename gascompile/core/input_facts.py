"""Facts of inputs: what Python code may ask of a tensor beside its dtype, shape and strides.

A plan is for all tensors of a signature. Where the code that was captured asked for one of these, it is for those alone
of which the answer is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from gascompile.core.program import InputSpec

FACTS: Mapping[str, Callable[[torch.Tensor], object]] = {
    "requires_grad": lambda x: x.requires_grad,
    "is_leaf": lambda x: x.is_leaf,
    "storage_offset": lambda x: x.storage_offset(),
    "is_inference": lambda x: x.is_inference(),
    "is_pinned": lambda x: x.is_pinned(),
    "grad": lambda x: x.is_leaf and x.grad is not None,
    "grad_fn": lambda x: x.grad_fn is not None,
    "_base": lambda x: x._base is not None,
    "_is_view": lambda x: x._is_view(),
    "is_shared": lambda x: x.is_shared(),
    "_version": lambda x: None if x.is_inference() else x._version,
    "untyped_storage": lambda x: x.untyped_storage().nbytes(),
    "nn.Parameter": lambda x: isinstance(x, nn.Parameter),
}
"""By name; of what is no number, whether it is there or how large."""


def fact_of(name: str, tensor: torch.Tensor) -> str:
    """Return a fact of ``tensor`` as it is kept in an ``InputSpec``."""
    return f"{name}={FACTS[name](tensor)!r}"


def facts_misfit(expected: InputSpec, value: torch.Tensor) -> str | None:
    """Return which fact of an argument is another than the plan was made for, or ``None``."""
    for fact in expected.facts:
        name, _, wanted = fact.partition("=")
        now = fact_of(name, value)
        if now != fact:
            given = now.partition("=")[2]
            return (
                f"has {given} for {name}, which the model asks for; the plan was made for {wanted}"
            )
    return None


def facts_of(inputs: Sequence[InputSpec], leaves: Sequence[Any]) -> tuple[str, ...]:
    """Return the facts of flat arguments that plans with these inputs depend on."""
    return tuple(
        fact_of(fact.partition("=")[0], value)
        for expected, value in zip(inputs, leaves, strict=True)
        if expected.facts and isinstance(value, torch.Tensor)
        for fact in expected.facts
    )
