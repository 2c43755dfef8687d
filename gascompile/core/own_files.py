"""Files of this user that nobody else can have written: the only ones whose content is run as machine code.

As ``ssh`` does with its keys: folder and file belong to the user that this process runs as, and neither its group
nor others may write to them. What is checked is the open file, and what is loaded are the bytes that were read from
it, so nothing can be put in its place in between.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import hashlib
import os
import shutil
import stat
import tempfile
import threading
import warnings
from pathlib import Path

from gascompile.core.errors import StorageError, UnsafeCacheWarning

_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_MAX_CODE_BYTES = 256 << 20  # of a file of machine code, which is read whole
_replaced: dict[Path, Path] = {}
_loaded: dict[str, ctypes.CDLL] = {}
_turn = threading.Lock()


def fault_of(status: os.stat_result) -> str:
    """Return why a file or folder may be another user's work; empty where it cannot be."""
    if status.st_uid != os.geteuid():
        return f"it belongs to user {status.st_uid}, this is user {os.geteuid()}"
    if status.st_mode & _WRITABLE_BY_OTHERS:
        return f"others may write to it (mode {stat.S_IMODE(status.st_mode):o})"
    return ""


def own_cache(folder: Path) -> Path:
    """Return the cache ``folder``, made for this user alone if it was not there.

    One that others could have written to is not used: a new one that ends with the process takes its place, and an
    ``UnsafeCacheWarning`` says so.
    """
    with contextlib.suppress(OSError):  # whoever writes into it says why it cannot be made
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    try:
        fault = fault_of(folder.stat())
    except (OSError, ValueError):
        return folder
    if not fault:
        return folder
    with _turn:
        if folder not in _replaced:
            _replaced[folder] = Path(tempfile.mkdtemp(prefix="gascompile-cache-"))
            atexit.register(shutil.rmtree, _replaced[folder], ignore_errors=True)
            warnings.warn(
                f"the cache {folder} is not used: {fault}. Plans and kernels are made anew in this process; make it "
                f"yours alone (chown, chmod 700 {folder}), or choose another cache_dir",
                UnsafeCacheWarning,
                stacklevel=2,
            )
        return _replaced[folder]


def is_own(path: Path) -> bool:
    """Return whether a file is there that only this user can have written."""
    try:
        os.close(open_own(path))
    except (OSError, StorageError):
        return False
    return True


def open_own(path: Path) -> int:
    """Return a descriptor of a file that only this user can have written.

    Raises:
        StorageError: it, or its folder, could be another's work; or it is no regular file.
        OSError: it cannot be opened.
    """
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _require_own(folder, path.parent)
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        descriptor = os.open(path.name, flags, dir_fd=folder)
    finally:
        os.close(folder)
    try:
        if not stat.S_ISREG(_require_own(descriptor, path).st_mode):
            raise StorageError(f"{path} is no regular file; remove it")
    except StorageError:
        os.close(descriptor)
        raise
    return descriptor


def read_own(path: Path) -> bytes:
    """Return the content of a file that only this user can have written; raises as ``open_own`` does."""
    with open(open_own(path), "rb") as stream:
        if os.fstat(stream.fileno()).st_size > _MAX_CODE_BYTES:
            raise StorageError(f"{path} is too large for a file of machine code; remove it")
        return stream.read(_MAX_CODE_BYTES)


def load_own(path: Path) -> ctypes.CDLL:
    """Load a shared library that only this user can have written. It is run.

    Raises:
        StorageError: it could be another's work.
        OSError: it is no shared library, or one that needs what is not here.
    """
    # The descriptor stays open, as the loader knows libraries by their path.
    descriptor = open_own(path)
    try:
        return ctypes.CDLL(f"/proc/self/fd/{descriptor}")
    except OSError as error:
        os.close(descriptor)
        raise OSError(f"{path} cannot be loaded: {error}") from error


def _require_own(descriptor: int, path: Path) -> os.stat_result:
    status = os.fstat(descriptor)
    if fault := fault_of(status):
        raise StorageError(
            f"{path} is not used: {fault}; make it yours alone (chown, chmod go-w), or remove it"
        )
    return status


def load_code(code: bytes) -> ctypes.CDLL:
    """Load a shared library into this process, once. The bytes are run: know where they are from.

    Raises:
        OSError: it is no shared library, or one that needs what is not here.
    """
    digest = hashlib.blake2b(code, digest_size=20).hexdigest()
    with _turn:
        if digest not in _loaded:
            # From memory: what was verified is what is run. The descriptor stays open, as the loader knows
            # libraries by their path and would take a later one of the same number for this.
            descriptor = os.memfd_create(digest)
            try:
                with open(descriptor, "wb", closefd=False) as stream:
                    stream.write(code)
                _loaded[digest] = ctypes.CDLL(f"/proc/self/fd/{descriptor}")
            except OSError:
                os.close(descriptor)
                raise
        return _loaded[digest]
