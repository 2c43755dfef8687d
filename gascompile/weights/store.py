"""The weight store: tensors that have no file of their own, spilled once under the hash of their content.

Processes share it: a file is written under a temporary name and renamed, so that it is there whole or
not at all, and two that write the same content meet at the same name. One that no longer holds it is written again.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from gascompile.core.errors import StorageError
from gascompile.core.files import exclusive
from gascompile.core.sizes import format_size
from gascompile.weights.checkpoint import Checkpoint, open_checkpoint
from gascompile.weights.store_check import Advance, Hash, is_whole, note_whole

STORE = "store"
"""Name of the store's folder in a cache."""


def content_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return a hash of names, dtypes, shapes and bytes."""
    state = Hash()
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        state.add(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|")
        state.add(_flat_bytes(tensor).numpy().data)
    return state.text()


def file_digest(path: Path, advance: Advance) -> str:
    """Return ``content_digest`` of the tensors in a safetensors file.

    Raises:
        CheckpointError: it is none.
        OSError: it cannot be read.
    """
    state = Hash()
    for name, source in sorted(open_checkpoint(path).sources.items()):
        state.add(f"{name}|torch.{source.dtype}|{source.shape}|")
        for extent in source.extents:
            state.add_file(extent.path, extent.offset, extent.size_bytes, advance)
    return state.text()


def is_spilled(path: Path) -> bool:
    """Return whether ``path`` is a file of a weight store."""
    return (
        path.parent.name == STORE
        and re.fullmatch(r"[0-9a-f]{40}\.safetensors", path.name) is not None
    )


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


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
