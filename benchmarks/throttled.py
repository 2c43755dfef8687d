"""Hold this process to a speed of the drive, which is how a slower drive is had."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

_V1 = Path("/sys/fs/cgroup/blkio")


def can_throttle(folder: Path) -> bool:
    """Return whether this process may slow the drive of ``folder`` down for itself."""
    try:
        with throttled(folder, 1e9):
            return True
    except OSError:
        return False


@contextlib.contextmanager
def throttled(folder: Path, bytes_per_s: float) -> Iterator[None]:
    """Let this process read, and write, no more than ``bytes_per_s`` each on the drive of ``folder``.

    Writes through the page cache are not held up, as the kernel makes them later.

    Raises:
        OSError: there are no blkio cgroups, or they cannot be made.
    """
    number = os.stat(folder).st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    group = _V1 / f"gascompile-{uuid.uuid4().hex[:12]}"
    group.mkdir()
    try:
        for direction in ("read", "write"):
            limit = group / f"blkio.throttle.{direction}_bps_device"
            limit.write_text(f"{device} {int(bytes_per_s)}")
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        with contextlib.suppress(OSError):
            (_V1 / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()
