"""Weight files, opened once: a descriptor for direct reads, one for the page cache, and who the file was.

Whoever writes to a file moves its times, so a file whose times stand as they did has the bytes that it had.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import time
from collections.abc import Iterable

from gascompile.core.errors import StorageError
from gascompile.core.files import open_regular
from gascompile.core.machine import IoSettings
from gascompile.core.sizes import PAGE_BYTES
from gascompile.core.sources import FileStamp, WeightSource
from gascompile.runtime.transfer.read_plan import Landing, plan_landing

_LOG = logging.getLogger(__name__)

_TICK_S = 0.01
"""Of the coarsest clock that file systems take times from; two writes within one may leave the same."""


def _is_same(was: os.stat_result, now: os.stat_result) -> bool:
    """Return whether a file is the one it was, with the content that it had.

    ``ctime`` moves with every write, also where the writer puts ``mtime`` back; and with a new link or other rights.
    """
    if (
        now.st_mtime_ns != was.st_mtime_ns
        or now.st_size != was.st_size
        or now.st_ino != was.st_ino
        or now.st_dev != was.st_dev
    ):
        return False
    return now.st_ctime_ns == was.st_ctime_ns or (
        (was.st_nlink, was.st_mode, was.st_uid, was.st_gid)
        != (now.st_nlink, now.st_mode, now.st_uid, now.st_gid)
    )


class SourceFile:
    """One open file; ``is_direct`` says whether O_DIRECT works on it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.direct = -1
        try:
            self.buffered = open_regular(path)
        except OSError as error:
            raise StorageError(
                f"cannot open the weight file {path}: {error.strerror}; "
                "put it back where it was when the model was compiled, or compile again"
            ) from error
        stat = os.fstat(self.buffered)
        age_s = time.time() - max(stat.st_mtime, stat.st_ctime)
        if age_s < _TICK_S:
            # Later writes then have a later time, by which they are seen.
            time.sleep(min(_TICK_S - age_s, _TICK_S))
            stat = os.fstat(self.buffered)
        self._stat = stat
        self.device = stat.st_dev
        self.refusal = "this system has no O_DIRECT"
        flag = getattr(os, "O_DIRECT", 0)
        if flag:
            try:
                self.direct = open_regular(path, flags=flag)
            except OSError as error:
                self.refusal = error.strerror or str(error)
        self.is_direct = self.direct >= 0

    def require_unchanged(self, now: os.stat_result) -> None:
        """Raise ``StorageError`` where the file is another one or may have another content than when it was opened."""
        if not _is_same(self._stat, now):
            raise StorageError(
                f"the weight file {self.path} was changed or replaced while it was in use; compile again"
            )
        self._stat = now

    def close(self) -> None:
        """Close the descriptors; each is tried once, as its number may soon be another file's."""
        descriptors, self.buffered, self.direct = (self.buffered, self.direct), -1, -1
        for descriptor in descriptors:
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
        self._warned: dict[int, object] = {}
        self._unsaid: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
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
        return {path: file.device for path, file in self._files.items()}

    def is_direct(self, path: str) -> bool:
        """Return whether the file is read with O_DIRECT."""
        return self._files[path].is_direct

    def refuse_direct(self, file: SourceFile, reason: str) -> None:
        """Read ``file`` through the page cache from now on."""
        # The descriptor stays open: another thread may be about to read from it.
        file.is_direct = False
        # A reading thread says nothing: an interrupt may have left the locks of logging with the main thread.
        self._note(file, f"the file system refuses direct reads: {reason}")

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
        self._note(file, reason)
        self._say()

    def _note(self, file: SourceFile, reason: str) -> None:
        mine = object()
        if self._warned.setdefault(file.device, mine) is mine:
            self._unsaid.put((file.path, reason))

    def _say(self) -> None:
        while not self._unsaid.empty():
            _LOG.warning(
                "weights in %s are read through the page cache, which is slower (%s)",
                *self._unsaid.get(),
            )

    def check(self) -> None:
        """Compare every file, by descriptor and by path, with what was planned on and opened.

        Raises:
            StorageError: a file was changed, replaced or removed.
        """
        self._say()
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
            file.require_unchanged(opened)
            file.require_unchanged(named)

    def recheck(self) -> None:
        """Compare every file with what ``check`` has found: whoever has read from it since has read that.

        A file that another has taken the name of counts as unchanged: the descriptors are of the first.

        Raises:
            StorageError: a file was written to.
        """
        for file in self._files.values():
            file.require_unchanged(os.fstat(file.buffered))

    def drop(self, path: str) -> None:
        """Close a file that nobody reads any more, if it is open; it may change from now on."""
        self._stamps.pop(path, None)
        if path in self._files:
            self._files.pop(path).close()

    def close(self) -> None:
        """Close every file; idempotent, and to be repeated if interrupted."""
        self._say()
        while self._files:
            self._files.popitem()[1].close()
