"""Assigned buffers: ``self.count = self.count + x.mean()`` in a forward pass, in the place of a buffer.

``torch.export`` copies such a value into the buffer that is there, which converts and repeats it: what has another type
or shape would be another value at the next call.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.module import register_module_buffer_registration_hook

from gascompile.core.errors import CaptureError


@contextmanager
def like_before(model: nn.Module) -> Iterator[None]:
    """Refuse, in this thread, values of the model's buffers that are of another type or shape than the one before.

    Raises:
        CaptureError: from within the model; names the buffer.
    """
    own = {id(module._buffers): path for path, module in model.named_modules()}
    thread = threading.get_ident()

    def require_alike(module: nn.Module, name: str, value: object) -> None:
        path = own.get(id(module._buffers))
        before = module._buffers.get(name)
        if path is None or thread != threading.get_ident():
            return
        if not isinstance(value, torch.Tensor) or not isinstance(before, torch.Tensor):
            return
        if _kind(value) != _kind(before):
            raise CaptureError(
                f"the model assigns its buffer '{f'{path}.{name}'.lstrip('.')}' a value of {_in_words(value)}, in the "
                f"place of {_in_words(before)}, and what a plan keeps stays as it is; make the buffer like what it is "
                "assigned, with room for all that it will hold, and write it by copy_ or index_copy_"
            )

    handle = register_module_buffer_registration_hook(require_alike)
    try:
        yield
    finally:
        handle.remove()


def _kind(value: torch.Tensor) -> tuple[torch.dtype, torch.Size]:
    return value.dtype, value.shape


def _in_words(value: torch.Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')} and shape {tuple(value.shape)}"
