"""Values of weights where they are: tensors over maps of their files, which are read where they are looked at."""

from __future__ import annotations

import numpy as np
import torch

from gascompile.core.errors import CheckpointError
from gascompile.core.sources import Extent, WeightSource
from gascompile.core.strides import contiguous_strides


def stored_value(source: WeightSource) -> torch.Tensor:
    """Return the values of a weight as they are stored.

    Bytes that lie in one place are mapped: writing to the tensor changes a copy of the page, never the file. Of
    several places they are read into memory.

    Raises:
        CheckpointError: a file cannot be read.
    """
    dtype = getattr(torch, source.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(
            f"'{source.name}' is stored as {source.dtype}, in which it has no values that torch could map"
        )
    if not source.size_bytes:
        return torch.empty(source.shape, dtype=dtype)
    try:
        parts = [_mapped(extent) for extent in source.extents]
    except (OSError, ValueError) as error:
        raise CheckpointError(f"the values of '{source.name}' cannot be read: {error}") from error
    raw = parts[0] if len(parts) == 1 else torch.cat(parts)
    if raw.data_ptr() % dtype.itemsize:
        raw = raw.clone()
    stride = source.stride or contiguous_strides(source.shape)
    return raw.view(dtype).as_strided(source.shape, stride)


def _mapped(extent: Extent) -> torch.Tensor:
    mapped = np.memmap(
        extent.path, dtype=np.uint8, mode="c", offset=extent.offset, shape=(extent.size_bytes,)
    )
    return torch.from_numpy(mapped)
