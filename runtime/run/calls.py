"""What is called in the place of an op, where it might not return what the plan has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gascompile.core.parts import changed_spans
from gascompile.runtime.stores import Store

Value = Any


_aten = torch.ops.aten
_DIRECT: dict[object, Callable[..., Value]] = {
    _aten.add.Tensor: torch.add,
    _aten.cat.default: torch.cat,
    _aten.expand.default: torch.Tensor.expand,
    _aten.index_copy_.default: torch.Tensor.index_copy_,
    _aten.linear.default: torch.nn.functional.linear,
    _aten.mean.dim: torch.mean,
    _aten.mul.Tensor: torch.mul,
    _aten.neg.default: torch.neg,
    _aten.reshape.default: torch.reshape,
    _aten.rsqrt.default: torch.rsqrt,
    _aten.transpose.int: torch.transpose,
    _aten.unsqueeze.default: torch.unsqueeze,
    _aten.view.default: torch.Tensor.view,
}
"""Functions of torch that call the same overload without a walk through its schema.

[Empirical] They take 1.1 to 4.9 us where the overload takes 2.2 to 9; a token of a language model is hundreds of calls.
"""
_MAKING = (_aten.linear.default, _aten.scaled_dot_product_attention.default)
"""Ops of which torch does not say that their results are new, as those of products are."""


def direct(target: Callable[..., Value]) -> Callable[..., Value]:
    """Return what to call for an op: the same, or what does the same with less around it."""
    return _DIRECT.get(target, target)


def may_return_its_input(target: Value) -> bool:
    """Return whether an op that made a copy at the planned sizes may return a view at others."""
    if not isinstance(target, torch._ops.OpOverload) or target in _MAKING:
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
