"""Signatures: what of a call, besides the values in its tensors, decides which ops run and what they share.

That is dtype, shape, strides and device of each tensor, the constants, which arguments are one tensor, and which
lie in the same memory. Plans, caches and captures all ask here, so that none of them knows less than another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from gascompile.core.errors import UnsupportedOpError
from gascompile.core.strides import normal_strides, span_elements
from gascompile.core.tensor_attributes import attributes_of

_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """A call as plans tell it apart; comparable and, as JSON, part of fingerprints."""

    leaves: tuple[tuple[Any, ...], ...]
    """Of a tensor dtype, shape, strides and device; of anything else type and ``repr``."""
    same: tuple[int, ...]
    """Per leaf the number of the first leaf that is the same tensor, its own where none is."""
    memory: tuple[tuple[int, int], ...]
    """Per leaf the first leaf whose memory it touches, and by how many bytes it begins after that one."""


def signature_of(leaves: Sequence[Any]) -> Signature:
    """Return the signature of flat arguments.

    Raises:
        UnsupportedOpError: a tensor is of a kind that no plan can have, see ``require_plain`` and ``require_bare``.
    """
    described: list[tuple[Any, ...]] = []
    for number, value in enumerate(leaves):
        if isinstance(value, torch.Tensor):
            require_plain(value, f"argument {number}")
            require_bare(value, f"argument {number}")
            shape, stride = tuple(value.shape), strides_of(value)
            described.append((str(value.dtype), shape, stride, str(value.device)))
        else:
            described.append((type(value).__qualname__, constant_of(value)))
    return Signature(leaves=tuple(described), same=same_tensors(leaves), memory=same_memory(leaves))


def quick_key(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """Return what tells this call from the one before it at little cost; equal keys have equal signatures.

    Where tensors lie is no part of it: whoever depends on that asks ``same_memory`` besides.
    """
    return tuple(
        [
            (type(x), x.dtype, x.shape, x.stride(), x.device, x.is_conj() or x.is_neg(), *vars(x))
            if isinstance(x, torch.Tensor) and x.layout is torch.strided
            else (type(x), repr(x), *_attributes(x))
            for x in leaves
        ]
    )


_NUMBERS = frozenset({int, float, bool, str, complex, type(None)})


def constant_of(value: object) -> str:
    """Return what tells an argument that is no tensor from others: how it prints, and the class of a number's kin.

    Raises:
        UnsupportedOpError: a number or text has attributes, which code may read and no plan compares.
    """
    if type(value) in _NUMBERS or isinstance(value, Enum):
        return repr(value)
    if not isinstance(value, (int, float, complex, str)):
        return repr(value)
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if given := _attributes(value):
        raise UnsupportedOpError(
            f"an argument is a {kind} with the attribute '{given[0][0]}', which no plan compares from call to call; "
            "pass it as an argument of its own, and the value as a plain one"
        )
    return f"{kind} {value!r}"


def _attributes(value: object) -> list[tuple[str, Any]]:
    """Return the attributes of a number or text of a class of its own, which code may read besides what it prints."""
    if type(value) in _NUMBERS or isinstance(value, Enum):
        return []
    if not isinstance(value, (int, float, complex, str)):
        return []  # no call can have it
    return sorted(getattr(value, "__dict__", {}).items())


def require_plain(value: torch.Tensor, what: str) -> None:
    """Return if ``value`` is a dense tensor whose numbers are the ones in its memory.

    Raises:
        UnsupportedOpError: it is a subclass, sparse, quantized, or conjugated or negated when read.
    """
    kind, remedy = "", ""
    if type(value) not in _PLAIN:
        kind, remedy = (
            f"a {type(value).__name__}",
            "pass a torch.Tensor, as in x.as_subclass(torch.Tensor)",
        )
    elif value.layout is not torch.strided:
        kind, remedy = f"a tensor of the layout {value.layout}", "pass it dense, as in x.to_dense()"
    elif value.is_quantized:
        kind, remedy = "a quantized tensor", "pass x.dequantize()"
    elif value.is_conj() or value.is_neg():
        kind, remedy = "conjugated or negated when read", "pass x.resolve_conj().resolve_neg()"
    if kind:
        raise UnsupportedOpError(f"{what} is {kind}, which has no place in a plan; {remedy}")


def require_bare(value: torch.Tensor, what: str) -> None:
    """Return if nobody has set attributes on a tensor that is passed, which code may read and no plan compares.

    Raises:
        UnsupportedOpError: somebody has.
    """
    names = [] if isinstance(value, nn.Parameter) else sorted(attributes_of(value))
    for name in names:
        # Torch's compiler marks which dimensions are dynamic.
        if not name.startswith("_dynamo"):
            raise UnsupportedOpError(
                f"{what} carries the attribute '{name}', which no plan compares from call to call; pass it as an "
                "argument of its own, and the tensor without it, as in x.detach()"
            )


def strides_of(value: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a tensor, with those that no element depends on as a contiguous tensor has them."""
    return normal_strides(tuple(value.shape), value.stride())


def same_tensors(leaves: Sequence[Any]) -> tuple[int, ...]:
    """Return per leaf the number of the first leaf that is the same tensor."""
    first: dict[int, int] = {}
    return tuple(
        first.setdefault(id(leaf), number) if isinstance(leaf, torch.Tensor) else number
        for number, leaf in enumerate(leaves)
    )


def same_memory(leaves: Sequence[Any]) -> tuple[tuple[int, int], ...]:
    """Return per leaf the first of those whose memory it shares, and the bytes from its beginning to this one's.

    Tensors share memory where the bytes between their first and last elements overlap, directly or by others.
    """
    spans = sorted(_spans(leaves))
    if all(one[1] <= next_one[0] for one, next_one in pairwise(spans)):
        return _apart(len(leaves))
    of_leaf = [*_apart(len(leaves))]
    group: list[tuple[int, int]] = []
    end = 0
    for start, stop, number in (*spans, (-1, -1, -1)):
        if group and (number < 0 or start >= end):
            first, base = min((n, s) for s, n in group)
            for begin, member in group:
                of_leaf[member] = (first, begin - base)
            group = []
        end = max(end, stop) if group else stop
        group.append((start, number))
    return tuple(of_leaf)


@lru_cache(maxsize=64)
def _apart(count: int) -> tuple[tuple[int, int], ...]:
    """Return what is said of leaves none of which shares memory: the same object each time, quickly compared."""
    return tuple((number, 0) for number in range(count))


def _spans(leaves: Sequence[Any]) -> Iterator[tuple[int, int, int]]:
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and leaf.numel():
            if leaf.device.type == "meta":
                continue
            start = leaf.data_ptr()
            yield start, start + _span_elements(leaf.shape, leaf.stride()) * leaf.itemsize, number


_span_elements = lru_cache(maxsize=1024)(span_elements)
"""Of the same few shapes at each call."""
