"""Peer orders: which tensors other systems let stay first. What then fits is each search's own."""

from __future__ import annotations

from collections.abc import Sequence


def first_fit(first_uses: Sequence[int]) -> list[int]:
    """Return tensors as accelerate's device map fills memory with them: by their first use."""
    return sorted(range(len(first_uses)), key=lambda i: first_uses[i])


def largest_area(areas: Sequence[float]) -> list[int]:
    """Return tensors as G10 lets them stay: what frees the largest area of memory by its absence is the last.

    Args:
        areas: bytes by time, or as many per second that the way there and back takes.
    """
    return sorted(range(len(areas)), key=lambda i: areas[i])
