"""Optimizer updates as ops, a range of a parameter at a time: torch's own fused kernels, in place.

A moment is kept in tiles of its own, so that it can leave memory tile by tile while the parameter is in use.
Hyperparameters come as a tensor, because a scheduler changes them between steps.
"""

from __future__ import annotations

import math

import torch

ADAM = ("lr", "beta1", "beta2", "eps", "weight_decay", "maximize", "step")
"""Elements of the hyperparameters of ``adam``, float64."""
SGD = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize", "step")
"""Elements of those of ``sgd``; ``step`` counts from one."""

_library = torch.library.Library("gascompile_updates", "DEF")
_library.define(
    "adam(Tensor(a!) parameter, Tensor gradient, Tensor(b!) mean, Tensor(c!) square, Tensor hyper, "
    "Tensor? scale, int begin, bool decoupled) -> ()"
)
_library.define(
    "sgd(Tensor(a!) parameter, Tensor gradient, Tensor(b!)? momentum, Tensor hyper, Tensor? scale, "
    "int begin, int end) -> ()"
)
_library.define("clip_scale(Tensor[] norms, float limit) -> Tensor")


def _range(tensor: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """Return elements ``begin`` to ``end`` of a dense tensor as they lie in memory."""
    return tensor.as_strided((end - begin,), (1,), tensor.storage_offset() + begin)


def _gradient_range(
    parameter: torch.Tensor, gradient: torch.Tensor, begin: int, end: int
) -> torch.Tensor:
    """Return the part of ``gradient`` for the elements of ``parameter`` in its order of memory."""
    if gradient.stride() != parameter.stride():
        if gradient.dim() == 2 and parameter.is_contiguous():
            # A transposed product: only the rows that are needed are brought into order.
            columns = parameter.shape[1]
            first, last = begin // columns, -(-end // columns)
            rows = gradient[first:last].contiguous().view(-1)
            return rows[begin - first * columns : end - first * columns]
        gradient = torch.empty_like(parameter).copy_(gradient)
    return _range(gradient, begin, end)


def _adam(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    mean: torch.Tensor,
    square: torch.Tensor,
    hyper: torch.Tensor,
    scale: torch.Tensor | None,
    begin: int,
    decoupled: bool,
) -> None:
    lr, beta1, beta2, eps, weight_decay, maximize, step = hyper.tolist()
    end = begin + mean.numel()
    part = _gradient_range(parameter, gradient, begin, end)
    if scale is not None:
        part = part * scale
    kernel = torch._fused_adamw_ if decoupled else torch._fused_adam_
    kernel(
        [_range(parameter, begin, end)],
        [part],
        [mean],
        [square],
        [],
        [torch.tensor(step, dtype=torch.float32)],
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=bool(maximize),
    )


def _sgd(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    momentum: torch.Tensor | None,
    hyper: torch.Tensor,
    scale: torch.Tensor | None,
    begin: int,
    end: int,
) -> None:
    lr, factor, dampening, weight_decay, nesterov, maximize, step = hyper.tolist()
    part = _gradient_range(parameter, gradient, begin, end)
    target = _range(parameter, begin, end)
    if scale is not None:
        part = part * scale
    if maximize:
        part = -part
    if weight_decay:
        part = part.add(target, alpha=weight_decay)
    if momentum is not None:
        if step == 1:
            momentum.copy_(part)
        else:
            momentum.mul_(factor).add_(part, alpha=1 - dampening)
        part = part.add(momentum, alpha=factor) if nesterov else momentum
    target.add_(part, alpha=-lr)


def _clip_scale(norms: list[torch.Tensor], limit: float) -> torch.Tensor:
    """Return what ``torch.nn.utils.clip_grad_norm_`` multiplies gradients by."""
    total = torch.linalg.vector_norm(torch.stack(norms))
    return torch.clamp(limit / (total + 1e-6), max=1.0)


def _nothing(*args: object) -> None:
    """Stand for an update where there are no values."""


_library.impl("adam", _adam, "CPU")
_library.impl("sgd", _sgd, "CPU")
_library.impl("clip_scale", _clip_scale, "CPU")
_library.impl("adam", _nothing, "Meta")
_library.impl("sgd", _nothing, "Meta")
_library.impl("clip_scale", lambda norms, limit: norms[0].new_empty(()), "Meta")

adam = torch.ops.gascompile_updates.adam.default
sgd = torch.ops.gascompile_updates.sgd.default
clip_scale = torch.ops.gascompile_updates.clip_scale.default


def tiles(num_elements: int, most_elements: int) -> list[tuple[int, int]]:
    """Return ranges of about equal size, at most ``most_elements`` each."""
    count = max(1, math.ceil(num_elements / most_elements))
    return [(num_elements * i // count, num_elements * (i + 1) // count) for i in range(count)]
