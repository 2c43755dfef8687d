"""Left gradients: what is in ``p.grad`` when a step takes parameters over, to which eager adds the first batch's."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import nn

from gascompile.core.errors import UnsupportedOpError


def require_none_left(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse parameters of the optimizer with a gradient that is not zero.

    Raises:
        UnsupportedOpError: names one.
    """
    for parameter, gradient in _left(optimizer):
        is_dense = gradient.layout == torch.strided and not gradient.is_meta
        if not is_dense or bool(gradient.count_nonzero()):
            raise UnsupportedOpError(
                f"{_name(model, parameter)} has a gradient from before the step, to which eager would add the first "
                "batch's and a planned step does not; call optimizer.zero_grad() first"
            )


def drop_zeros(
    model: nn.Module, optimizer: torch.optim.Optimizer, gradients: Collection[str]
) -> None:
    """Let parameters have no gradient in place of zeros, which change no sum.

    Args:
        model: with the optimizer's parameters.
        optimizer: none of its parameters has another gradient than zeros.
        gradients: names of parameters to which the step gives one; eager updates the others by their zeros.

    Raises:
        UnsupportedOpError: names one of the others.
    """
    given = {id(tensor) for name, tensor in _named(model) if name in gradients}
    for parameter, _ in _left(optimizer):
        if id(parameter) not in given:
            raise UnsupportedOpError(
                f"{_name(model, parameter)} has a gradient of zeros and gets none by this loss, so that eager would "
                "update it once by weight decay and momentum; call optimizer.zero_grad() first, which sets it to None"
            )
    for parameter, _ in _left(optimizer):
        parameter.grad = None


def _left(optimizer: torch.optim.Optimizer) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                yield parameter, parameter.grad


def _named(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)


def _name(model: nn.Module, parameter: torch.Tensor) -> str:
    name = next((name for name, tensor in _named(model) if tensor is parameter), None)
    return f"a parameter of {list(parameter.shape)}" if name is None else f"'{name}'"
