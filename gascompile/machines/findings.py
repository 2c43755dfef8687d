"""What a look at one thing of this machine found, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """How a finding stands."""

    OK = "ok"
    WARN = "warn"
    MISSING = "missing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at."""

    name: str
    status: Status
    detail: str
    remedy: str = ""
    """What to do; empty when there is nothing to do."""
