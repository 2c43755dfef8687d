"""Rows of a batch: how many a rank has, and which ones of a data set it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.data import Sampler

from gascompile.core.errors import UnsupportedOpError


def num_rows(batch: Any) -> int:
    """Return the size of the first dimension that all tensors of a batch share.

    Raises:
        UnsupportedOpError: they share none.
    """
    tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    sizes = {tensor.shape[0] for tensor in tensors if tensor.dim()}
    if len(sizes) != 1:
        raise UnsupportedOpError(
            f"tensors of the batch have {sorted(sizes)} rows, so that nobody can say how many rows of the global batch "
            "this rank has; let all begin with the same dimension, or pass rows='equal' where ranks have as many"
        )
    return int(sizes.pop())


def has_no_rows(batch: Any) -> bool:
    """Return whether the first dimension of all tensors of a batch is empty."""
    tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    return {tensor.shape[0] for tensor in tensors if tensor.dim()} == {0}


class RowSampler(Sampler[list[int]]):
    """Batches of indices for torch's ``DataLoader(batch_sampler=...)``: this rank's rows of each global batch.

    Every rank draws the same order from ``seed`` and the epoch, and takes its own rows of each batch: those after the
    rows of the ranks before it. What is left over at the end of an epoch is dropped, so that ranks make as many steps.
    """

    def __init__(
        self,
        length: int,
        rows: Callable[[], list[int]],
        rank: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        """Sample ``range(length)``; ``rows`` returns each rank's number of rows in the next batch."""
        self._length, self._rows, self._rank = length, rows, rank
        self._shuffle, self._seed, self._epoch = shuffle, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Draw the order of another epoch, as ``DistributedSampler`` does."""
        self._epoch = epoch

    def __len__(self) -> int:
        """Return the number of batches."""
        return self._length // sum(self._rows())

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's indices of each batch."""
        generator = torch.Generator().manual_seed(self._seed + self._epoch)
        order = torch.randperm(self._length, generator=generator) if self._shuffle else None
        begin = 0
        while begin + sum(rows := self._rows()) <= self._length:
            first = begin + sum(rows[: self._rank])
            own = range(first, first + rows[self._rank])
            yield list(own) if order is None else order[own.start : own.stop].tolist()
            begin += sum(rows)
