"""Copies between open files that take no memory to speak of."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

from gascompile.runtime.protocols import Reader

Writer = Callable[[int, memoryview, int], int]
"""A positional write; raises ``OSError`` and may take fewer bytes than it is given."""

_CHUNK_BYTES = 1 << 20
"""Copied at once where the kernel cannot copy by itself. Chosen, not measured."""
_REFUSALS = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF}


def copy_range(
    source: int, source_offset: int, target: int, target_offset: int, size_bytes: int
) -> None:
    """Copy bytes inside the kernel, or through a small buffer where the file systems cannot do that.

    Raises:
        OSError: a file cannot be read or written, or the source ends too early.
    """
    done = 0
    in_kernel = True
    while done < size_bytes:
        places = (source_offset + done, target_offset + done)
        if in_kernel:
            try:
                copied = os.copy_file_range(source, target, size_bytes - done, *places)
            except OSError as error:
                if error.errno not in _REFUSALS:
                    raise
                in_kernel = False
                continue
        else:
            part = os.pread(source, min(size_bytes - done, _CHUNK_BYTES), places[0])
            copied = len(part)
            write_all(target, part, places[1])
        if copied <= 0:
            raise OSError(errno.EIO, "the source ends before the tensor does")
        done += copied


def write_all(
    target: int, data: bytes | memoryview, offset: int, writer: Writer | None = None
) -> None:
    """Write all of ``data``.

    Raises:
        OSError: the file cannot be written.
    """
    view = memoryview(data)
    # Looked up now, as faults are put in its place.
    writer = writer or os.pwrite
    done = 0
    while done < len(view):
        taken = writer(target, view[done:], offset + done)
        if taken <= 0:
            raise OSError(errno.EIO, "a write took no bytes")
        done += taken


def read_all(file: int, into: memoryview, size_bytes: int, offset: int, reader: Reader) -> None:
    """Read at least the first ``size_bytes`` of ``into``.

    Raises:
        OSError: the file cannot be read, or ends too early.
    """
    done = 0
    while done < size_bytes:
        got = reader(file, into[done:], offset + done)
        if got <= 0:
            raise OSError(errno.EIO, "the file ends before the tensor does")
        done += got
