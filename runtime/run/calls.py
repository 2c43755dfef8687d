"""What is called in the place of an op, where it might not return what the plan has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gascompile.core.parts import changed_spans
from gascompile.runtime.stores import Store

Value = Any


def may_return_its_input(target: Value) -> bool:
    """Return whether an op that made a copy at the planned sizes may return a view at others."""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return any(value.alias_info for value in target._schema.returns) or (
        torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "CompositeImplicitAutograd")
    )


def owning(function: Callable[..., Value]) -> Callable[..., Value]:
    """Return ``function`` with results that share no memory with its arguments, as the plan has it.

    A view would outlive the visit of the weight that it lies in, or keep more memory than planned.
    """

    def call(*values: Value) -> Value:
        result = function(*values)
        if isinstance(result, torch.Tensor):
            start = result.untyped_storage().data_ptr()
            for value in values:
                if isinstance(value, torch.Tensor) and (
                    value.untyped_storage().data_ptr() == start and start
                ):
                    return result.clone()
        return result

    return call


def trimmed(function: Callable[..., Value], size_bytes: int) -> Callable[..., Value]:
    """Return ``function`` with results of no more memory than planned: some reductions return one element of many."""

    def call(*values: Value) -> Value:
        result = function(*values)
        if (
            isinstance(result, torch.Tensor)
            and result.untyped_storage().nbytes() > size_bytes >= result.nbytes
        ):
            return result.clone()
        return result

    return call


def patching(
    function: Callable[..., Value], target: object, store: Store, name: str
) -> Callable[..., Value]:
    """Return ``function`` that first tells the store which part of a tensor it changes, its first argument."""

    def call(*values: Value) -> Value:
        spans = changed_spans(target, values)
        # Before the op: an interrupt in between leaves no new value that is taken for the old one.
        if spans is None:
            store.changed((name,))
        else:
            store.patched(name, spans)
        return function(*values)

    return call


def with_keywords(
    function: Callable[..., Value],
    num_args: int,
    names: tuple[str, ...],
    constant: dict[str, Value],
) -> Callable[..., Value]:
    """Return ``function`` of so many arguments, then of the keyword arguments ``names``; ``constant`` is bound."""

    def call(*values: Value) -> Value:
        return function(
            *values[:num_args], **dict(zip(names, values[num_args:], strict=True)), **constant
        )

    return call
