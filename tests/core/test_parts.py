"""What an op changes of a tensor's memory: never less than it really does, byte for byte."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from gascompile.core.parts import changed_spans, in_pages, part_bytes
from gascompile.core.sizes import PAGE_BYTES

aten = torch.ops.aten


def changed_bytes(whole: torch.Tensor, call: Callable[[], object]) -> set[int]:
    """Return the numbers of the bytes that a call really changes, given values that differ everywhere."""
    before = whole.clone().view(torch.uint8).view(-1)
    call()
    after = whole.view(torch.uint8).view(-1)
    return set((before != after).nonzero().view(-1).tolist())


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda t: t,
    "part": lambda t: t[1:, :, 3:11],
    "turned": lambda t: t.transpose(0, 2),
    "one": lambda t: t[1, :, 2:9],
    "stepping": lambda t: t[:, 1::3],
}


@given(
    shape=st.tuples(st.integers(2, 4), st.integers(4, 40), st.integers(12, 300)),
    view=st.sampled_from(sorted(VIEWS)),
    kind=st.sampled_from(["index_copy_", "index_put_", "index_add_", "index_fill_", "fill_"]),
    dtype=st.sampled_from([torch.float32, torch.int16]),
    data=st.data(),
)
def test_spans_hold_all_that_changes(
    shape: tuple[int, ...], view: str, kind: str, dtype: torch.dtype, data: Any
) -> None:
    whole = torch.full(shape, 0x0101, dtype=torch.int16).to(dtype)
    part = VIEWS[view](whole)
    dim = data.draw(st.integers(0, part.dim() - 1))
    rows = data.draw(
        st.lists(st.integers(0, part.shape[dim] - 1), min_size=1, max_size=4, unique=True)
    )
    numbers = torch.tensor(rows)
    values = torch.full([len(rows) if d == dim else n for d, n in enumerate(part.shape)], 77)
    values = values.to(dtype)
    target: Any = getattr(aten, kind)
    arguments: tuple[Any, ...] = (part, dim, numbers, values)
    match kind:
        case "index_put_":
            numbers_by_dim: list[torch.Tensor | None] = [None] * dim
            target, arguments = (
                target.default,
                (part, [*numbers_by_dim, numbers - part.shape[dim]], values),
            )
        case "index_fill_":
            target, arguments = target.int_Scalar, (part, dim, numbers, 77)
        case "fill_":
            target, arguments = target.Scalar, (part, 77)
        case _:
            target = target.default
    spans = changed_spans(target, arguments)
    planned_bytes = part_bytes(target, arguments)
    assert spans is not None
    really = changed_bytes(whole, lambda: target(*arguments))
    assert really
    assert all(any(begin <= at < end for begin, end in spans) for at in really)
    assert sum(end - begin for begin, end in spans) <= planned_bytes
    # No page in vain.
    assert {at // PAGE_BYTES for at in really} == {
        page for begin, end in spans for page in range(begin // PAGE_BYTES, end // PAGE_BYTES)
    }


def test_a_row_of_a_cache_is_a_page_of_each_head() -> None:
    cache, row = torch.zeros(1, 4, 4096, 16), torch.ones(1, 4, 1, 16)
    arguments = (cache, 2, torch.tensor([9]), row)
    spans = changed_spans(aten.index_copy_.default, arguments)
    assert spans is not None
    assert [end - begin for begin, end in spans] == [PAGE_BYTES] * 4
    assert part_bytes(aten.index_copy_.default, arguments) == 4 * PAGE_BYTES
    with FakeTensorMode() as mode:
        fakes = tuple(mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in arguments)
        assert part_bytes(aten.index_copy_.default, fakes) == 4 * PAGE_BYTES


def test_rows_that_are_not_there_are_everything() -> None:
    cache = torch.zeros(4, 8)
    assert changed_spans(aten.index_copy_.default, (cache, 0, torch.tensor([4]), cache[:1])) is None


def test_a_mask_is_everything() -> None:
    cache = torch.zeros(4, 4096)
    mask = torch.tensor([True, False, False, False])
    spans = changed_spans(aten.index_put_.default, (cache, [mask], cache[:1]))
    assert spans == [(0, cache.nbytes)]


@pytest.mark.parametrize(
    ("spans", "pages"),
    [
        ([], []),
        ([(5, 5)], []),
        ([(1, 2)], [(0, 1)]),
        ([(4095, 4097)], [(0, 2)]),
        ([(9000, 9001), (0, 4096)], [(0, 1), (2, 3)]),
        ([(4096, 5000), (0, 1)], [(0, 2)]),
    ],
)
def test_pages_that_meet_are_one(
    spans: list[tuple[int, int]], pages: list[tuple[int, int]]
) -> None:
    wanted = [(begin * PAGE_BYTES, end * PAGE_BYTES) for begin, end in pages]
    assert in_pages(spans) == wanted
