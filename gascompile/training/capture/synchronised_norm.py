"""Synchronised norm: batch normalisation by the statistics of all ranks' rows, as one process would have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode

from gascompile.core.errors import UnsupportedOpError
from gascompile.training.optimizers import rank_ops


class SynchronisedNorm(TorchFunctionMode):
    """Computes training batch norms from sums over the ranks, gradients included."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run ``func``, or what stands in its place."""
        if func is functional.instance_norm:
            return _instance_norm(*args, **(kwargs or {}))
        if func is functional.batch_norm:
            return _batch_norm(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def require_synchronised(model: nn.Module) -> None:
    """Refuse batch norms whose running statistics ranks do not keep alike.

    Raises:
        UnsupportedOpError: names one.
    """
    for name, module in model.named_modules():
        if (
            isinstance(module, _BatchNorm)
            and module.track_running_stats
            and module.momentum is None
        ):
            raise UnsupportedOpError(
                f"'{name}' is a {type(module).__name__} that averages over all batches (momentum=None), which several "
                "ranks do not plan; give it a momentum"
            )


def _instance_norm(
    x: torch.Tensor,
    running_mean: torch.Tensor | None = None,
    running_var: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Normalise each row by itself, not as the batch norm that torch makes of it."""
    if running_mean is not None or not use_input_stats:
        return functional.instance_norm(
            x, running_mean, running_var, weight, bias, use_input_stats, momentum, eps
        )
    return functional.group_norm(x, x.shape[1], weight, bias, eps)


def _batch_norm(
    x: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    """Normalise channels, the second dimension, over all others and all ranks."""
    if not training:
        return functional.batch_norm(
            x, running_mean, running_var, weight, bias, training, momentum, eps
        )
    values = x.float()
    dims = [d for d in range(x.dim()) if d != 1]
    shape = [-1 if d == 1 else 1 for d in range(x.dim())]
    own_count = values.new_full((1,), x.numel() // x.shape[1])
    sums = rank_ops.total(torch.cat([values.sum(dims), own_count]))
    count = sums[-1].detach()
    mean = sums[:-1] / count
    centred = values - mean.view(shape)
    variance = rank_ops.total(centred.square().sum(dims)) / count
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            unbiased = variance.detach() * count / (count - 1)
            running_mean.mul_(1 - momentum).add_(momentum * mean.detach())
            running_var.mul_(1 - momentum).add_(momentum * unbiased)
    normalised = centred * torch.rsqrt(variance + eps).view(shape)
    if weight is not None:
        normalised = normalised * weight.view(shape)
    if bias is not None:
        normalised = normalised + bias.view(shape)
    result: torch.Tensor = normalised.to(x.dtype)
    return result
