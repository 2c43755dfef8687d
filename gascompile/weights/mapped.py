"""Mapped: which tensors in memory are files that the process has mapped, so that they need no copy of their own.

Libraries map safetensors files privately, page by page as they are read: a model that was just loaded is its files. A
page that somebody has written to is a copy in memory, which the kernel tells from one of the file.
"""

from __future__ import annotations

import mmap
import os
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from gascompile.core.errors import CheckpointError
from gascompile.core.sources import Extent, FileStamp, WeightSource
from gascompile.weights.checkpoint import Checkpoint, read_safetensors_header

_MAPS, _PAGE_FLAGS = "/proc/self/maps", "/proc/self/pagemap"
_SUFFIX = ".safetensors"
_PAGE_BYTES = mmap.PAGESIZE
_PRESENT, _SWAPPED, _OF_FILE = (np.uint64(1 << bit) for bit in (63, 62, 61))
"""Flags of a page in ``/proc/self/pagemap``, which a process may read of itself; a page never touched has none."""
_MOST_PAGES = 1 << 20
"""Whose flags are looked at in one go."""


@dataclass(frozen=True, slots=True)
class _Map:
    """A part of a file that is mapped privately."""

    begin: int
    end: int
    offset: int
    device: int
    inode: int
    path: Path


def mapped_weights(tensors: Mapping[str, torch.Tensor]) -> Checkpoint:
    """Return where in safetensors files those of ``tensors`` lie that are nothing but such files, mapped.

    What is not proven is left out: other systems, tensors with gaps, pages that were written to, files that were
    replaced since.
    """
    maps = [mapping for mapping in _maps(_SUFFIX) if mapping.path.suffix == _SUFFIX]
    begins = [mapping.begin for mapping in maps]
    sources: dict[str, WeightSource] = {}
    stamps: dict[Path, FileStamp | None] = {}
    for name, tensor in tensors.items() if maps else ():
        size_bytes = tensor.nbytes
        if tensor.device.type != "cpu" or not tensor.is_contiguous() or not size_bytes:
            continue
        address = tensor.data_ptr()
        mapping = maps[max(bisect_right(begins, address) - 1, 0)]
        if not mapping.begin <= address <= address + size_bytes <= mapping.end:
            continue
        if mapping.path not in stamps:
            stamps[mapping.path] = _stamp(mapping)
        stamp = stamps[mapping.path]
        if stamp is None or not _is_unwritten(address, size_bytes):
            continue
        offset = mapping.offset + address - mapping.begin
        if offset + size_bytes > stamp.size_bytes:
            continue
        sources[name] = WeightSource(
            name=name,
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
            extents=(Extent(path=stamp.path, offset=offset, size_bytes=size_bytes),),
        )
    used = {source.extents[0].path for source in sources.values()}
    kept = {stamp.path: stamp for stamp in stamps.values() if stamp and stamp.path in used}
    return Checkpoint(sources=sources, stamps=tuple(kept.values()))


def file_ranges() -> list[tuple[int, int]]:
    """Return the begin and end of memory that lies in files, by address, whoever else sees what is written to it.

    Where a file is cut short, whoever reads its memory is ended by a signal.

    Raises:
        OSError: the system does not tell.
    """
    ranges = (fields[0].partition("-") for fields in _file_lines())
    return [(int(begin, 16), int(end, 16)) for begin, _, end in ranges]


def _file_lines(suffix: str = "") -> Iterator[list[str]]:
    """Yield the fields of lines whose paths end so: of thousands most are of libraries."""
    lines = Path(_MAPS).read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    for line in lines:
        if not line.endswith(suffix):
            continue
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith("/"):
            yield fields


def _maps(suffix: str) -> Iterator[_Map]:
    """Yield the private maps of files of such names, by address; none where the system does not tell."""
    try:
        lines = list(_file_lines(suffix))
    except OSError:
        return
    for fields in lines:
        if not fields[1].endswith("p"):
            continue
        begin, _, end = fields[0].partition("-")
        major, _, minor = fields[3].partition(":")
        yield _Map(
            begin=int(begin, 16),
            end=int(end, 16),
            offset=int(fields[2], 16),
            device=os.makedev(int(major, 16), int(minor, 16)),
            inode=int(fields[4]),
            path=Path(fields[5]),
        )


def _stamp(mapping: _Map) -> FileStamp | None:
    """Return the stamp of a mapped file; ``None`` where its path leads to another one, or to no safetensors file."""
    try:
        _, stamp = read_safetensors_header(mapping.path)
        # Afterwards: a file that takes the place of this one from now on is no longer the one of the stamp.
        stat = mapping.path.stat()
    except (OSError, CheckpointError):
        return None
    is_it = (stat.st_dev, stat.st_ino) == (mapping.device, mapping.inode)
    return stamp if is_it and stat.st_mtime_ns == stamp.mtime_ns else None


def _is_unwritten(address: int, size_bytes: int) -> bool:
    """Return whether no page of a private map has become a copy in memory."""
    first, last = address // _PAGE_BYTES, (address + size_bytes - 1) // _PAGE_BYTES
    try:
        file = os.open(_PAGE_FLAGS, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        for begin in range(first, last + 1, _MOST_PAGES):
            count = min(last + 1 - begin, _MOST_PAGES)
            raw = os.pread(file, 8 * count, 8 * begin)
            flags = np.frombuffer(raw, dtype=np.uint64)
            if len(flags) < count:
                return False
            in_memory = (flags & _PRESENT) != 0
            if ((flags & _SWAPPED) != 0).any() or (in_memory & ((flags & _OF_FILE) == 0)).any():
                return False
    except OSError:
        return False
    finally:
        os.close(file)
    return True
