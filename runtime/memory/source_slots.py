"""Source slots: values that lie in files of somebody else, which are read in place and never written.

A value comes from here until it changes; from then on it has a slot of its own. Files that were written to, or
that are gone, are found before and after what is read from them is used.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Mapping

from gascompile.core.errors import StorageError
from gascompile.core.sizes import PAGE_BYTES
from gascompile.core.sources import FileStamp, WeightSource
from gascompile.runtime.transfer.copying import copy_range
from gascompile.runtime.transfer.files import SourceFile, SourceFiles

Pieces = tuple[tuple[int, int, int], ...]
"""Open file, offset and bytes of each range of a value, in its order."""
_COMPARED_BYTES = 1 << 20
"""Of a value and of its file, at a time."""


class SourceSlots:
    """Where values lie that nobody has changed yet. Close it when they are not needed any more."""

    def __init__(self, sources: Mapping[str, WeightSource], stamps: Iterable[FileStamp]) -> None:
        """Open the files.

        Args:
            sources: by name, each with at least one byte.
            stamps: of files among which those of ``sources`` are.

        Raises:
            StorageError: a file is missing, or is not the one its stamp describes.
        """
        self._sources = dict(sources)
        paths = self._paths()
        self._files = SourceFiles(paths, [stamp for stamp in stamps if stamp.path in paths])
        for path in paths:
            _try_direct(self._files, self._files[path])

    def __contains__(self, name: object) -> bool:
        """Return whether a value comes from here."""
        return name in self._sources

    def pieces(self, name: str) -> Pieces:
        """Return the ranges of a value, for reads of whole pages where the file system takes them."""
        return tuple(
            (file.direct if file.is_direct else file.buffered, extent.offset, extent.size_bytes)
            for extent in self._sources[name].extents
            for file in (self._files[extent.path],)
        )

    def leave(self, name: str) -> None:
        """Let a value come from elsewhere; files that no other is in are closed."""
        source = self._sources.pop(name)
        used = self._paths()
        for extent in source.extents:
            if extent.path not in used:
                self._files.drop(extent.path)

    def require_there(self) -> None:
        """Refuse files that were changed, replaced or removed; before anything is read from them.

        Raises:
            StorageError: names the file.
        """
        self._files.check()

    def require_unchanged(self) -> None:
        """Refuse files that were written to, after what was read from them; their names may be gone by now.

        Raises:
            StorageError: names the file.
        """
        self._files.recheck()

    @property
    def is_unchanged(self) -> bool:
        """Whether ``require_unchanged`` would raise nothing."""
        try:
            self.require_unchanged()
        except StorageError:
            return False
        return True

    def copy_to(self, name: str, target: int, offset: int) -> None:
        """Copy a value to the open file ``target``, by the file system where it can.

        Raises:
            OSError: a file cannot be read or written.
        """
        for extent in self._sources[name].extents:
            file = self._files[extent.path].buffered
            copy_range(file, extent.offset, target, offset, extent.size_bytes)
            offset += extent.size_bytes

    def holds(self, name: str, value: memoryview) -> bool:
        """Return whether a value is this one, byte for byte; False where a file was written to."""
        for extent in self._sources[name].extents:
            file = self._files[extent.path].buffered
            for begin in range(0, extent.size_bytes, _COMPARED_BYTES):
                count = min(_COMPARED_BYTES, extent.size_bytes - begin)
                if os.pread(file, count, extent.offset + begin) != value[begin : begin + count]:
                    return False
            value = value[extent.size_bytes :]
        return self.is_unchanged

    def close(self) -> None:
        """Close the files; idempotent."""
        self._sources.clear()
        self._files.close()

    def _paths(self) -> frozenset[str]:
        return frozenset(e.path for source in self._sources.values() for e in source.extents)


def _try_direct(files: SourceFiles, file: SourceFile) -> None:
    """Read the first page of a file directly: some file systems open what they cannot read so."""
    if file.is_direct:
        with mmap.mmap(-1, PAGE_BYTES) as page:
            try:
                os.preadv(file.direct, [page], 0)
            except OSError as error:
                files.refuse_direct(file, error.strerror or str(error))
