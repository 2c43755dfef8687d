"""Values of ranks as bytes, to be compared and sent."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from gascompile.core.content import content_of
from gascompile.runtime.memory.storages import bytes_of


def memory_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the memory of tensors as bytes, once where several share it."""
    memory_at = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        memory_at[storage.data_ptr()] = bytes_of(storage)
    return [memory for memory in memory_at.values() if memory.numel()]


def digest_of(memory: Sequence[torch.Tensor]) -> bytes:
    """Return a digest of what ``memory_of`` has found."""
    digest = hashlib.blake2b(digest_size=8)
    for part in memory:
        digest.update(content_of(part))
    return digest.digest()
