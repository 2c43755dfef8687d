"""Weight sources: in which bytes of which files the values of a weight lie."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from gascompile.core.serial import json_name


@dataclass(frozen=True, slots=True, kw_only=True)
class FileStamp:
    """Identity of a file when it was planned on; a changed file is refused."""

    path: str
    size_bytes: int = field(metadata=json_name("bytes"))
    mtime_ns: int
    digest: str = ""
    """BLAKE2b of the content where it was computed (bundles), else of what says where its tensors lie."""

    @classmethod
    def of(cls, path: str, stat: os.stat_result, digest: str) -> FileStamp:
        """Return the stamp of a file that was found so."""
        return cls(path=path, size_bytes=stat.st_size, mtime_ns=stat.st_mtime_ns, digest=digest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """A run of bytes in a file."""

    path: str
    offset: int
    size_bytes: int = field(metadata=json_name("bytes"))


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSource:
    """The bytes of one weight: extents that follow each other in memory."""

    name: str
    dtype: str
    """torch's name without the ``torch.`` prefix; or a packed form, of which the shape is that of the values."""
    shape: tuple[int, ...]
    extents: tuple[Extent, ...]
    stride: tuple[int, ...] = ()
    """Strides of the tensor whose first to last element the bytes are; empty for a contiguous one."""
    interleaved_heads: int = 0
    """Of so many heads the rows lie pair by pair, one of each half of the head, as llama.cpp keeps what rotary
    positions turn; 0 where rows are in order. Whoever reads values has to bring them in order, or refuse."""

    @property
    def size_bytes(self) -> int:
        """Total bytes of the weight."""
        return sum(extent.size_bytes for extent in self.extents)
