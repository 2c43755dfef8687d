"""Cached casts: autocast casts a trained weight once, however often it is used, and a trace of it has to as well.

Torch's own cache knows leaves of autograd alone, and what is traced is none. Without it each use would have a cast of
its own, and gradients would be added up after they are cast back, and not before: other bits than eager's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils import _pytree as pytree

_REDUCED = {
    "__matmul__", "__rmatmul__", "addbmm", "addmm", "baddbmm", "bmm", "conv1d", "conv2d", "conv3d", "conv_tbc",
    "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "linear", "matmul", "mm",
    "scaled_dot_product_attention",
}  # fmt: skip
"""Functions whose operands autocast casts on a processor."""


class CachedCasts:
    """What was cast since the outermost autocast began."""

    def __init__(self, weights: Collection[torch.Tensor], *, enabled: bool) -> None:
        """Begin with nothing.

        Args:
            weights: what is traced for the model's tensors.
            enabled: whether autocast keeps its casts.
        """
        self._enabled = enabled
        self._weights = {id(w) for w in weights if w.dtype == torch.float32 and w.requires_grad}
        self._casts: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    @contextmanager
    def active(self) -> Iterator[None]:
        """Forget casts when autocast does; let the loss see the setting that torch takes away from traces."""
        before = torch.is_autocast_cache_enabled()

        def clear(own: Callable[[], None] = torch.clear_autocast_cache) -> None:
            self._casts.clear()
            own()

        torch.set_autocast_cache_enabled(self._enabled)
        try:
            with mock.patch.object(torch, "clear_autocast_cache", clear):
                yield
        finally:
            torch.set_autocast_cache_enabled(before)

    def of(self, func: Any, args: Any) -> Any:
        """Return a function's arguments with those weights cast that autocast would."""
        if (
            not torch.is_autocast_cache_enabled()
            or getattr(func, "__name__", "") not in _REDUCED
            or not torch.is_autocast_enabled("cpu")
        ):
            return args
        return pytree.tree_map_only(torch.Tensor, self._cast, args)

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self._weights:
            return tensor
        key = id(tensor), torch.get_autocast_dtype("cpu")
        if key not in self._casts:
            self._casts[key] = tensor.to(key[1])
        return self._casts[key]
