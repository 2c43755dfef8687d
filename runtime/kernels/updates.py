"""Optimizer updates of flat ranges, with states in float32 or in 8 bits: torch's fused kernels or Triton's.

Each function takes tensors of one device and changes them in place. On a GPU it launches a Triton kernel on the
current stream, which is not waited for; in CPU memory it calls torch's own fused kernel, to which the Triton
kernel is equal but for rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from gascompile.runtime.kernels import state_codes
from gascompile.runtime.kernels.state_codes import BLOCK, SIGNED, UNSIGNED

Coded = tuple[torch.Tensor, torch.Tensor]
"""Codes ``[blocks, 256]`` and scales ``[blocks]`` of a state, or of some of its blocks: see ``state_codes.parts``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamOptions:
    """Hyperparameters of one update, in the words of ``torch.optim.AdamW``."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    maximize: bool
    decoupled: bool
    """Weight decay as ``AdamW`` has it; else it is added to the gradient."""
    step: int
    """Number of the update, from one on."""

    @property
    def step_size(self) -> float:
        """``lr`` over the correction of the mean."""
        correction = 1 - self.beta1**self.step
        return self.lr / correction if correction else math.inf

    @property
    def root(self) -> float:
        """Root of the correction of the mean of squares."""
        return math.sqrt(1 - self.beta2**self.step)


@dataclass(frozen=True, slots=True, kw_only=True)
class SgdOptions:
    """Hyperparameters of one update, in the words of ``torch.optim.SGD``."""

    lr: float
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    maximize: bool
    is_first: bool
    """The momentum has no value yet: it becomes the gradient."""


class Workspace:
    """What an update of coded states in CPU memory computes in: allocated once, used piece by piece."""

    def __init__(self, num_values: int, step: int) -> None:
        """Take room for pieces of up to ``num_values``, at most ``DITHERS``; ``step`` is the update's number."""
        blocks = state_codes.num_blocks(num_values)
        self.mean = torch.empty(blocks, BLOCK)
        self.square = torch.empty(blocks, BLOCK)
        self.scratch = torch.empty(blocks, BLOCK, dtype=torch.int32)
        self.dither = state_codes.dither(step, blocks * BLOCK)

    @staticmethod
    def size_bytes(num_values: int) -> int:
        """Return what a workspace and the functions that work in it take at most."""
        blocks = state_codes.num_blocks(num_values)
        # Three tensors that stay, three of which the dither is made, and what scales are computed from.
        return 6 * 4 * BLOCK * blocks + 64 * (blocks + 16)


def adam(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    mean: torch.Tensor,
    square: torch.Tensor,
    options: AdamOptions,
    *,
    scale: torch.Tensor | None = None,
) -> None:
    """Update a parameter and its states.

    Args:
        parameter: contiguous float32 vector, as all that follow.
        gradient: as many elements; read only.
        mean: ``exp_avg``.
        square: ``exp_avg_sq``.
        options: of this update.
        scale: one float32 that the gradient is multiplied by.

    Raises:
        TypeError: a dtype that is not float32.
        ValueError: shapes, strides or devices that do not fit.
    """
    _check(parameter, gradient=gradient, mean=mean, square=square)
    if parameter.numel() == 0:
        return
    if parameter.is_cuda:
        from gascompile.runtime.kernels.adam import adam as launch

        launch(parameter, gradient, mean, square, options, scale=scale)
        return
    kernel = torch._fused_adamw_ if options.decoupled else torch._fused_adam_
    kernel(
        [parameter],
        [gradient if scale is None else gradient * scale],
        [mean],
        [square],
        [],
        [torch.tensor(options.step, dtype=torch.float32)],
        lr=options.lr,
        beta1=options.beta1,
        beta2=options.beta2,
        weight_decay=options.weight_decay,
        eps=options.eps,
        amsgrad=False,
        maximize=options.maximize,
    )


def adam_coded(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    states: tuple[Coded, Coded],
    options: AdamOptions,
    workspace: Workspace | None = None,
    *,
    scale: torch.Tensor | None = None,
) -> None:
    """Update a parameter and its states, which are in 8 bits; computed in float32.

    Args:
        parameter: contiguous float32 vector.
        gradient: as many elements; read only.
        states: mean as ``SIGNED`` and mean of squares as ``UNSIGNED`` codes, from a place in the state on that is
            a multiple of ``DITHERS``.
        options: of this update.
        workspace: for pieces of this size or more; made here where missing, and not needed on a GPU.
        scale: one float32 that the gradient is multiplied by.

    Raises:
        TypeError: a dtype that does not fit.
        ValueError: shapes, strides or devices that do not fit.
    """
    _check(parameter, gradient=gradient)
    _check_coded(parameter, states)
    count = parameter.numel()
    if count == 0:
        return
    if parameter.is_cuda:
        from gascompile.runtime.kernels.adam import adam_coded as launch

        launch(parameter, gradient, states, options, scale=scale)
        return
    if count > state_codes.DITHERS:
        raise ValueError(
            f"{count} elements at once in CPU memory; pass pieces of {state_codes.DITHERS} at most"
        )
    space = workspace or Workspace(count, options.step)
    blocks = state_codes.num_blocks(count)
    mean, square = space.mean[:blocks], space.square[:blocks]
    scratch, dither = space.scratch[:blocks], space.dither[: blocks * BLOCK]
    (mean_codes, mean_scales), (square_codes, square_scales) = states
    state_codes.decode(mean_codes, mean_scales, mean, scratch, SIGNED)
    state_codes.decode(square_codes, square_scales, square, scratch, UNSIGNED)
    flat = mean.view(-1)[:count], square.view(-1)[:count]
    adam(parameter, gradient, *flat, options, scale=scale)
    state_codes.encode(mean, mean_codes, mean_scales, SIGNED)
    state_codes.encode(square, square_codes, square_scales, UNSIGNED, dither)


def sgd(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    momentum: torch.Tensor | None,
    options: SgdOptions,
    *,
    scale: torch.Tensor | None = None,
    may_write: bool = False,
) -> None:
    """Update a parameter and its momentum.

    Args:
        parameter: contiguous float32 vector, as all that follow.
        gradient: as many elements.
        momentum: ``momentum_buffer``, where there is one.
        options: of this update.
        scale: one float32 that the gradient is multiplied by.
        may_write: the gradient may be overwritten, which saves a copy of it in CPU memory.

    Raises:
        TypeError: a dtype that is not float32.
        ValueError: shapes, strides or devices that do not fit.
    """
    _check(parameter, gradient=gradient, **({} if momentum is None else {"momentum": momentum}))
    if parameter.numel() == 0:
        return
    if parameter.is_cuda:
        from gascompile.runtime.kernels.sgd import sgd as launch

        launch(parameter, gradient, momentum, options, scale=scale)
        return
    slope = gradient
    if scale is not None:
        slope, may_write = slope.mul_(scale) if may_write else slope * scale, True
    if options.maximize:
        slope, may_write = slope.neg_() if may_write else -slope, True
    if options.weight_decay:
        slope = (slope.add_ if may_write else slope.add)(parameter, alpha=options.weight_decay)
        may_write = True
    if momentum is not None:
        if options.is_first:
            momentum.copy_(slope)
        else:
            momentum.mul_(options.momentum).add_(slope, alpha=1 - options.dampening)
        if options.nesterov:
            slope = (slope.add_ if may_write else slope.add)(momentum, alpha=options.momentum)
        else:
            slope = momentum
    parameter.add_(slope, alpha=-options.lr)


def sgd_coded(
    parameter: torch.Tensor,
    gradient: torch.Tensor,
    momentum: Coded,
    options: SgdOptions,
    workspace: tuple[torch.Tensor, torch.Tensor] | None = None,
    *,
    scale: torch.Tensor | None = None,
    may_write: bool = False,
) -> None:
    """Update a parameter and its momentum, which is in 8 bits; computed in float32.

    Args:
        parameter: contiguous float32 vector.
        gradient: as many elements.
        momentum: ``SIGNED`` codes.
        options: of this update.
        workspace: float32 and int32 ``[blocks, 256]``, as many blocks as the momentum has or more; made here where
            missing, and not needed on a GPU.
        scale: one float32 that the gradient is multiplied by.
        may_write: the gradient may be overwritten, which saves a copy of it in CPU memory.

    Raises:
        TypeError: a dtype that does not fit.
        ValueError: shapes, strides or devices that do not fit.
    """
    _check(parameter, gradient=gradient)
    _check_coded(parameter, (momentum,))
    if parameter.numel() == 0:
        return
    if parameter.is_cuda:
        from gascompile.runtime.kernels.sgd import sgd_coded as launch

        launch(parameter, gradient, momentum, options, scale=scale)
        return
    codes, scales = momentum
    values, scratch = workspace or sgd_workspace(parameter.numel())
    values, scratch = values[: len(codes)], scratch[: len(codes)]
    state_codes.decode(codes, scales, values, scratch, SIGNED)
    flat = values.view(-1)[: parameter.numel()]
    sgd(parameter, gradient, flat, options, scale=scale, may_write=may_write)
    state_codes.encode(values, codes, scales, SIGNED)


def sgd_workspace(num_values: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a workspace for pieces of up to ``num_values``; it is smaller than one for Adam."""
    blocks = state_codes.num_blocks(num_values)
    return torch.empty(blocks, BLOCK), torch.empty(blocks, BLOCK, dtype=torch.int32)


def _check(parameter: torch.Tensor, **others: torch.Tensor) -> None:
    shape, device = (parameter.numel(),), parameter.device
    if all(
        tensor.dtype is torch.float32
        and tensor.shape == shape
        and tensor.is_contiguous()
        and tensor.device == device
        for tensor in (parameter, *others.values())
    ):
        return
    for name, tensor in {"parameter": parameter, **others}.items():
        if tensor.dtype != torch.float32:
            raise TypeError(f"{name} is {tensor.dtype}; updates are of torch.float32")
        if tensor.shape != (parameter.numel(),) or not tensor.is_contiguous():
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} and strides {tuple(tensor.stride())}: it has to be a "
                f"contiguous vector of {parameter.numel()}, as the parameter's range is"
            )
        if tensor.device != parameter.device:
            raise ValueError(f"{name} is on {tensor.device}, the parameter on {parameter.device}")


def _check_coded(parameter: torch.Tensor, states: tuple[Coded, ...]) -> None:
    blocks = state_codes.num_blocks(parameter.numel())
    for codes, scales in states:
        if codes.dtype != torch.uint8 or scales.dtype != torch.uint8:
            raise TypeError(f"coded states are torch.uint8, not {codes.dtype} and {scales.dtype}")
        if codes.shape != (blocks, BLOCK) or scales.shape != (blocks,):
            raise ValueError(
                f"{parameter.numel()} elements have codes [{blocks}, {BLOCK}] and scales [{blocks}], not "
                f"{list(codes.shape)} and {list(scales.shape)}"
            )
        if not codes.is_contiguous() or not scales.is_contiguous():
            raise ValueError("codes or scales are not contiguous; pass whole blocks of a state")
        if codes.device != parameter.device or scales.device != parameter.device:
            raise ValueError(
                f"coded states are on {codes.device} and {scales.device}, the parameter on {parameter.device}"
            )
