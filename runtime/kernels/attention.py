"""Attention of captured steps on a GPU: the op that a step is captured with has a kernel for the processor alone.

``install`` gives that op and its gradient a kernel for CUDA, of torch's own: flash or memory-efficient attention,
or plain products where neither takes the operands. Results lie in memory as the processor's kernel lays them out, as
the ops after them were captured for that.

Shapes: query ``[batch, heads, rows, width]``, key and value ``[batch, key heads, columns, width]``.
"""

from __future__ import annotations

import math
import threading
from typing import Any, NamedTuple

import torch
from torch.nn import functional

FORWARD = "_scaled_dot_product_flash_attention_for_cpu"
BACKWARD = "_scaled_dot_product_flash_attention_for_cpu_backward"
_WIDEST = 256  # heads that flash attention takes
_ROWS_TOGETHER = 32  # memory-efficient attention has its sums for whole groups of rows
_ALIGNED = 16
"""Elements in a row of a mask, and bytes in one of a head, for memory-efficient attention."""
_HALVES = (torch.float16, torch.bfloat16)

_TURN = threading.Lock()
_LIBRARIES: list[torch.library.Library] = []
"""What ``install`` has registered, for as long as it lives."""

_aten: Any = torch.ops.aten
Pair = tuple[torch.Tensor, torch.Tensor]
Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class AttentionCall(NamedTuple):
    """One call, its keys and values with a head for each of the query."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    is_causal: bool
    mask: torch.Tensor | None
    """Added to the products, ``[batch, heads, rows, columns]`` or what broadcasts to it."""
    scale: float

    @property
    def is_for_flash(self) -> bool:
        """Whether flash attention computes it; its causal calls of other lengths begin at the other end."""
        width = self.query.shape[-1]
        is_square = self.query.shape[-2] == self.key.shape[-2]
        fits = self.query.dtype in _HALVES and width % 8 == 0 and width <= _WIDEST
        return fits and self.mask is None and (is_square or not self.is_causal) and self._is_even

    @property
    def is_for_efficient(self) -> bool:
        """Whether memory-efficient attention computes it."""
        dtype = self.query.dtype
        is_aligned = self.query.shape[-1] * dtype.itemsize % _ALIGNED == 0
        return dtype in (torch.float32, *_HALVES) and is_aligned and self._is_even

    @property
    def _is_even(self) -> bool:
        """Whether there is something to compute, and heads of values are as wide as those of keys."""
        return self.query.shape[-1] == self.value.shape[-1] and 0 not in (
            *self.query.shape,
            *self.key.shape,
        )

    def bias(self) -> torch.Tensor | None:
        """Return the mask as memory-efficient attention reads it."""
        if self.mask is None:
            return None
        columns, least = self.key.shape[-2], torch.finfo(self.query.dtype).min
        # The least number of a wider type is no infinity: a row of it still has shares.
        finite = self.mask.clamp(min=least).masked_fill(self.mask.isneginf(), -math.inf)
        bias = finite.to(self.query.dtype).expand(*self.mask.shape[:-1], columns)
        bias = functional.pad(bias, (0, -columns % _ALIGNED))[..., :columns]
        return bias.expand(*self.query.shape[:-1], columns)

    def scores(self) -> torch.Tensor:
        """Return the products of rows and columns, masked, in 32 bits at least."""
        wide = torch.promote_types(self.query.dtype, torch.float32)
        scores = (self.query.to(wide) @ self.key.to(wide).transpose(-1, -2)) * self.scale
        if self.mask is not None:
            scores = scores + self.mask
        if self.is_causal:
            kept = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
            scores = scores.masked_fill(~kept, -math.inf)
        return scores


def install() -> None:
    """Give the ops their kernels for CUDA, in this process; does so once."""
    with _TURN:
        if _LIBRARIES:
            return
        library = torch.library.Library("aten", "IMPL")
        library.impl(FORWARD, forward, "CUDA")
        library.impl(BACKWARD, backward, "CUDA")
        _LIBRARIES.append(library)


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> Pair:
    """Return the results ``[batch, heads, rows, width]`` and the logarithms of sums ``[batch, heads, rows]``."""
    _require_no_dropout(dropout_p)
    call = _call(query, key, value, is_causal, attn_mask, scale)
    if call.is_for_flash:
        out, sums, *_ = _aten._scaled_dot_product_flash_attention(
            *call[:3], 0.0, is_causal, False, scale=call.scale
        )
    elif call.is_for_efficient:
        out, sums, *_ = _aten._scaled_dot_product_efficient_attention(
            *call[:3], call.bias(), True, 0.0, is_causal, scale=call.scale
        )
    else:
        out, sums = _by_products(call)
    return _like(out, query), _by_rows(sums[..., : query.shape[-2]].float())


def backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> Triple:
    """Return the gradients of query, key and value, from what ``forward`` returned."""
    _require_no_dropout(dropout_p)
    call = _call(query, key, value, is_causal, attn_mask, scale)
    grad_out = _like(grad_out, out)
    if call.is_for_flash:
        found = _flash_backward(call, grad_out, out, logsumexp)
    elif call.is_for_efficient:
        found = _efficient_backward(call, grad_out, out, logsumexp)
    else:
        found = _backward_by_products(call, grad_out, out, logsumexp)
    heads = key.shape[1]
    of_query, *others = found
    of_key, of_value = (
        # Heads that share a key add up.
        grad if grad.shape[1] == heads else grad.unflatten(1, (heads, -1)).sum(2)
        for grad in others
    )
    return _by_rows(of_query), _by_rows(of_key), _by_rows(of_value)


def _flash_backward(
    call: AttentionCall, grad_out: torch.Tensor, out: torch.Tensor, sums: torch.Tensor
) -> Triple:
    unused = torch.empty(2, dtype=torch.uint64, device=out.device)
    found: Triple = _aten._scaled_dot_product_flash_attention_backward(
        grad_out, *call[:3], out, sums.contiguous(), None, None,
        call.query.shape[-2], call.key.shape[-2], 0.0, call.is_causal, unused, unused[0],
        scale=call.scale,
    )  # fmt: skip
    return found


def _efficient_backward(
    call: AttentionCall, grad_out: torch.Tensor, out: torch.Tensor, sums: torch.Tensor
) -> Triple:
    # In 16 bits the kernel reads results as if heads lay side by side in each row, whatever their strides.
    grad_out, out = _by_rows(grad_out), _by_rows(out)
    unused = torch.empty((), dtype=torch.int64, device=out.device)
    more = -sums.shape[-1] % _ROWS_TOGETHER
    whole = functional.pad(sums.contiguous(), (0, more), value=math.inf)
    *found, _ = _aten._scaled_dot_product_efficient_attention_backward(
        grad_out, *call[:3], call.bias(), out, whole, unused, unused,
        0.0, [True, True, True, False], call.is_causal, scale=call.scale,
    )  # fmt: skip
    of_query, of_key, of_value = found
    return of_query, of_key, of_value


def _by_products(call: AttentionCall) -> Pair:
    scores = call.scores()
    sums = scores.logsumexp(-1)
    out = _shares(scores, sums) @ call.value.to(scores.dtype)
    return out.to(call.query.dtype), sums


def _backward_by_products(
    call: AttentionCall, grad_out: torch.Tensor, out: torch.Tensor, sums: torch.Tensor
) -> Triple:
    scores = call.scores()
    shares = _shares(scores, sums.to(scores.dtype))
    grad, query, key, value = (x.to(scores.dtype) for x in (grad_out, *call[:3]))
    of_shares = grad @ value.transpose(-1, -2)
    own = (grad * out.to(scores.dtype)).sum(-1, keepdim=True)
    of_scores = shares * (of_shares - own) * call.scale
    found = (of_scores @ key, of_scores.transpose(-1, -2) @ query, shares.transpose(-1, -2) @ grad)
    of_query, of_key, of_value = (x.to(call.query.dtype) for x in found)
    return of_query, of_key, of_value


def _shares(scores: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """Return each column's share of its row; none in a row whose columns are all masked."""
    return (scores - sums[..., None]).exp().nan_to_num(0.0)


def _call(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool,
    mask: torch.Tensor | None,
    scale: float | None,
) -> AttentionCall:
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -math.inf)
    repeats = query.shape[1] // max(key.shape[1], 1)
    if repeats > 1:
        key, value = (x.repeat_interleave(repeats, 1) for x in (key, value))
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    return AttentionCall(query, key, value, is_causal, mask, scale)


def _like(values: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return values that lie in memory as another tensor of their shape does."""
    wanted = torch.empty_like(other)
    return values if values.stride() == wanted.stride() else wanted.copy_(values)


def _by_rows(values: torch.Tensor) -> torch.Tensor:
    """Return values ``[batch, heads, rows, ...]`` whose heads lie side by side in each row's memory."""
    turned = values.transpose(1, 2)
    # Flat in between, dimensions of one element have the strides of others, too.
    return turned.reshape(-1).contiguous().view(turned.shape).transpose(1, 2)


def _require_no_dropout(dropout_p: float) -> None:
    if dropout_p:
        raise NotImplementedError(
            "attention with dropout has no kernel for a GPU in captured steps"
        )
