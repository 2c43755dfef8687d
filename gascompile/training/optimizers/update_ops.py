"""Optimizer updates as ops, a range of a parameter at a time: fused kernels, in place.

A moment is kept in tiles of its own, so that it can leave memory tile by tile while the parameter is in use.
Hyperparameters come as a tensor, because a scheduler changes them between steps. Where a gradient has to be
copied first, that is done piece by piece, so that an update takes little memory beside its operands.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator

import torch

from gascompile.core.errors import NanLossError
from gascompile.runtime.kernels import updates
from gascompile.runtime.kernels.updates import AdamOptions, SgdOptions
from gascompile.runtime.run.calls import call_directly

ADAM = ("lr", "beta1", "beta2", "eps", "weight_decay", "maximize")
"""What the hyperparameters of ``adam`` begin with, float64. Then, per parameter of the group, comes the number of
its update, from one on, and last the number of the step."""
SGD = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize")
"""What those of ``sgd`` begin with."""
PIECE = 1 << 16
"""Elements that are copied, or taken out of their form, at a time."""
_ALIGNED = 1 << 10
"""Ranges begin at multiples: kernels round a vector's elements otherwise than those left over."""

_library = torch.library.Library("gascompile_updates", "DEF")
_library.define(
    "adam(Tensor(a!) parameter, Tensor gradient, Tensor(b!) mean, Tensor(c!) square, Tensor hyper, "
    "Tensor? scale, int begin, bool decoupled, int row=0) -> ()"
)
_library.define(
    "sgd(Tensor(a!) parameter, Tensor gradient, Tensor(b!)? momentum, Tensor hyper, Tensor? scale, "
    "int begin, int end, int row=0) -> ()"
)
_library.define(
    "accumulate(Tensor(a!) total, Tensor gradient, int[] shape, int[] stride, int begin) -> ()"
)
_library.define("clip_scale(Tensor[] norms, float limit) -> Tensor")
_library.define("total_norm(Tensor[] norms) -> Tensor")
_library.define("refuse_nan(Tensor loss, Tensor hyper) -> ()")


def range_of(tensor: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """Return elements ``begin`` to ``end`` of a dense tensor in their order of memory, as a vector."""
    return tensor.as_strided((end - begin,), (1,), tensor.storage_offset() + begin)


def is_laid_out_as(gradient: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Return whether no part of a gradient has to be copied to lie as its parameter does."""
    return gradient.shape != parameter.shape or gradient.stride() == parameter.stride()


def part_of(
    parameter: torch.Tensor, gradient: torch.Tensor, base: int, begin: int, end: int
) -> tuple[torch.Tensor, bool]:
    """Return the gradient of elements ``begin`` to ``end`` of ``parameter`` in memory, and whether it is a copy.

    A gradient of another shape is that of the elements from ``base`` on alone, in their order.
    """
    if gradient.shape != parameter.shape:
        return gradient[begin - base : end - base], False
    if gradient.stride() == parameter.stride():
        return range_of(gradient, begin, end), False
    # A transposed product, or another memory format: only the rows that are needed are brought into order.
    order = sorted(range(parameter.dim()), key=lambda d: -parameter.stride()[d])
    ordered = gradient.permute(order)
    columns = parameter.numel() // ordered.shape[0]
    first, last = begin // columns, -(-end // columns)
    rows = ordered[first:last].contiguous()
    is_copy = rows.data_ptr() != ordered[first:last].data_ptr()
    return rows.view(-1)[begin - first * columns : end - first * columns], is_copy


def pieces(begin: int, end: int, *, whole: bool) -> Iterator[tuple[int, int]]:
    """Yield ranges of ``PIECE`` elements at most, or the whole range."""
    size = max(end - begin, 1) if whole else PIECE
    for first in range(begin, end, size):
        yield first, min(first + size, end)


def workspace_bytes(
    parameter: torch.Tensor, gradient: torch.Tensor, num_elements: int, *, scaled: bool
) -> int:
    """Return what the update of a range of ``num_elements`` allocates at most, from layouts alone.

    Args:
        parameter: has the layout of the parameter.
        gradient: of its shape, or flat and of the range alone.
        num_elements: of the range.
        scaled: the gradient is multiplied, negated or added to before it is used.
    """
    piece = min(num_elements, PIECE)
    in_rows = gradient.shape == parameter.shape and parameter.dim() > 1
    # What convolutions return need not lie in memory as a fake of it does.
    if in_rows and (parameter.dim() > 2 or not is_laid_out_as(gradient, parameter)):
        # Rows that are needed in part, the largest dimension of memory being the first.
        first = parameter.shape[max(range(parameter.dim()), key=parameter.stride)]
        piece = min(piece + 2 * (parameter.numel() // max(first, 1)), parameter.numel())
    elif not scaled and is_laid_out_as(gradient, parameter):
        return 0
    return piece * parameter.element_size()


def adam_now(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    mean: torch.Tensor,
    square: torch.Tensor,
    hyper: torch.Tensor,
    scale: torch.Tensor | None,
    begin: int,
    decoupled: bool,
    row: int = 0,
) -> None:
    """Do what the op ``adam`` does."""
    options = adam_options(hyper, row, decoupled=decoupled)
    on_gpu = parameter.is_cuda
    whole = (on_gpu or scale is None) and is_laid_out_as(gradient, parameter)
    for first, last in pieces(begin, begin + mean.numel(), whole=whole):
        part, is_copy = part_of(parameter, gradient, begin, first, last)
        if scale is not None and not on_gpu:
            part = part.mul_(scale) if is_copy else part * scale
        is_all = last - first == mean.numel()
        updates.adam(
            range_of(parameter, first, last),
            part,
            mean if is_all else mean[first - begin : last - begin],
            square if is_all else square[first - begin : last - begin],
            options,
            scale=scale if on_gpu else None,
        )
        del part  # so that the next piece takes its memory


_latest: tuple[Callable[[], torch.Tensor | None], int, list[float]] | None = None
"""Hyperparameters that were read last, as a weak reference and a version, and their values."""


def values_of(hyper: torch.Tensor) -> list[float]:
    """Return the elements of hyperparameters; those of one step are read once for all its parameters."""
    global _latest  # noqa: PLW0603 - one entry: each step has hyperparameters of its own
    latest = _latest
    if latest is not None and latest[0]() is hyper and latest[1] == hyper._version:
        return latest[2]
    values: list[float] = hyper.tolist()
    _latest = (weakref.ref(hyper), hyper._version, values)
    return values


def adam_options(hyper: torch.Tensor, row: int, *, decoupled: bool) -> AdamOptions:
    """Return the hyperparameters of ``adam`` by name, for the parameter of a row."""
    values = values_of(hyper)
    lr, beta1, beta2, eps, weight_decay, maximize = values[: len(ADAM)]
    return AdamOptions(
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
        maximize=bool(maximize),
        decoupled=decoupled,
        step=int(values[len(ADAM) + row]),
    )


def sgd_now(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    momentum: torch.Tensor | None,
    hyper: torch.Tensor,
    scale: torch.Tensor | None,
    begin: int,
    end: int,
    row: int = 0,
) -> None:
    """Do what the op ``sgd`` does."""
    options = sgd_options(hyper, row)
    whole = parameter.is_cuda and is_laid_out_as(gradient, parameter)
    for first, last in pieces(begin, end, whole=whole):
        part, is_copy = part_of(parameter, gradient, begin, first, last)
        updates.sgd(
            range_of(parameter, first, last),
            part,
            None if momentum is None else momentum[first - begin : last - begin],
            options,
            scale=scale,
            may_write=is_copy,
        )
        del part


def sgd_options(hyper: torch.Tensor, row: int) -> SgdOptions:
    """Return the hyperparameters of ``sgd`` by name, for the parameter of a row."""
    values = values_of(hyper)
    lr, momentum, dampening, weight_decay, nesterov, maximize = values[: len(SGD)]
    return SgdOptions(
        lr=lr,
        momentum=momentum,
        dampening=dampening,
        weight_decay=weight_decay,
        nesterov=bool(nesterov),
        maximize=bool(maximize),
        is_first=int(values[len(SGD) + row]) == 1,
    )


def _accumulate(
    total: torch.Tensor, gradient: torch.Tensor, shape: list[int], stride: list[int], begin: int
) -> None:
    # The parameter itself may be out of memory: its layout is all that counts.
    parameter = torch.empty_strided(shape, stride, device="meta")
    whole = is_laid_out_as(gradient, parameter)
    for first, last in pieces(begin, begin + total.numel(), whole=whole):
        part, _ = part_of(parameter, gradient, begin, first, last)
        total[first - begin : last - begin].add_(part)
        del part


def _clip_scale(norms: list[torch.Tensor], limit: float) -> torch.Tensor:
    """Return what ``torch.nn.utils.clip_grad_norm_`` multiplies gradients by."""
    return torch.clamp(limit / (total_norm_of(norms) + 1e-6), max=1.0)


def total_norm_of(norms: list[torch.Tensor]) -> torch.Tensor:
    """Return the norm of what has ``norms``, as ``torch.nn.utils.clip_grad_norm_`` does."""
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm


def _refuse_nan(loss: torch.Tensor, hyper: torch.Tensor) -> None:
    if math.isnan(loss.item()):
        raise NanLossError(step=int(hyper[-1]))


def nothing(*args: object) -> None:
    """Stand for an op without a result where there are no values."""


for _name, _implementation in (
    ("adam", adam_now),
    ("sgd", sgd_now),
    ("accumulate", _accumulate),
    ("refuse_nan", _refuse_nan),
):
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _implementation, _key)
    _library.impl(_name, nothing, "Meta")
for _key in ("CPU", "CUDA"):
    _library.impl("clip_scale", _clip_scale, _key)
    _library.impl("total_norm", total_norm_of, _key)
_library.impl("clip_scale", lambda norms, limit: norms[0].new_empty(()), "Meta")
_library.impl("total_norm", lambda norms: norms[0].new_empty(()), "Meta")

adam = torch.ops.gascompile_updates.adam.default
sgd = torch.ops.gascompile_updates.sgd.default
accumulate = torch.ops.gascompile_updates.accumulate.default
clip_scale = torch.ops.gascompile_updates.clip_scale.default
total_norm = torch.ops.gascompile_updates.total_norm.default
refuse_nan = torch.ops.gascompile_updates.refuse_nan.default
for _op, _implementation in ((adam, adam_now), (sgd, sgd_now), (refuse_nan, _refuse_nan)):
    call_directly(_op, _implementation)


def tiles(num_elements: int, most_elements: int) -> list[tuple[int, int]]:
    """Return ranges of about equal size that begin at multiples of 1024, about ``most_elements`` at most."""
    count = max(1, math.ceil(num_elements / most_elements))
    ends = [num_elements * i // count // _ALIGNED * _ALIGNED for i in range(count)]
    return list(zip(ends, [*ends[1:], num_elements], strict=True))
