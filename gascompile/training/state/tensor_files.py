"""Safetensors files written and read a range at a time, so that no more than one tensor is in memory."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from gascompile.core.errors import CheckpointError
from gascompile.core.sources import WeightSource
from gascompile.runtime.memory.persistent import Persistent
from gascompile.runtime.transfer.copying import write_all
from gascompile.weights.checkpoint import file_dtype, read_safetensors_header

_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One tensor of a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[str, ...] = ()
    """Persistent tensors whose bytes it is made of, in their order."""
    made: Callable[[], torch.Tensor] | None = None
    """Its value, where it is not made of parts."""
    assign: Callable[[torch.Tensor], object] | None = None
    """Takes its value, where it is not made of parts."""

    @property
    def size_bytes(self) -> int:
        """Bytes in the file."""
        count = 1
        for dim in self.shape:
            count *= dim
        return count * self.dtype.itemsize


def write_tensors(
    path: Path, entries: Mapping[str, Entry], persistent: Persistent, files: dict[str, int]
) -> None:
    """Write a new safetensors file, which the caller has to have on the drive.

    Args:
        path: of the file.
        entries: its tensors, in their order.
        persistent: where their parts are.
        files: descriptors by name; that of the file is put there first, and is the caller's.

    Raises:
        OSError: the file cannot be written; what has been written of it stays.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, entry in entries.items():
        begin, end = end, end + entry.size_bytes
        dtype = file_dtype(str(entry.dtype).removeprefix("torch."))
        header[name] = {"dtype": dtype, "shape": list(entry.shape), "data_offsets": [begin, end]}
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    files[path.name] = file
    at = 8 + len(raw)
    os.posix_fallocate(file, 0, at + end)
    write_all(file, struct.pack("<Q", len(raw)) + raw, 0)
    for entry in entries.values():
        _write(file, at, entry, persistent)
        at += entry.size_bytes


def _write(file: int, at: int, entry: Entry, persistent: Persistent) -> None:
    if entry.made is not None:
        value = entry.made().detach().contiguous()
        write_all(file, _bytes_of(value), at)
    for name in entry.parts:
        if not persistent.copy_to(name, file, at):
            write_all(file, _bytes_of(persistent.tensors[name]), at)
        at += persistent.sizes[name]


def read_tensors(path: Path, entries: Mapping[str, Entry], persistent: Persistent) -> None:
    """Give tensors the values of a file that has them all: see ``check_tensors``.

    Raises:
        CheckpointError: the file cannot be read.
        StorageError: a value cannot be kept.
    """
    sources, _ = read_safetensors_header(path)
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for name, entry in entries.items():
            at = sources[name].extents[0].offset if sources[name].extents else 0
            if entry.assign is not None:
                value = torch.empty(entry.shape, dtype=entry.dtype)
                _read_into(file, at, value)
                entry.assign(value)
            for part in entry.parts:
                persistent.fill(part, _reader(file, at))
                at += persistent.sizes[part]
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    finally:
        os.close(file)


def _reader(file: int, at: int) -> Callable[[torch.Tensor], None]:
    return lambda tensor: _read_into(file, at, tensor)


def check_tensors(
    path: Path, sources: Mapping[str, WeightSource], entries: Mapping[str, Entry]
) -> None:
    """Refuse a file whose tensors are not these.

    Raises:
        CheckpointError: names the keys.
    """
    missing, extra = sorted(set(entries) - set(sources)), sorted(set(sources) - set(entries))
    if missing or extra:
        raise CheckpointError(
            f"{path} is of another run: it lacks {missing[:3]} ({len(missing)} in all) and has "
            f"{extra[:3]} ({len(extra)} in all) that this model and optimizer do not"
        )
    for name, entry in entries.items():
        found = (sources[name].dtype, sources[name].shape)
        wanted = (str(entry.dtype).removeprefix("torch."), entry.shape)
        if found != wanted:
            raise CheckpointError(
                f"{path} is of another run: '{name}' is {found[0]} {list(found[1])} there and "
                f"{wanted[0]} {list(wanted[1])} here"
            )


def _read_into(file: int, at: int, tensor: torch.Tensor) -> None:
    target = _bytes_of(tensor)
    done = 0
    while done < len(target):
        got = os.preadv(file, [target[done : done + _CHUNK_BYTES]], at + done)
        if got <= 0:
            raise OSError(errno.EIO, "the file ends before the tensor does")
        done += got


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's bytes, which do not keep it alive."""
    size_bytes = tensor.numel() * tensor.element_size()
    array = (ctypes.c_char * size_bytes).from_address(tensor.data_ptr())
    return memoryview(array).cast("B")


def is_plain(tensor: torch.Tensor, size_bytes: int) -> bool:
    """Return whether a tensor's memory is its elements in the order of a file and nothing else."""
    whole = tensor.numel() * tensor.element_size() == size_bytes
    return whole and tensor.is_contiguous() and tensor.storage_offset() == 0


def made_of(persistent: Persistent, name: str) -> Entry:
    """Return the entry of one persistent tensor."""
    tensor = persistent.tensors[name]
    if is_plain(tensor, persistent.sizes[name]):
        return Entry(dtype=tensor.dtype, shape=tuple(tensor.shape), parts=(name,))
    return Entry(
        dtype=tensor.dtype,
        shape=tuple(tensor.shape),
        made=lambda: persistent.value(name),
        assign=lambda value: persistent.assign(name, value),
    )


def of_tensor(tensor: torch.Tensor) -> Entry:
    """Return the entry of a tensor that does not move."""
    return Entry(
        dtype=tensor.dtype,
        shape=tuple(tensor.shape),
        made=lambda: tensor,
        assign=tensor.detach().copy_,
    )


def joined(shape: Sequence[int], parts: Sequence[str]) -> Entry:
    """Return the entry of a float32 tensor whose elements lie in several persistent ones."""
    return Entry(dtype=torch.float32, shape=tuple(shape), parts=tuple(parts))
