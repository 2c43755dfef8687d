"""One block of anonymous memory per tier, whose addresses a plan has fixed: nothing is allocated later."""

from __future__ import annotations

import mmap

import torch

from gascompile.core.huge_pages import map_anonymous

POISON = 0xFF
"""A byte whose repetition is NaN in every float format."""


class Arena:
    """Page-aligned anonymous memory of an exact size, with torch views into it.

    A view keeps the mapping alive; ``close`` gives the pages back at once even where one survives.
    """

    def __init__(self, size_bytes: int, memory: mmap.mmap | None = None) -> None:
        """Use ``memory`` of exactly ``size_bytes``, or map new memory."""
        self.size_bytes = size_bytes
        self._map = memory if memory is not None else map_anonymous(size_bytes)
        self.memory = memoryview(self._map)
        bytes_view = torch.frombuffer(self._map, dtype=torch.uint8)
        self._start: int = bytes_view.data_ptr()
        self._bytes = bytes_view

    def view(self, offset: int, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a tensor over the memory at ``offset``; it owns nothing and is never copied.

        Raises:
            ValueError: the tensor would pass the end of the arena.
        """
        count = 1
        for size in shape:
            count *= size
        torch_dtype: torch.dtype = getattr(torch, dtype)
        if not count:
            return torch.empty(shape, dtype=torch_dtype)
        size_bytes = count * torch_dtype.itemsize
        if offset < 0 or offset + size_bytes > self.size_bytes:
            raise ValueError(
                f"{size_bytes} bytes at address {offset} pass the end of the arena of {self.size_bytes} bytes"
            )
        flat = torch.frombuffer(self._map, dtype=torch_dtype, count=count, offset=offset)
        return flat.view(shape)

    def bytes(self, start: int, stop: int) -> torch.Tensor:
        """Return the bytes from offset ``start`` to ``stop`` as a tensor over them."""
        return self._bytes[start:stop]

    def contains(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor's storage lies in the arena."""
        return 0 <= tensor.untyped_storage().data_ptr() - self._start < max(self.size_bytes, 1)

    def fill(self, start: int, stop: int, value: int) -> None:
        """Set the bytes from offset ``start`` to ``stop``."""
        self._bytes[start:stop].fill_(value)

    def close(self) -> None:
        """Give the memory back; views that survive read as zeros."""
        self._map.madvise(mmap.MADV_DONTNEED)
