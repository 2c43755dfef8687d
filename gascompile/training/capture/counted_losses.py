"""Counted losses: means over the targets that are not ignored, weighed by those of all ranks.

A mean over a rank's own targets is brought to what, weighed by the rank's rows and summed over the ranks, is the mean
over all ranks' targets. Class weights count as they do in one process. Targets may be computed by the model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from gascompile.training.optimizers import rank_ops


class CountedLosses(TorchFunctionMode):
    """Weighs cross entropies by their targets among those of all ranks."""

    def __init__(self, weight: torch.Tensor) -> None:
        """Know the weight that a rank's rows have."""
        super().__init__()
        self._weight = weight

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run ``func``, and weigh what it returns."""
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if func not in (functional.cross_entropy, functional.nll_loss):
            return found
        given = inspect.signature(func).bind(*args, **kwargs)
        given.apply_defaults()
        return self._weighed(found, given.arguments)

    def _weighed(self, mean: torch.Tensor, given: Mapping[str, Any]) -> torch.Tensor:
        target, weight = given["target"], given["weight"]
        is_plain = given["size_average"] is None and given["reduce"] is None
        is_mean = given["reduction"] == "mean" and is_plain
        if not is_mean or target.is_floating_point() or not target.dim():
            return mean
        with torch.no_grad():
            counts = target != given["ignore_index"]
            if weight is not None:
                own = weight.detach()[torch.where(counts, target, 0)] * counts
                count = own.sum(dtype=torch.float32)
            else:
                count = counts.sum().to(torch.float32)
            share = count / rank_ops.total(count) / self._weight
        # The mean of none is no number; theirs is not to be lost by it.
        some = torch.where(count > 0, mean, mean.new_zeros(()))
        weighed: torch.Tensor = (some * share).to(mean.dtype)
        return weighed


def counted_mean(node: torch.fx.Node) -> torch.fx.Node | None:
    """Return the mean over own targets of which a number is what ``CountedLosses`` makes; ``None`` where it is none."""
    aten = torch.ops.aten
    if node.target is not aten.mul.Tensor:
        return None
    some, share = _args(node)
    own: Any = _args(share)[0] if _is(share, aten.div.Tensor) else None
    if not _is(own, aten.div.Tensor) or not _is(some, aten.where.self):
        return None
    count, total = _args(own)
    if not _is(total, rank_ops.total) or total.args[0] is not count:
        return None
    mean: torch.fx.Node = _args(some)[1]
    return mean


def _args(node: Any) -> Any:
    return node.args


def _is(node: Any, target: object) -> bool:
    return isinstance(node, torch.fx.Node) and node.target is target
