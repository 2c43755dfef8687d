"""The weight store: tensors that have no file of their own, spilled once under the hash of their content.

Processes share it: a file is written under a temporary name and renamed, so that it is there whole or
not at all, and two that write the same content meet at the same name. One that no longer holds it is written again.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from gascompile.core.content import content_of
from gascompile.core.errors import StorageError
from gascompile.core.files import exclusive
from gascompile.core.side_by_side import in_order
from gascompile.core.sizes import format_size
from gascompile.core.sources import Extent
from gascompile.weights.checkpoint import Checkpoint, open_checkpoint
from gascompile.weights.store_check import Advance, Hash, is_whole, note_whole

STORE = "store"
"""Name of the store's folder in a cache."""


PIECE_BYTES = 32 << 20
"""Hashed at once by one thread. Digests depend on it."""

_Take = Callable[[Hash], None]
"""Has a hash take in some bytes."""
_Part = tuple[int, Callable[[int, int], _Take]]
"""How many bytes there are, and what takes in those of a range of them."""


def content_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return a hash of names, dtypes, shapes and bytes.

    The bytes, in the order of names, are cut into pieces of a fixed size, each of which has a hash of its own, so that
    several threads share the work. Of tensors that are not contiguous, copies are made as their turn comes.
    """
    names = sorted(tensors)
    heads = [(name, str(tensors[name].dtype), tensors[name].shape) for name in names]
    return _digest(heads, (_tensor_part(tensors[name]) for name in names), lambda size_bytes: None)


def file_digest(path: Path, advance: Advance) -> str:
    """Return ``content_digest`` of the tensors in a safetensors file.

    Raises:
        CheckpointError: it is none.
        EOFError: it ends early.
        OSError: it cannot be read.
    """
    sources = sorted(open_checkpoint(path).sources.items())
    heads = [(name, f"torch.{source.dtype}", source.shape) for name, source in sources]
    parts = (_file_part(extent) for _, source in sources for extent in source.extents)
    return _digest(heads, parts, advance)


def _digest(
    heads: Sequence[tuple[str, str, Sequence[int]]], parts: Iterable[_Part], advance: Advance
) -> str:
    # Sizes follow from dtypes and shapes, so no two contents have the same head and the same pieces.
    state = Hash()
    state.add(json.dumps([PIECE_BYTES, [[n, dtype, list(shape)] for n, dtype, shape in heads]]))

    def take(hashed: tuple[str, int]) -> None:
        text, size_bytes = hashed
        state.add(text)
        advance(size_bytes)

    in_order((partial(_hashed, *piece) for piece in _pieces(parts)), take)
    return state.text()


def _hashed(takes: Sequence[_Take], size_bytes: int) -> tuple[str, int]:
    state = Hash()
    for take in takes:
        take(state)
    return state.text(), size_bytes


def _pieces(parts: Iterable[_Part]) -> Iterator[tuple[list[_Take], int]]:
    """Cut what follows each other into pieces of ``PIECE_BYTES``; the last one has what is left."""
    takes: list[_Take] = []
    filled_bytes = 0
    for size_bytes, cut in parts:
        begin = 0
        while begin < size_bytes:
            end = min(size_bytes, begin + PIECE_BYTES - filled_bytes)
            takes.append(cut(begin, end))
            filled_bytes += end - begin
            begin = end
            if filled_bytes == PIECE_BYTES:
                yield takes, filled_bytes
                takes, filled_bytes = [], 0
    if takes:
        yield takes, filled_bytes


def _tensor_part(tensor: torch.Tensor) -> _Part:
    content = content_of(tensor)

    def cut(begin: int, end: int) -> _Take:
        return lambda state: state.add(content[begin:end])

    return len(content), cut


def _file_part(extent: Extent) -> _Part:
    def cut(begin: int, end: int) -> _Take:
        # Told of whole pieces, by the caller's thread: a bar has locks.
        return lambda state: state.add_file(
            extent.path, extent.offset + begin, end - begin, lambda size_bytes: None
        )

    return extent.size_bytes, cut


def is_spilled(path: Path) -> bool:
    """Return whether ``path`` is a file of a weight store."""
    return (
        path.parent.name == STORE
        and re.fullmatch(r"[0-9a-f]{40}\.safetensors", path.name) is not None
    )


def spill(tensors: Mapping[str, torch.Tensor], store: Path) -> Checkpoint:
    """Write ``tensors`` into ``store`` unless the same content is there, and return where they lie.

    Raises:
        StorageError: the disk is too full, which is found before writing, or cannot be written.
    """
    digest = content_digest(tensors)
    target = store / f"{digest}.safetensors"
    with exclusive(store / ".lock"):
        if not is_whole(target, lambda advance: file_digest(target, advance) == digest):
            _write(tensors, target)
            note_whole(target)
    return open_checkpoint(target)


def _write(tensors: Mapping[str, torch.Tensor], target: Path) -> None:
    needed_bytes = sum(t.numel() * t.element_size() for t in tensors.values()) + (1 << 20)
    with writing(target, needed_bytes, "the weights") as temporary:
        save_file(_unshared(tensors), temporary)
        with temporary.open("rb+") as stream:
            os.fsync(stream.fileno())


@contextlib.contextmanager
def writing(target: Path, needed_bytes: int, what: str) -> Iterator[Path]:
    """Let a file be written, which takes the place of ``target`` once it is whole.

    Raises:
        StorageError: there is no room for it, or it cannot be written.
    """
    free_bytes = shutil.disk_usage(target.parent).free
    if free_bytes < needed_bytes:
        raise StorageError(
            f"{what} need {format_size(needed_bytes)} in {target.parent}, {format_size(free_bytes)} are free; "
            "free space or pass cache_dir= on another drive"
        )
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        yield temporary
        temporary.replace(target)
    except (OSError, SafetensorError) as error:
        full = getattr(error, "errno", None) == errno.ENOSPC or "No space" in str(error)
        reason = "the disk is full" if full else getattr(error, "strerror", None) or str(error)
        raise StorageError(
            f"cannot write {target}: {reason}; free space or pass cache_dir= on another drive"
        ) from error
    finally:
        with contextlib.suppress(OSError):  # where nothing can be written there is none
            temporary.unlink(missing_ok=True)


def _unshared(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return contiguous tensors of which no two share memory, as the file format wants them."""
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        whole = tensor.detach().contiguous()
        size_bytes = whole.numel() * whole.element_size()
        if whole.data_ptr() in seen or whole.untyped_storage().nbytes() != size_bytes:
            whole = whole.clone()
        seen.add(whole.data_ptr())
        result[name] = whole
    return result
