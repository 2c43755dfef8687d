"""Files that others may have made: opened as what they should be, or refused.

A path in the place of a file may name a pipe, a device or a folder; reading one waits, or never ends. Every
file that is read goes through here, so only regular files are, and no more of them than the reader can use.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from gascompile.core.errors import FormatError, StorageError

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_HERE, _EXCHANGE = -100, 2
"""AT_FDCWD and RENAME_EXCHANGE of Linux."""
_NOT_OURS = (errno.EACCES, errno.EPERM, errno.EROFS)
MAX_JSON_BYTES = 256 << 20
"""Of one JSON file; the plan of a model of 10,000 ops has some 10 MB."""


def open_regular(path: str | os.PathLike[str], *, flags: int = 0) -> int:
    """Return a descriptor of a regular file for reading; never waits for one that is none.

    Args:
        path: of the file; links are followed.
        flags: further ones, such as ``O_DIRECT``.

    Raises:
        StorageError: it is no regular file.
        OSError: it cannot be opened.
    """
    name = os.fsdecode(path)
    if "\0" in name:
        raise StorageError(f"{ascii(name)[:200]} is no path; write it without the NUL character")
    # Opening a pipe waits for its writer, unless it is told not to.
    descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | flags)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise StorageError(f"{name} is {_kind(mode)}, not a regular file; give the file itself")
    return descriptor


def open_lock(path: str | os.PathLike[str]) -> int:
    """Return a descriptor of a file to lock and to write to, which is made where it is missing.

    Raises:
        StorageError: a link or something else than a regular file is in its place.
        OSError: it cannot be opened.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise StorageError(
                f"{_shown(path)} is a link, not a regular file; remove it"
            ) from error
        raise
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise StorageError(f"{_shown(path)} is {_kind(mode)}, not a regular file; remove it")
    return descriptor


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold an advisory lock on ``path`` against other processes.

    Where the folder cannot be written to, as one that a container image brings, there is nothing to guard: whoever
    finds what it needs reads it, and whoever has to write is told by that.

    Raises:
        StorageError: the lock cannot be made.
    """
    file: int | None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open_lock(path)
    except OSError as error:
        if error.errno not in _NOT_OURS or not path.parent.is_dir():
            raise StorageError(
                f"cannot write in {path.parent}: {error.strerror or error}; pass another cache_dir="
            ) from error
        file = _lock_of_others(path)
    try:
        if file is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        if file is not None:
            os.close(file)


def _lock_of_others(path: Path) -> int | None:
    """Return a lock's file for reading, by which it can be held as well; ``None`` where there is none."""
    try:
        return open_regular(path, flags=os.O_NOFOLLOW)
    except OSError:
        return None


def read_regular(path: str | os.PathLike[str], *, max_bytes: int) -> bytes:
    """Return the content of a regular file.

    Raises:
        FormatError: it has more than ``max_bytes``.
        StorageError: it cannot be read, or is no regular file.
    """
    try:
        with open(open_regular(path), "rb") as stream:
            size_bytes = os.fstat(stream.fileno()).st_size
            if size_bytes <= max_bytes:
                raw = stream.read(size_bytes)
    except OSError as error:
        raise StorageError(f"cannot read {_shown(path)}: {error.strerror or error}") from error
    if size_bytes > max_bytes:
        raise FormatError(
            f"{_shown(path)} has {size_bytes} bytes, a file of its kind at most {max_bytes}; write it again"
        )
    return raw


def is_file(path: str | os.PathLike[str]) -> bool:
    """Return whether there is a regular file; False for a path that cannot be one, such as a too long one."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Return whether there is a folder; False for a path that cannot be one."""
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def _shown(path: str | os.PathLike[str]) -> str:
    name = os.fsdecode(path)
    return name if len(name) <= 1000 else f"{name[:1000]}..."


def _kind(mode: int) -> str:
    kinds = {
        stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
    }  # fmt: skip
    return kinds.get(stat.S_IFMT(mode), "something else")


def exchange(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> bool:
    """Have two paths swap what they name, at once; return ``False`` where the file system cannot, and nothing is done.

    Raises:
        OSError: one of them is not there, or may not be renamed.
    """
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL):
        return False
    raise OSError(code, os.strerror(code), os.fsdecode(one))


def umask() -> int:
    """Return what this process leaves out of the permissions of new files."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def identity_of(path: str | os.PathLike[str]) -> list[int]:
    """Return numbers that a file has no more once it is written to or replaced; raises ``OSError``."""
    of = os.stat(path)
    return [of.st_dev, of.st_ino, of.st_size, of.st_mtime_ns, of.st_ctime_ns]


def boot_id() -> str:
    """Return what this boot of the machine is called, as far as it says: what disks hold may be lost at the next."""
    return _BOOT.read_text(encoding="ascii").strip() if _BOOT.exists() else ""
