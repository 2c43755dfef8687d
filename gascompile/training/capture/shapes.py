"""Shapes: emptied parameters while a trace looks at them."""

from __future__ import annotations

from types import TracebackType

import torch

from gascompile.training.state.aliasing import Storages
from gascompile.training.state.train_state import States


class Shapes:
    """Gives emptied parameters their shapes back while something looks at them, without memory."""

    def __init__(self, states: States | None, storages: Storages) -> None:
        self._states, self._apart = states, storages.apart()

    def __enter__(self) -> None:
        if self._states is not None:
            self._states.covers.lift()
            for name, tensor in self._states.tensors.items():
                tensor.data = self._states.persistent.outline(name)
        self._apart.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._apart.__exit__(kind, error, trace)
        if self._states is not None:
            for tensor in self._states.tensors.values():
                tensor.data = torch.empty(0, dtype=tensor.dtype)
            self._states.covers.put()
