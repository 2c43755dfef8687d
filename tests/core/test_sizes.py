"""Sizes in and out: the suffixes, the rounding, the alignment."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gascompile.core.sizes import (
    PAGE_BYTES,
    align_up,
    format_enough,
    format_size,
    format_time,
    parse_size,
    reserve_bytes,
)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("8GiB", 8 * 2**30),
        ("8GB", 8 * 10**9),
        ("1.5 GiB", 3 * 2**29),
        (" 600 mib ", 600 * 2**20),
        ("4096", 4096),
        ("7B", 7),
        ("2TiB", 2**41),
        (0, 0),
        (123, 123),
    ],
)
def test_parse_size(text: int | str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("value", ["", "GiB", "8 XB", "-1GiB", "1e9", "8GiBs", "0x10", -1, True])
def test_parse_size_refuses(value: int | str) -> None:
    with pytest.raises(ValueError, match="size"):
        parse_size(value)


def test_parse_size_refuses_other_types() -> None:
    with pytest.raises(ValueError, match="whole number"):
        parse_size(1.5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.50 KiB"),
        (3 * 2**19, "1.50 MiB"),
        (2**33, "8.00 GiB"),
    ],
)
def test_format_size(size_bytes: int, text: str) -> None:
    assert format_size(size_bytes) == text


@pytest.mark.parametrize(
    ("time_s", "text"), [(2.0, "2 s"), (0.0125, "12.5 ms"), (3.5e-6, "3.5 us"), (0.0, "0 us")]
)
def test_format_time(time_s: float, text: str) -> None:
    assert format_time(time_s) == text


@given(st.integers(0, 2**40))
def test_align_up_is_the_next_multiple(size_bytes: int) -> None:
    aligned = align_up(size_bytes)
    assert aligned % PAGE_BYTES == 0
    assert 0 <= aligned - size_bytes < PAGE_BYTES


@given(st.integers(1, 2**40), st.integers(0, PAGE_BYTES - 1))
def test_a_reservation_holds_a_direct_read_at_any_offset(size_bytes: int, offset: int) -> None:
    assert reserve_bytes(size_bytes) >= align_up(offset + size_bytes)


def test_nothing_reserves_nothing() -> None:
    assert reserve_bytes(0) == 0


@given(size_bytes=st.integers(0, 1 << 50))
def test_what_is_enough_is_a_budget_of_at_least_the_size(size_bytes: int) -> None:
    enough_bytes = parse_size(format_enough(size_bytes))
    assert size_bytes <= enough_bytes <= size_bytes * 1.01 + 1
