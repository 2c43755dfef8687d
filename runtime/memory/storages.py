"""Tensors over memory: the same layout in another place, a layout whose memory comes later, memory as bytes."""

from __future__ import annotations

import torch


def over(
    storage: torch.UntypedStorage, like: torch.Tensor, offset: int | None = None
) -> torch.Tensor:
    """Return a tensor that lies in ``storage`` as ``like`` does in its own, from ``offset`` on, if that is given."""
    begin = like.storage_offset() if offset is None else offset
    empty = torch.empty(0, dtype=like.dtype, device=storage.device)
    return empty.set_(storage, begin, like.shape, like.stride())


def without_memory(like: torch.Tensor, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return a tensor of ``device`` that lies as ``like`` does, whose storage has given its memory back."""
    storage = torch.UntypedStorage(like.untyped_storage().nbytes(), device=device)
    tensor = over(storage, like)
    storage.resize_(0)
    return tensor


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a storage as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
