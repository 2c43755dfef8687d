"""Content: the bytes of tensors, read where they lie."""

from __future__ import annotations

import ctypes

import torch


def content_of(value: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor's elements, in order, of a copy where they lie apart or on a device.

    ``Tensor.numpy`` would leave the storage of a model's own tensor one that nobody can resize any more.

    Raises:
        RuntimeError: it has no elements that can be read.
    """
    if not value.numel():
        return memoryview(b"")
    dense = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
    # Of one element, strides may be any.
    whole = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)
    memory = (ctypes.c_ubyte * whole.numel()).from_address(whole.data_ptr())
    memory.tensor = whole  # type: ignore[attr-defined]  # alive as long as somebody reads it
    return memoryview(memory).cast("B")
