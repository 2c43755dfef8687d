"""What is called in the place of an op, where it might not return what the plan has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gascompile.core.parts import changed_spans
from gascompile.runtime.stores import Store

Value = Any


_aten = torch.ops.aten
_nn = torch._C._nn
_DIRECT: dict[object, Callable[..., Value]] = {
    _aten._log_softmax.default: torch._log_softmax,
    _aten._softmax.default: torch._softmax,
    _aten.add.Tensor: torch.add,
    _aten.addmm.default: torch.addmm,
    _aten.arange.default: torch.arange,
    _aten.bmm.default: torch.bmm,
    _aten.cat.default: torch.cat,
    _aten.clone.default: torch.clone,
    _aten.cos.default: torch.cos,
    _aten.detach.default: torch.detach,
    _aten.div.Tensor: torch.div,
    _aten.embedding.default: torch.embedding,
    _aten.expand.default: torch.Tensor.expand,
    _aten.gelu.default: _nn.gelu,
    _aten.index_copy_.default: torch.Tensor.index_copy_,
    _aten.layer_norm.default: torch.layer_norm,
    _aten.linear.default: torch.nn.functional.linear,
    _aten.matmul.default: torch.matmul,
    _aten.mean.dim: torch.mean,
    _aten.mm.default: torch.mm,
    _aten.mul.Tensor: torch.mul,
    _aten.narrow.default: torch.narrow,
    _aten.native_layer_norm.default: torch.native_layer_norm,
    _aten.neg.default: torch.neg,
    _aten.ones_like.default: torch.ones_like,
    _aten.permute.default: torch.permute,
    _aten.pow.Tensor_Scalar: torch.pow,
    _aten.relu.default: torch.relu,
    _aten.reshape.default: torch.reshape,
    _aten.rsqrt.default: torch.rsqrt,
    _aten.scaled_dot_product_attention.default: _nn.scaled_dot_product_attention,
    _aten.select.int: torch.select,
    _aten.sigmoid.default: torch.sigmoid,
    _aten.silu.default: _nn.silu,
    _aten.sin.default: torch.sin,
    _aten.softmax.int: torch.softmax,
    _aten.sub.Tensor: torch.sub,
    _aten.sum.dim_IntList: torch.sum,
    _aten.t.default: torch.t,
    _aten.tanh.default: torch.tanh,
    _aten.transpose.int: torch.transpose,
    _aten.unsqueeze.default: torch.unsqueeze,
    _aten.view.default: torch.Tensor.view,
    _aten.where.self: torch.where,
}
"""Functions of torch that call the same overload without a walk through its schema.

[Empirical] They take 1.1 to 4.9 us where the overload takes 2.2 to 9; a token of a language model is hundreds of calls.
"""
_EXACT = (
    _aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default, _aten.linear.default,
    _aten.embedding.default, _aten.native_layer_norm.default, _aten._softmax.default,
    _aten._softmax_backward_data.default,
)  # fmt: skip
"""Ops whose results have the memory of their elements and no more, as those have that torch calls pointwise."""
_MAKING = (_aten.linear.default, _aten.scaled_dot_product_attention.default)
"""Ops of which torch does not say that their results are new, as those of products are."""


def call_directly(target: torch._ops.OpOverload, function: Callable[..., Value]) -> None:
    """Have runs call ``function`` for an op that is written in Python, and does the same on all devices.

    The dispatcher takes some 15 us to find it, which is more than the update of a small parameter.
    """
    _DIRECT[target] = function


@dataclass(frozen=True, slots=True)
class Joined:
    """How several calls of one function are made at once."""

    prepare: Callable[[Sequence[tuple[Value, ...]]], Callable[..., object]]
    """Returns what makes them in each run, of their arguments, those below left out: it takes these."""
    each: int
    """The argument that is another one in each call; of all calls they come as a list."""
    shared: tuple[int, ...]
    """Arguments that all these calls have in common."""


_JOINED: dict[object, Joined] = {}


def call_at_once(function: Callable[..., Value], joined: Joined) -> None:
    """Have runs make several calls of ``function``, which returns nothing, at once where their order is free."""
    _JOINED[function] = joined


def joined(function: object) -> Joined | None:
    """Return how several calls of a function are made at once, if they can be."""
    return _JOINED.get(function)


def direct(target: Callable[..., Value]) -> Callable[..., Value]:
    """Return what to call for an op: the same, or what does the same with less around it."""
    if type(target) is torch._ops.OpOverload and target not in _DIRECT:
        # All that the overload does is to call it.
        function: Callable[..., Value] = target._op
        return function
    return _DIRECT.get(target, target)


def may_return_its_input(target: Value) -> bool:
    """Return whether an op that made a copy at the planned sizes may return a view at others."""
    if not isinstance(target, torch._ops.OpOverload) or target in _MAKING:
        return False
    return any(value.alias_info for value in target._schema.returns) or (
        torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "CompositeImplicitAutograd")
    )


def takes_what_it_returns(target: Value) -> bool:
    """Return whether an op's result has the memory of its elements alone."""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return target in _EXACT or torch.Tag.pointwise in target.tags


def returns_its_first(target: Value) -> bool:
    """Return whether an op writes to its first argument and returns that very tensor."""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    schema = target._schema
    if len(schema.returns) != 1 or not schema.arguments or schema.arguments[0].kwarg_only:
        return False
    returned, first = schema.returns[0].alias_info, schema.arguments[0].alias_info
    return (
        returned is not None
        and first is not None
        and returned.is_write
        and first.is_write
        and returned.before_set == first.before_set
    )


def owning(function: Callable[..., Value]) -> Callable[..., Value]:
    """Return ``function`` with results that share no memory with its arguments, as the plan has it.

    A view would outlive the staged copy of the weight that it lies in, or keep more memory than planned.
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


@dataclass(frozen=True, slots=True)
class Changing:
    """A function that changes what the store holds, which is told before."""

    function: Callable[..., Value]
    store: Store
    names: tuple[str, ...]

    def __call__(self, *values: Value) -> Value:
        # Before: an interrupt in between leaves no new value that is taken for the old one.
        self.store.changed(self.names)
        return self.function(*values)


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
