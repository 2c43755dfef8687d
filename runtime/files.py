"""Weight files, opened once: a descriptor for direct reads, one for the page cache, and who the file was."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterable

from gascompile.errors import StorageError
from gascompile.ir import FileStamp, IoSettings, WeightSource
from gascompile.runtime.landing import Landing, plan_landing
from gascompile.units import PAGE_BYTES

_LOG = logging.getLogger(__name__)

_Identity = tuple[int, int, int, int]


def _identity(stat: os.stat_result) -> _Identity:
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


class SourceFile:
    """One open file; ``is_direct`` says whether O_DIRECT works on it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.direct = -1
        try:
            self.buffered = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise StorageError(
                f"cannot open the weight file {path}: {error.strerror}; "
                "put it back where it was when the model was compiled, or compile again"
            ) from error
        self.identity = _identity(os.fstat(self.buffered))
        self.refusal = "this system has no O_DIRECT"
        flag = getattr(os, "O_DIRECT", 0)
        if flag:
            try:
                self.direct = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flag)
            except OSError as error:
                self.refusal = error.strerror or str(error)
        self.is_direct = self.direct >= 0

    def close(self) -> None:
        """Close the descriptors."""
        for descriptor in (self.buffered, self.direct):
            if descriptor >= 0:
                with contextlib.suppress(OSError):
                    os.close(descriptor)


class SourceFiles:
    """All files a session reads; knows when one of them is no longer the file that was planned on."""

    def __init__(self, paths: Iterable[str], stamps: Iterable[FileStamp] = ()) -> None:
        """Open the files and compare them with ``stamps``.

        Raises:
            StorageError: a file is missing or is not the one its stamp describes.
        """
        self._files: dict[str, SourceFile] = {}
        self._warned: set[int] = set()
        self._warn_lock = threading.Lock()
        self._stamps = {stamp.path: stamp for stamp in stamps}
        try:
            for path in dict.fromkeys([*paths, *self._stamps]):
                file = self._files[path] = SourceFile(path)
                if not file.is_direct:
                    self._warn(file, f"the file system refuses direct reads: {file.refusal}")
            self.check()
        except BaseException:
            self.close()
            raise

    def __getitem__(self, path: str) -> SourceFile:
        return self._files[path]

    @property
    def devices(self) -> dict[str, int]:
        """The number of the device that each file is on, by path."""
        return {path: file.identity[0] for path, file in self._files.items()}

    def is_direct(self, path: str) -> bool:
        """Return whether the file is read with O_DIRECT."""
        return self._files[path].is_direct

    def refuse_direct(self, file: SourceFile, reason: str) -> None:
        """Read ``file`` through the page cache from now on."""
        # The descriptor stays open: another thread may be about to read from it.
        file.is_direct = False
        self._warn(file, f"the file system refuses direct reads: {reason}")

    def landing(self, source: WeightSource, io: IoSettings) -> Landing:
        """Return the reads that bring ``source``; logs what of it goes through the page cache."""
        landing = plan_landing(source, chunk_bytes=io.chunk_bytes, is_direct=self.is_direct)
        for piece in landing.pieces:
            # The odd bytes where two extents meet are less than a page and cost nothing.
            if not piece.direct and piece.size_bytes >= PAGE_BYTES and self.is_direct(piece.path):
                self.expect_page_cache(piece.path, source.name)
        return landing

    def expect_page_cache(self, path: str, tensor: str) -> None:
        """Warn that ``tensor`` cannot be read directly, for how it lies in its file."""
        self._warn(self._files[path], f"'{tensor}' is not aligned or is in pieces")

    def _warn(self, file: SourceFile, reason: str) -> None:
        device = file.identity[0]
        with self._warn_lock:
            known = device in self._warned
            self._warned.add(device)
        if not known:
            _LOG.warning(
                "weights in %s are read through the page cache, which is slower (%s)",
                file.path,
                reason,
            )

    def check(self) -> None:
        """Compare every file, by descriptor and by path, with what was planned on and opened.

        Raises:
            StorageError: a file was changed, replaced or removed.
        """
        for path, file in self._files.items():
            stamp = self._stamps.get(path)
            opened = os.fstat(file.buffered)
            if stamp and (opened.st_size, opened.st_mtime_ns) != (
                stamp.size_bytes,
                stamp.mtime_ns,
            ):
                raise StorageError(
                    f"the weight file {path} has changed since the model was compiled: {stamp.size_bytes} bytes "
                    f"then, {opened.st_size} bytes now (modified at {stamp.mtime_ns} ns then, {opened.st_mtime_ns} "
                    "ns now); compile again"
                )
            try:
                named = os.stat(path)
            except OSError as error:
                raise StorageError(
                    f"the weight file {path} is gone: {error.strerror}; put it back or compile again"
                ) from error
            if _identity(opened) != file.identity or _identity(named) != file.identity:
                raise StorageError(
                    f"the weight file {path} was changed or replaced while it was in use; compile again"
                )

    def close(self) -> None:
        """Close every file; idempotent."""
        files, self._files = self._files, {}
        for file in files.values():
            file.close()
