"""Rows of weights, read from where they lie: what converts and measures weights never needs one whole."""

from __future__ import annotations

import contextlib
import math
from typing import BinaryIO, Self

import torch

from gascompile.core.errors import CheckpointError, StorageError
from gascompile.core.sources import WeightSource
from gascompile.formats.layout import is_read_packed


def lies_packed(source: WeightSource) -> bool:
    """Return whether a file has a weight in a packed form."""
    return is_read_packed(source.dtype)


def _dtype(source: WeightSource) -> torch.dtype:
    if lies_packed(source) or source.interleaved_heads:
        raise CheckpointError(
            f"'{source.name}' does not lie in its file as rows of values in their order; pass a safetensors file"
        )
    dtype: torch.dtype = getattr(torch, source.dtype)
    return dtype


class WeightRows:
    """Reads ranges of weights; files stay open until the end of the ``with`` block."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._files: dict[str, BinaryIO] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._stack.close()

    def rows(self, source: WeightSource, begin: int, end: int, columns: int) -> torch.Tensor:
        """Return rows ``begin`` to ``end`` of the weight as a matrix of ``columns``, in its stored dtype.

        Raises:
            StorageError: a file cannot be read, or has fewer bytes.
        """
        dtype = _dtype(source)
        row_bytes = columns * dtype.itemsize
        raw = self._bytes(source, begin * row_bytes, end * row_bytes)
        return torch.frombuffer(raw, dtype=dtype).view(-1, columns)

    def whole(self, source: WeightSource) -> torch.Tensor:
        """Return the whole weight in its shape; raises as ``rows`` does."""
        size, dtype = math.prod(source.shape), _dtype(source)
        if not size:
            return torch.empty(source.shape, dtype=dtype)
        return self.rows(source, 0, 1, size).view(source.shape)

    def _bytes(self, source: WeightSource, begin: int, end: int) -> bytearray:
        read = bytearray()
        position = 0
        for extent in source.extents:
            first, last = max(begin - position, 0), min(end - position, extent.size_bytes)
            if first < last:
                read += self._read(source.name, extent.path, extent.offset + first, last - first)
            position += extent.size_bytes
        if len(read) < end - begin:
            raise StorageError(f"'{source.name}' ends early; download the checkpoint again")
        return read

    def _read(self, name: str, path: str, offset: int, size_bytes: int) -> bytes:
        try:
            if path not in self._files:
                self._files[path] = self._stack.enter_context(open(path, "rb"))  # noqa: SIM115 - closed by the stack
            stream = self._files[path]
            stream.seek(offset)
            raw = stream.read(size_bytes)
        except OSError as error:
            raise StorageError(
                f"cannot read '{name}' from {path}: {error.strerror or error}"
            ) from error
        if len(raw) < size_bytes:
            raise StorageError(f"'{name}' ends early in {path}; download it again")
        return raw
