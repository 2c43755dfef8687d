"""Memory cells: a few words of each tensor's memory, which show that it was written to past its version.

Writes through ``.data``, NumPy or pointers leave no trace but the values. To compare all of these would take as long as
to compute with them; what overwrites, scales or merges a whole tensor shows in any few of them. Tensors that lie in
files are left out: whoever reads memory of a file that was cut short is ended by a signal, before its stamp says so.
"""

from __future__ import annotations

import ctypes
import operator
from bisect import bisect_right
from collections.abc import Sequence

import torch
from torch import nn

from gascompile.weights.mapped import file_ranges

_BYTES = 8
"""Of a word."""
_PLACES = (3, 11, 7, 15, 1, 9, 5, 13, 2, 10, 6, 14, 4, 12, 8, 0)
"""Sixteenths of a tensor, where first words are looked at until enough are found that are not zero, as padding is."""
_KEPT = 2
"""Words of a tensor. [Measured] 1,200 words take 105 us to compare, versions of as many as 300 parameters 150."""
_PLAIN = {torch.Tensor, nn.Parameter, nn.Buffer}
_VALUE = operator.attrgetter("value")


class Cells:
    """Words of the memory of tensors, none of which it holds: to be read while they have that memory still."""

    def __init__(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Take note of what stands in each."""
        self._cells: list[ctypes.c_uint64] = []
        self._owners: list[int] = []
        near = {
            i: tensor for i, tensor in enumerate(tensors) if tensor is not None and _is_near(tensor)
        }
        in_files = _InFiles() if near else None
        for number, tensor in near.items():
            cells = [] if in_files is None or in_files.has(tensor) else _cells_of(tensor)
            self._cells += cells
            self._owners += [number] * len(cells)
        self._noted = list(map(_VALUE, self._cells))

    def changed(self) -> int | None:
        """Return the number of a tensor that was written to, or ``None``."""
        now = list(map(_VALUE, self._cells))
        if now == self._noted:
            return None
        pairs = zip(self._owners, now, self._noted, strict=True)
        return next(owner for owner, new, old in pairs if new != old)


class _InFiles:
    """Memory that lies in files; all of it where the system does not tell."""

    def __init__(self) -> None:
        """Look at the memory of this process."""
        try:
            self._ranges: list[tuple[int, int]] | None = file_ranges()
        except OSError:
            self._ranges = None
        self._begins = [begin for begin, _ in self._ranges or ()]

    def has(self, tensor: torch.Tensor) -> bool:
        """Return whether part of a contiguous tensor does."""
        begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        if self._ranges is None:
            return True
        # Of the ranges that begin before the tensor ends, the last ends last.
        last = bisect_right(self._begins, end - 1) - 1
        return last >= 0 and self._ranges[last][1] > begin


def _is_near(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's memory can be read: it is whole, of no kind of its own, and on the host."""
    is_host = type(tensor) in _PLAIN and tensor.device.type == "cpu"
    return is_host and tensor.layout is torch.strided and tensor.is_contiguous()


def _cells_of(tensor: torch.Tensor) -> list[ctypes.c_uint64]:
    """Return words of a tensor's memory; none where it is too small."""
    begin, words = tensor.data_ptr(), tensor.nbytes // _BYTES
    if not begin or not words:
        return []
    filled: list[ctypes.c_uint64] = []
    empty: list[ctypes.c_uint64] = []
    for place in dict.fromkeys(part * words // len(_PLACES) for part in _PLACES):
        cell = ctypes.c_uint64.from_address(begin + place * _BYTES)
        (filled if cell.value else empty).append(cell)
        if len(filled) == _KEPT:
            break
    return [*filled, *empty][:_KEPT]
