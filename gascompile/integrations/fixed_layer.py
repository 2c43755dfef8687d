"""A layer of a cache of fixed size, and its memory: keys and values for all positions that there is room for."""

from __future__ import annotations

import mmap
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

SPARE = 1
"""Positions that nothing is written to: a program in which all might be looked at holds for that alone."""


class FixedLayer(CacheLayerMixin):
    """Keys and values of one layer, as long as the whole cache."""

    is_sliding = False
    is_croppable = True
    keys: torch.Tensor
    values: torch.Tensor
    window: int | None = None
    """Positions that a call looks at; ``None`` for all."""
    at: torch.Tensor | None = None
    """Where the call at hand writes, if that is known; ``positions`` says it, too."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, position: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keys = keys
        self.values = values
        self.is_initialized = True
        self._position = position

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the tensors are there from the start."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new keys and values at their positions and return those that the call looks at."""
        del args, kwargs
        positions, self.at = self.at, None
        if positions is None:
            positions = self.positions(key_states)
        self.keys.index_copy_(2, positions, key_states)
        self.values.index_copy_(2, positions, value_states)
        if self.window is None:
            return self.keys, self.values
        return self.keys.narrow(2, 0, self.window), self.values.narrow(2, 0, self.window)

    def positions(self, key_states: torch.Tensor) -> torch.Tensor:
        """Return where keys of new tokens go, ``[tokens]``."""
        return torch.arange(key_states.shape[-2], device=key_states.device) + self._position

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Have each row so many times, one after the other."""
        self.batch_select_indices(torch.arange(self.keys.shape[0]).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Have these rows alone."""
        rows, end = torch.arange(self.keys.shape[0])[indices], int(self._position)
        self.keys, self.values = (_of_rows(past, rows, end) for past in (self.keys, self.values))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the length of the keys and the position of the first."""
        del query_length
        return self.get_max_length(), 0

    def get_seq_length(self) -> Any:
        """Return how many tokens were there before this call, as a tensor."""
        return self._position

    def get_max_length(self) -> int:
        """Return how many tokens a call looks at."""
        # A size that is open stays so while a program is captured.
        return self.keys.shape[-2] if self.window is None else self.window


def lasting_past(like: torch.Tensor, length: int, rows: int) -> torch.Tensor:
    """Return ``empty_past`` in memory that comes when it is written to: a large cache costs what its text does."""
    _, heads, _, width = like.shape
    count = rows * heads * length * width
    size_bytes = count * like.dtype.itemsize
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with torch.inference_mode(mode=False):  # later calls may come outside of it
        whole = torch.frombuffer(memory, dtype=like.dtype, count=count)
        return whole.view(rows, heads, length, width)


def longer_past(past: torch.Tensor, length: int) -> torch.Tensor:
    """Return keys or values with room for so many tokens."""
    longer = lasting_past(past, length, past.shape[0])
    longer[:, :, : past.shape[2]] = past
    return longer


def _of_rows(past: torch.Tensor, rows: torch.Tensor, end: int) -> torch.Tensor:
    other = lasting_past(past, past.shape[2], len(rows))
    torch.index_select(past[:, :, :end], 0, rows, out=other[:, :, :end])
    return other
