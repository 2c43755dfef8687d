"""Updates of many small parameters in one call of torch's: what each of them computes is what ``update_ops`` has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gascompile.runtime.run.calls import Joined, call_at_once
from gascompile.training.optimizers import update_ops


class AdamsAtOnce:
    """Calls of ``adam`` with the same hyperparameters."""

    def __init__(self, calls: Sequence[tuple[Any, ...]]) -> None:
        """Know the arguments that stay: all but gradients, hyperparameters and what gradients are multiplied by."""
        self._calls = calls
        self._parameters = [call[0] for call in calls]
        self._means = [_shaped(call[2], call[0]) for call in calls]
        self._squares = [_shaped(call[3], call[0]) for call in calls]
        self._rows = [len(update_ops.ADAM) + call[-1] for call in calls]
        self._decoupled = calls[0][7]
        self._layouts = [(p.shape, p.stride(), p.dtype) for p in self._parameters]
        self._is_whole = all(
            call[7] == self._decoupled and _is_whole(call[0], call[2], call[6]) for call in calls
        )

    def __call__(
        self, gradients: list[torch.Tensor], hyper: torch.Tensor, scale: torch.Tensor | None
    ) -> None:
        """Update all of them."""
        if (
            not self._is_whole
            or [(g.shape, g.stride(), g.dtype) for g in gradients] != self._layouts
        ):
            for call, gradient in zip(self._calls, gradients, strict=True):
                parameter, _, mean, square, _, _, *place = call
                update_ops.adam_now(parameter, gradient, mean, square, hyper, scale, *place)
            return
        values = update_ops.values_of(hyper)
        lr, beta1, beta2, eps, weight_decay, maximize = values[: len(update_ops.ADAM)]
        counts = [values[row] for row in self._rows]
        steps = {count: torch.tensor(count, dtype=torch.float32) for count in set(counts)}
        kernel = torch._fused_adamw_ if self._decoupled else torch._fused_adam_
        kernel(
            self._parameters,
            gradients if scale is None else torch._foreach_mul(gradients, scale),
            self._means,
            self._squares,
            [],
            [steps[count] for count in counts],
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            weight_decay=weight_decay,
            eps=eps,
            amsgrad=False,
            maximize=bool(maximize),
        )


class SgdsAtOnce:
    """Calls of ``sgd`` with the same hyperparameters."""

    def __init__(self, calls: Sequence[tuple[Any, ...]]) -> None:
        """Know the arguments that stay: all but gradients, hyperparameters and what gradients are multiplied by."""
        self._calls = calls
        self._parameters = [call[0] for call in calls]
        self._momenta = [_shaped(call[2], call[0]) for call in calls if call[2] is not None]
        self._rows = [len(update_ops.SGD) + call[-1] for call in calls]
        self._layouts = [(p.shape, p.stride(), p.dtype) for p in self._parameters]
        self._is_whole = len(self._momenta) in (0, len(calls)) and all(
            call[5] == 0 and call[6] == call[0].numel() and _is_dense(call[0]) for call in calls
        )

    def __call__(
        self, gradients: list[torch.Tensor], hyper: torch.Tensor, scale: torch.Tensor | None
    ) -> None:
        """Update all of them."""
        values = update_ops.values_of(hyper)
        first = {values[row] == 1 for row in self._rows}
        layouts = [(g.shape, g.stride(), g.dtype) for g in gradients]
        if not self._is_whole or len(first) > 1 or layouts != self._layouts:
            for call, gradient in zip(self._calls, gradients, strict=True):
                update_ops.sgd_now(call[0], gradient, call[2], hyper, scale, *call[5:])
            return
        options = update_ops.sgd_options(hyper, self._calls[0][-1])
        momenta = self._momenta
        slopes: Sequence[torch.Tensor] = gradients
        if scale is not None:
            slopes = torch._foreach_mul([*slopes], scale)
        if options.maximize:
            slopes = torch._foreach_neg([*slopes])
        if options.weight_decay:
            slopes = torch._foreach_add([*slopes], self._parameters, alpha=options.weight_decay)
        if momenta:
            if options.is_first:
                torch._foreach_copy_(momenta, [*slopes])
            else:
                torch._foreach_mul_(momenta, options.momentum)
                torch._foreach_add_(momenta, [*slopes], alpha=1 - options.dampening)
            slopes = (
                torch._foreach_add([*slopes], momenta, alpha=options.momentum)
                if options.nesterov
                else momenta
            )
        torch._foreach_add_(self._parameters, [*slopes], alpha=-options.lr)


def _is_whole(parameter: torch.Tensor, moment: torch.Tensor, begin: int) -> bool:
    return begin == 0 and moment.numel() == parameter.numel() and _is_dense(parameter)


def _is_dense(parameter: torch.Tensor) -> bool:
    return parameter.is_contiguous() and parameter.numel() > 0


def _shaped(moment: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return a moment in the shape of its parameter, where it is of all of it."""
    return moment.view(parameter.shape) if moment.numel() == parameter.numel() else moment


def enter() -> None:
    """Let runs make these calls at once."""
    call_at_once(update_ops.adam_now, Joined(prepare=AdamsAtOnce, each=1, shared=(4, 5)))
    call_at_once(update_ops.sgd_now, Joined(prepare=SgdsAtOnce, each=1, shared=(3, 4)))
