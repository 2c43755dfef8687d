"""Bytes, seconds and alignment: the only place where a size string is read or a number is printed.

Datasheet quantities are SI (GB = 1e9); memory capacities and budgets are binary (GiB = 2**30).
"""

from __future__ import annotations

import re
import reprlib

KIB = 1 << 10  # bytes
MIB = 1 << 20  # bytes
GIB = 1 << 30  # bytes

MAX_SIZE_BYTES = 1 << 60
"""An exbibyte; sums of what is larger leave the range of int64."""

PAGE_BYTES = 4096
"""Alignment of every arena address, file offset and length that direct I/O touches."""

SPILL_BUFFER_BYTES = MIB
"""What moving activations takes of the arena, once for each direction."""

_SUFFIX_BYTES = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": 1 << 40,
}
_SIZE_PATTERN = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*$")


def parse_size(value: int | str) -> int:
    """Return a size in bytes from ``1610612736``, ``"1.5GiB"``, ``"600 MiB"`` or ``"8GB"``.

    Raises:
        ValueError: the text is not a non-negative number with a known unit.
    """
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError(
            "a size is a whole number of bytes or a text such as '8GiB', "
            f"not the {type(value).__name__} {reprlib.repr(value)}"
        )
    if isinstance(value, int):
        if value < 0:
            raise ValueError(f"a size cannot be negative: {value}")
        return _within_range(value)
    match = _SIZE_PATTERN.match(value)
    scale = _SUFFIX_BYTES.get(match.group(2).lower()) if match else None
    if match is None or scale is None:
        units = ", ".join(("B", "KB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB"))
        raise ValueError(
            f"cannot read the size {value!r}: write a number and one of {units}, as in '1.5GiB'"
        )
    return _within_range(float(match.group(1)) * scale)


def _within_range(size_bytes: float) -> int:
    if size_bytes > MAX_SIZE_BYTES:
        raise ValueError(
            f"a size beyond {MAX_SIZE_BYTES // 10**12} TB is beyond any machine: give a smaller one"
        )
    return round(size_bytes)


def format_size(size_bytes: float) -> str:
    """Return a size for people, in binary units: ``format_size(1536 * 2**20) == '1.50 GiB'``."""
    for unit, scale in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(size_bytes) >= scale:
            return f"{size_bytes / scale:.2f} {unit}"
    return f"{size_bytes:.0f} B"


def format_enough(size_bytes: int) -> str:
    """Return a size as a budget is given that is at least this one: ``format_enough(10752384) == '10.26MiB'``."""
    for unit, scale in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if size_bytes >= scale:
            hundredths = -(-size_bytes * 100 // scale)
            return f"{hundredths // 100}.{hundredths % 100:02}{unit}"
    return str(size_bytes)


def format_rate(bytes_per_s: float) -> str:
    """Return a bandwidth for people: ``format_rate(1.5e9) == '1.50 GB/s'``."""
    return f"{bytes_per_s / 1e9:.2f} GB/s"


def format_time(time_s: float) -> str:
    """Return a duration for people: seconds, milliseconds or microseconds."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if abs(time_s) >= scale:
            return f"{time_s / scale:.3g} {unit}"
    return f"{time_s * 1e6:.3g} us"


def align_up(size_bytes: int, alignment_bytes: int = PAGE_BYTES) -> int:
    """Return the smallest multiple of ``alignment_bytes`` that is at least ``size_bytes``."""
    return -(-size_bytes // alignment_bytes) * alignment_bytes


def reserve_bytes(size_bytes: int) -> int:
    """Return what a tensor takes in an arena.

    A direct read starts at the page below the tensor's first byte in its file and ends at the page
    above its last one, so one page more than the aligned size holds it at any file offset.
    """
    return align_up(size_bytes) + PAGE_BYTES if size_bytes else 0
