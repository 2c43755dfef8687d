"""Safetensors files written and read a range at a time, so that no more than one tensor is in memory."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from gascompile.core.errors import CheckpointError, StorageError
from gascompile.runtime.memory.persistent import Persistent
from gascompile.runtime.transfer.copying import write_all
from gascompile.training.state.pieces import (
    PIECES,
    Files,
    Numbers,
    Stored,
    boxes,
    named,
    table_text,
    tensor_bytes,
)
from gascompile.weights.checkpoint import file_dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """A persistent vector that has a range of a tensor's elements, of which other ranks have the others."""

    name: str
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One tensor of a checkpoint."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[str, ...] = ()
    """Persistent tensors whose bytes it is made of, in their order."""
    own: tuple[Own, ...] = ()
    """Where each rank has ranges of it: this one's, in its order of memory."""
    order: tuple[int, ...] = ()
    """Of what has ranges: its dimensions as memory has them, the slowest first; empty in order of rows."""
    owner: int | None = None
    """The rank that writes it, where that is not to be chosen. Others may have a copy, or nothing of it."""
    made: Callable[[], torch.Tensor] | None = None
    """Its value, where it is not made of parts."""
    assign: Callable[[torch.Tensor], object] | None = None
    """Takes its value, where it is not made of parts."""

    @property
    def is_kept(self) -> bool:
        """Return whether this rank has any of it."""
        return bool(self.own or self.parts) or self.assign is not None

    @property
    def size_bytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Bytes of a file that follow each other: a tensor, or boxes of one."""

    value: Entry
    keys: tuple[tuple[str, tuple[int, ...]], ...]
    """Names in the file and shapes, in order."""
    table: tuple[tuple[str, tuple[str, list[int], list[int]]], ...] = ()
    """What the metadata say of boxes."""


def whole_part(name: str, entry: Entry) -> Part:
    """Return the part that is all of a tensor."""
    return Part(value=entry, keys=((name, entry.shape),))


def own_parts(name: str, entry: Entry, persistent: Persistent) -> list[Part]:
    """Return what this rank has of a tensor of which each has ranges."""
    parts = []
    lies = tuple(entry.shape[dim] for dim in entry.order) or entry.shape
    for own in entry.own:
        if own.begin == own.end:
            continue
        every = boxes(lies, own.begin, own.end)
        if not entry.order:
            value = Entry(dtype=entry.dtype, shape=(own.end - own.begin,), parts=(own.name,))
            rows = [named(name, entry.shape, offsets) for offsets, _ in every]
            keys = tuple((key, sizes) for (key, _), (_, sizes) in zip(rows, every, strict=True))
            parts.append(Part(value=value, keys=keys, table=tuple(rows)))
            continue
        at = 0
        back = sorted(range(len(lies)), key=entry.order.__getitem__)
        for offsets, sizes in every:
            made = partial(_turned, persistent, own.name, at, sizes, back)
            at += math.prod(sizes)
            row = named(name, entry.shape, [offsets[dim] for dim in back])
            shape = tuple(sizes[dim] for dim in back)
            value = Entry(dtype=entry.dtype, shape=shape, made=made)
            parts.append(Part(value=value, keys=((row[0], shape),), table=(row,)))
    return parts


def _turned(
    persistent: Persistent, name: str, begin: int, sizes: Numbers, back: Sequence[int]
) -> torch.Tensor:
    """Return a box of a vector whose dimensions lie in another order than that of rows."""
    values = persistent.value(name)[begin : begin + math.prod(sizes)]
    return values.view(sizes).permute(*back)


def write_tensors(
    path: Path, parts: Sequence[Part], persistent: Persistent | None, files: dict[str, int]
) -> None:
    """Write a new safetensors file, which the caller has to have on the drive.

    Args:
        path: of the file.
        parts: what it has, in order.
        persistent: where values are that are not made.
        files: descriptors by name; that of the file is put there first, and is the caller's.

    Raises:
        OSError: the file cannot be written; what has been written of it stays.
    """
    metadata = {"format": "pt"}
    if table := dict(row for part in parts for row in part.table):
        metadata[PIECES] = table_text(table)
    header: dict[str, object] = {"__metadata__": metadata}
    end = 0
    for part in parts:
        dtype, size_bytes = part.value.dtype, part.value.dtype.itemsize
        for key, shape in part.keys:
            begin, end = end, end + math.prod(shape) * size_bytes
            kind = file_dtype(str(dtype).removeprefix("torch."))
            header[key] = {"dtype": kind, "shape": list(shape), "data_offsets": [begin, end]}
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    files[path.name] = file
    at = 8 + len(raw)
    os.posix_fallocate(file, 0, at + end)
    write_all(file, struct.pack("<Q", len(raw)) + raw, 0)
    for part in parts:
        _write(file, at, part.value, persistent)
        at += part.value.size_bytes


def _write(file: int, at: int, entry: Entry, persistent: Persistent | None) -> None:
    if entry.made is not None:
        value = entry.made().detach().contiguous()
        write_all(file, tensor_bytes(value), at)
    for name in entry.parts:
        assert persistent is not None, "parts are of its tensors"
        if not persistent.copy_to(name, file, at):
            write_all(file, tensor_bytes(persistent.tensors[name]), at)
        at += persistent.sizes[name]


def read_tensors(
    stored: Mapping[str, Stored], entries: Mapping[str, Entry], persistent: Persistent
) -> None:
    """Give tensors the values of a checkpoint that has them all: see ``check_tensors``.

    Raises:
        StorageError: a file cannot be read, or a value cannot be kept; some have others by then.
    """
    with Files() as files:
        for name, entry in entries.items():
            try:
                _read(files, stored[name], entry, persistent)
            except OSError as error:
                raise StorageError(
                    f"cannot read '{name}' of {stored[name].pieces[0].file}: {error.strerror or error}"
                ) from error


def _read(files: Files, stored: Stored, entry: Entry, persistent: Persistent) -> None:
    if entry.own and not entry.order:
        for own in entry.own:
            persistent.fill(own.name, partial(files.part, stored, own.begin))
        return
    if entry.assign is not None:
        value = torch.empty(entry.shape, dtype=entry.dtype)
        files.whole(stored, value)
        entry.assign(value)
    begin = 0
    for part in entry.parts:
        persistent.fill(part, partial(files.part, stored, begin // entry.dtype.itemsize))
        begin += persistent.sizes[part]


def check_tensors(path: Path, sources: Mapping[str, Stored], entries: Mapping[str, Entry]) -> None:
    """Refuse a checkpoint whose tensors are not these.

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
        stored = (sources[name].dtype, sources[name].shape)
        wanted = (str(entry.dtype).removeprefix("torch."), entry.shape)
        if stored != wanted:
            raise CheckpointError(
                f"{path} is of another run: '{name}' is {stored[0]} {list(stored[1])} there and "
                f"{wanted[0]} {list(wanted[1])} here"
            )


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
