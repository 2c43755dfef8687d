"""In turns: reads and writes of a drive that go on at once, as if they went one after the other at other rates.

Clocks admit one transfer at a time to a pipe. Drives serve both directions at once, and hardly ever evenly: with rates
such that both together take as long as they were measured to, plans are right about what a mix of them takes.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DriveRates:
    """Bytes per second of both directions."""

    read_bytes_per_s: float
    write_bytes_per_s: float


def in_turns(alone: DriveRates, at_once: DriveRates) -> DriveRates:
    """Return at which rates reads and writes pass a drive one after the other and take as long as ``at_once``.

    None is below that of its direction alone, unless both at once are slower than they would be in turns: then writes
    are, as a step reads all that it writes, while much is read only.
    """
    reads_share = at_once.read_bytes_per_s / alone.read_bytes_per_s
    share = reads_share + at_once.write_bytes_per_s / alone.write_bytes_per_s
    if share >= 1:
        return DriveRates(
            read_bytes_per_s=share * alone.read_bytes_per_s,
            write_bytes_per_s=share * alone.write_bytes_per_s,
        )
    return DriveRates(
        read_bytes_per_s=alone.read_bytes_per_s,
        write_bytes_per_s=at_once.write_bytes_per_s / (1 - reads_share),
    )
