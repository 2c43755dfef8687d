"""Cumulative norms: batch normalisation whose running statistics are means of all batches (``momentum=None``).

Its factor is one by the number of batches so far, which is a value of a tensor and so in no trace. The trace
is made with a number that stands for it, and the op that got it is replaced by one that takes the tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from gascompile.core.errors import CaptureError

_aten = torch.ops.aten
_Stats = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
_library = torch.library.Library("gascompile_norms", "DEF")
_library.define(
    "native_batch_norm_mean(Tensor input, Tensor? weight, Tensor? bias, Tensor running_mean, "
    "Tensor running_var, Tensor count, float eps) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def _normalized(
    image: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    variance: torch.Tensor,
    count: torch.Tensor,
    eps: float,
) -> _Stats:
    # Without values there is no count, and shapes do not depend on it.
    factor = 1.0 if count.is_meta else 1.0 / float(count)
    stats: _Stats = _aten._native_batch_norm_legit_functional.default(
        image, weight, bias, mean, variance, True, factor, eps
    )
    return stats


for _backend in ("CPU", "Meta"):
    _library.impl("native_batch_norm_mean", _normalized, _backend)
_normalize = torch.ops.gascompile_norms.native_batch_norm_mean.default


@contextmanager
def numbered_norms(model: nn.Module) -> Iterator[dict[float, str]]:
    """Give each such norm of ``model`` a number in place of its factor; yield their names by it."""
    names: dict[float, str] = {}
    changed: list[_NormBase] = []
    for name, module in model.named_modules():
        if (
            isinstance(module, _BatchNorm)
            and module.momentum is None
            and module.training
            and module.num_batches_tracked is not None
        ):
            module.momentum = 0.5 + (len(names) + 1) * 2.0**-30
            names[module.momentum] = name
            changed.append(module)
    try:
        yield names
    finally:
        for module in changed:
            module.momentum = None


def take_counts(graph: fx.Graph, bound: Mapping[str, str], names: Mapping[float, str]) -> None:
    """Let ops that have a number from ``numbered_norms`` take the number of batches.

    Raises:
        CaptureError: a module does not count its batches as torch's own does.
    """
    if not names:
        return
    placeholders = {
        bound[n.name]: n for n in graph.nodes if n.op == "placeholder" and n.name in bound
    }
    counts = {
        number: placeholders[f"{name}.num_batches_tracked" if name else "num_batches_tracked"]
        for number, name in names.items()
    }
    for node in list(graph.nodes):
        if node.target is not _aten._native_batch_norm_legit_functional.default:
            continue
        image, weight, bias, mean, variance, _, number, eps = node.args
        if number not in counts:
            continue
        before = counts[number]
        counted = [
            n for n in before.users if n.target is _aten.add.Tensor and n.args == (before, 1)
        ]
        if len(counted) != 1 or not counted[0] < node:
            raise CaptureError(
                f"'{names[number]}' has momentum=None and does not count its batches by one; give it a momentum, "
                "such as 0.1"
            )
        counts[number] = counted[0]
        node.target = _normalize
        node.args = (image, weight, bias, mean, variance, counted[0], eps)
