"""Ranges of bytes that have one owner each, and what a plan is refused with that gives one two."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import NoReturn

from gascompile.core.errors import PlanVerificationError


def refuse(message: str, step: int = -1) -> NoReturn:
    """Raise what a plan that cannot run as it claims is refused with."""
    raise PlanVerificationError(
        f"{message}; the plan is refused, make it again from its workload", step=step
    )


@dataclass(slots=True)
class Held:
    """Bytes that a weight has of an arena."""

    tensor: str
    begin: int
    end: int


@dataclass(slots=True)
class ByteRanges:
    """Copies whose bytes do not overlap, by their first byte; what is empty is in nobody's way."""

    begins: list[int] = field(default_factory=list)
    copies: list[Held] = field(default_factory=list)

    def overlapping(self, begin: int, end: int) -> Held | None:
        """Return a copy that has some of the bytes; only the neighbours can."""
        k = bisect_left(self.begins, begin)
        for other in self.copies[max(k - 1, 0) : k + 1]:
            if other.begin < end and begin < other.end:
                return other
        return None

    def add(self, copy: Held) -> None:
        """Add a copy that overlaps none."""
        if copy.begin < copy.end:
            k = bisect_left(self.begins, copy.begin)
            self.begins.insert(k, copy.begin)
            self.copies.insert(k, copy)

    def remove(self, copy: Held) -> None:
        """Remove a copy that was added."""
        if copy.begin < copy.end:
            k = bisect_left(self.begins, copy.begin)
            del self.begins[k], self.copies[k]
