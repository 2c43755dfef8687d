"""Exact ops: those whose compiled loops return the bits that torch's own kernels return.

Each is one operation of IEEE arithmetic per element, a comparison, a choice or a copy: there is one right
result, whatever instructions compute it, as long as no two operations are contracted into one. Left out is
what a library approximates (``exp``, ``tanh``, ``sqrt``, which MKL rounds otherwise), what torch's kernels contract
(``addcmul``, gradients of activations), and sums, whose order is nobody's.
"""

from __future__ import annotations

import torch
from torch import fx

_aten = torch.ops.aten
_ARITHMETIC = {
    _aten.add, _aten.sub, _aten.rsub, _aten.mul, _aten.div, _aten.neg, _aten.abs, _aten.reciprocal, _aten.relu,
    _aten.threshold_backward, _aten.pow,
}  # fmt: skip
_CHOICES = {
    _aten.eq, _aten.ne, _aten.lt, _aten.le, _aten.gt, _aten.ge, _aten.logical_not, _aten.logical_and,
    _aten.logical_or, _aten.where, _aten.masked_fill, _aten.tril, _aten.triu,
}  # fmt: skip
_COPIES = {
    _aten.clone, _aten.cat, _aten.stack, _aten.contiguous, _aten.reshape, _aten.flatten, _aten.repeat,
    _aten.constant_pad_nd, _aten.full, _aten.full_like, _aten.zeros, _aten.zeros_like, _aten.ones,
    _aten.ones_like, _aten.scalar_tensor,
}  # fmt: skip
_CASTS = {_aten._to_copy, _aten.to, _aten.type_as}
_DTYPES = {torch.float32, torch.float64, torch.bool, torch.int64, torch.int32}
"""Types that are shorter are rounded between the parts of some ops."""
_POWERS = (2, 3)
"""Torch multiplies; other powers it leaves to a library."""


def is_exact(node: fx.Node) -> bool:
    """Return whether a compiled loop makes the bits of the op of ``node``, whose tensors are known."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    packet, made = target.overloadpacket, node.meta["val"].dtype
    read = {a.meta["val"].dtype for a in node.all_input_nodes if "val" in a.meta}
    if packet in _CASTS:
        return _casts_exactly(read, made)
    if packet in _COPIES:
        return read == {made} or (not read and made in _DTYPES)
    if packet not in _ARITHMETIC | _CHOICES or not {made, *read} <= _DTYPES:
        return False
    if node.kwargs.get("alpha", 1) != 1 or (packet is _aten.rsub and len(node.args) > 2):
        return False
    if packet is _aten.div and "rounding_mode" in node.kwargs:
        return False
    if packet is _aten.pow:
        return target is _aten.pow.Tensor_Scalar and node.args[1] in _POWERS
    # Without promotion, whose place is nobody's either; what chooses is of another type than what is chosen.
    numbers = read - {torch.bool}
    is_promoted = any(isinstance(x, float) for x in (*node.args, *node.kwargs.values())) and any(
        not dtype.is_floating_point for dtype in numbers
    )
    if packet in _CHOICES:
        return len(numbers) <= 1 and made in {torch.bool, *read} and not is_promoted
    return read == {made} and not is_promoted


def _casts_exactly(read: set[torch.dtype], made: torch.dtype) -> bool:
    """Return whether there is one right result: not for a number that is too large for an integer, or rounded twice."""
    if not made.is_floating_point:
        return made is torch.bool or not any(dtype.is_floating_point for dtype in read)
    return made in _DTYPES or read <= {torch.float32, made}
