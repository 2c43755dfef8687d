"""Parts: which bytes of a tensor's memory an op changes that writes to some rows of it, or to a view.

Only what an op says of itself counts: that it copies to rows with given numbers, or that it writes to a view. What
is not known counts as the whole view.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gascompile.core.sizes import PAGE_BYTES, align_up

Span = tuple[int, int]
"""First byte, and the one after the last."""
_aten = torch.ops.aten
_BY_NUMBER = {
    # Rows of a dimension: arguments 1 and 2 are the dimension and their numbers.
    _aten.index_copy_.default,
    _aten.index_add_.default,
    _aten.index_fill_.int_Scalar,
    _aten.index_fill_.int_Tensor,
}
_MOST_SPANS = 4096
"""More are not worth to be told apart."""


def rows_of(target: object, arguments: Sequence[object]) -> tuple[int, torch.Tensor] | None:
    """Return the dimension and the numbers of the rows of its first argument that an op changes.

    ``None`` where it may change all of it.
    """
    if target in _BY_NUMBER and len(arguments) > 2:
        changed, dim, numbers = arguments[:3]
    elif target is _aten.index_put_.default and len(arguments) > 1:
        changed, numbers_by_dim = arguments[:2]
        if not isinstance(numbers_by_dim, (list, tuple)):
            return None
        given = [(i, n) for i, n in enumerate(numbers_by_dim) if n is not None]
        if len(given) != 1:
            return None
        ((dim, numbers),) = given
    else:
        return None
    if not isinstance(changed, torch.Tensor) or not changed.dim() or not isinstance(dim, int):
        return None
    if not isinstance(numbers, torch.Tensor) or numbers.dim() > 1:
        return None
    if numbers.dtype not in (torch.int64, torch.int32):
        return None
    return dim % changed.dim(), numbers


def part_bytes(target: object, arguments: Sequence[object]) -> int:
    """Return the bytes of the pages that an op changes of its first argument, at most; also of a fake one."""
    changed = arguments[0]
    assert isinstance(changed, torch.Tensor)
    rows = rows_of(target, arguments)
    if rows is None:
        return _most_bytes(
            *_runs(changed), [int(changed.storage_offset()) * changed.element_size()]
        )
    dim, numbers = rows
    num_rows = min(int(numbers.numel()), int(changed.shape[dim]))
    if not num_rows:
        return 0
    steps = [int(changed.storage_offset()), int(changed.stride(dim))]
    begins = [step * changed.element_size() for step in steps]
    return num_rows * _most_bytes(*_runs(changed.select(dim, 0)), begins)


def _most_bytes(starts: Sequence[int], length: int, begins: Sequence[int]) -> int:
    """Return the bytes of the pages that runs may touch, which begin somewhere after multiples of ``begins``."""
    if not length:
        return 0
    is_aligned = not PAGE_BYTES % length and not any(at % length for at in (*starts, *begins))
    return len(starts) * (PAGE_BYTES if is_aligned else align_up(length, PAGE_BYTES) + PAGE_BYTES)


def changed_spans(target: object, arguments: Sequence[object]) -> list[Span] | None:
    """Return what an op changes of the storage of its first argument, in whole pages; ``None`` for all of it.

    Reads the numbers of rows, which a device may have to be waited for.
    """
    changed = arguments[0]
    assert isinstance(changed, torch.Tensor)
    rows = rows_of(target, arguments)
    parts = [changed]
    if rows is not None:
        dim, numbers = rows
        size = changed.shape[dim]
        wanted = {int(number) for number in numbers.reshape(-1).tolist()}
        if any(not -size <= number < size for number in wanted):
            # The op refuses it; what it does before that is its own affair.
            return None
        parts = [changed.select(dim, number % size) for number in wanted]
    spans: list[Span] = []
    for part in parts:
        starts, length = _runs(part)
        if len(spans) + len(starts) > _MOST_SPANS:
            return None
        begin = int(part.storage_offset()) * part.element_size()
        spans += [(begin + start, begin + start + length) for start in starts]
    return in_pages(spans)


def in_pages(spans: Sequence[Span]) -> list[Span]:
    """Return spans as whole pages, in order; those that meet are one."""
    pages: list[Span] = []
    for begin, end in sorted(spans):
        low, high = begin // PAGE_BYTES * PAGE_BYTES, align_up(end, PAGE_BYTES)
        if begin == end:
            continue
        if pages and low <= pages[-1][1]:
            pages[-1] = (pages[-1][0], max(high, pages[-1][1]))
        else:
            pages.append((low, high))
    return pages


def _runs(part: torch.Tensor) -> tuple[list[int], int]:
    """Return where the runs of bytes begin that a view consists of, from its first on, and how long each is."""
    if not part.numel():
        return [], 0
    item = part.element_size()
    # What lies in one piece at the end of the order of memory is a run.
    shape, strides = map(int, part.shape), map(int, part.stride())
    dims = sorted((step, size) for size, step in zip(shape, strides, strict=True) if size > 1)
    length = 1
    while dims and dims[0][0] == length:
        length *= dims.pop(0)[1]
    dims = [(step, size) for step, size in dims if step]
    count = 1
    for _, size in dims:
        count *= size
    if count > _MOST_SPANS:
        last = sum(step * (size - 1) for step, size in dims) + length
        return [0], last * item
    starts = [0]
    for step, size in dims:
        starts = [start + i * step for start in starts for i in range(size)]
    return [start * item for start in starts], length * item
