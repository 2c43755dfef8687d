"""Before update: callbacks that Trainer calls between gradients and the update, both of which a planned step has made.

They may count, log and decide. What they would find otherwise than with Trainer, or change in vain, is refused:
gradients, values of parameters and states, hyperparameters of the update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from gascompile.core.errors import UnsupportedOpError

_INSTEAD = (
    "and a planned step computes gradients and updates in one; do it in on_step_begin or on_optimizer_step, after the "
    "update. Gradients are gone by then: max_grad_norm clips them, and their norm is logged as grad_norm"
)
_TENSOR: Any = torch.Tensor
_FACTS = frozenset(
    [getattr(_TENSOR, name).__get__ for name in (
        "shape", "dtype", "device", "layout", "ndim", "is_leaf", "requires_grad", "itemsize", "nbytes",
    )]
    + [getattr(_TENSOR, name) for name in (
        "size", "numel", "nelement", "dim", "ndimension", "element_size", "is_floating_point", "__len__",
    )]
)  # fmt: skip
"""What is the same before the update as after it."""


class _OwnTensors(TorchFunctionMode):
    """Torch's functions for what a callback has made itself."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, torch.Tensor] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],  # torch passes it
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        if func not in _FACTS:
            for leaf in pytree.tree_leaves((args, options)):
                if isinstance(leaf, torch.Tensor) and id(leaf) not in self._made:
                    raise UnsupportedOpError(
                        f"a callback's on_pre_optimizer_step looks at gradients or values, {_INSTEAD}"
                    )
        result = func(*args, **options)
        made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self._made.update((id(leaf), leaf) for leaf in made)
        return result


@contextmanager
def before_update(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Enclose what callbacks do between gradients and the update of ``optimizer``.

    Raises:
        UnsupportedOpError: they look at a tensor that they did not make, or change the optimizer's groups.
    """
    before = _hyperparameters(optimizer)
    with _OwnTensors():
        yield
    if _hyperparameters(optimizer) != before:
        raise UnsupportedOpError(
            f"a callback's on_pre_optimizer_step changes the optimizer's param_groups, {_INSTEAD}"
        )


def _hyperparameters(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return what groups hold, tensors by identity: their values cannot change unseen."""
    return [
        {key: pytree.tree_map_only(torch.Tensor, id, value) for key, value in group.items()}
        for group in optimizer.param_groups
    ]
