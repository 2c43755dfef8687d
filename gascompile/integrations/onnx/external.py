"""Weights of an ONNX file that is written: referenced where they lie, or copied in a stream into one file beside it.

External data of ONNX is any regular file below the model's folder, at any offset. So weights of safetensors files in
that folder need no copy. Nothing is loaded whole: copies go by blocks.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

import torch

from gascompile.core.errors import StorageError
from gascompile.core.files import is_file, open_regular, umask
from gascompile.core.sizes import align_up, format_size
from gascompile.core.sources import Extent, WeightSource
from gascompile.weights.onnx_file import DTYPES
from gascompile.weights.store import is_spilled

if TYPE_CHECKING:
    pass

_BLOCK_BYTES: Final = 16 << 20  # copied at once
_ALIGNMENT_BYTES: Final = 4096
"""Of each weight in a file of copies: a page, so that runtimes can map it."""
_ONNX_NAMES: Final = {name: onnx_name for onnx_name, (name, _) in DTYPES.items()}


def place_weights(
    sources: Mapping[str, WeightSource], folder: Path
) -> tuple[dict[str, Extent], list[str]]:
    """Return the extents of the weights that an ONNX file in ``folder`` can reference, and who has to be copied."""
    home = folder.resolve()
    in_place, others = {}, []
    for name, source in sources.items():
        extent = source.extents[0] if len(source.extents) == 1 and not source.stride else None
        itemsize = getattr(torch, source.dtype).itemsize
        if extent is not None and extent.offset % itemsize == 0 and _is_beside(extent.path, home):
            in_place[name] = extent
        else:
            others.append(name)
    return in_place, others


def _is_beside(path: str, home: Path) -> bool:
    """Return whether a file in ``home`` is the user's own, and what ONNX takes: no link, not even a hard one.

    Those in folders below are left alone: caches lie there, which are emptied.
    """
    whole = Path(os.path.abspath(path))
    if whole.is_symlink() or os.stat(whole).st_nlink != 1 or is_spilled(whole):
        return False
    return whole.resolve().parent == home


def require_space(needed_bytes: int, folder: Path) -> None:
    """Refuse to write more than there is room for; raises ``StorageError``."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes + (1 << 20):
        raise StorageError(
            f"the weights need {format_size(needed_bytes)} in {folder}, {format_size(free_bytes)} are free; free space "
            "or write the ONNX file beside the model's safetensors files, which are then used in place"
        )


@contextlib.contextmanager
def partial_file(target: Path) -> Iterator[tuple[BinaryIO, Path]]:
    """Open a file beside ``target`` that is renamed by whoever is done with it, and removed where nobody is.

    Raises:
        StorageError: it cannot be written.
    """
    temporary: Path | None = None
    if target.exists() and not is_file(target):
        raise StorageError(f"{target} is no regular file, which could be replaced; name a file")
    try:
        # Left by processes that were killed; one of a process that still runs would be of this very export.
        for left in target.parent.glob(f".{glob.escape(target.name)}.????????.partial"):
            left.unlink(missing_ok=True)
        descriptor, name = tempfile.mkstemp(".partial", f".{target.name}.", target.parent)
        temporary = Path(name)
        with os.fdopen(descriptor, "wb") as stream:
            temporary.chmod(0o666 & ~umask())  # mkstemp makes files for this user alone
            yield stream, temporary
    except OSError as error:
        reason = "the disk is full" if error.errno == errno.ENOSPC else error.strerror or error
        raise StorageError(
            f"cannot write {target}: {reason}; free space or choose another folder"
        ) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def copy_weight(source: WeightSource, stream: BinaryIO, advance: Callable[[int], None]) -> int:
    """Append a weight's values to a file and return where they begin.

    Raises:
        StorageError: the source cannot be read whole.
    """
    offset = _aligned(stream)
    if source.stride:
        stream.write(_in_order(source))
        advance(source.size_bytes)
        return offset
    for extent in source.extents:
        for block in _blocks(extent):
            stream.write(block)
            advance(len(block))
    return offset


def append(content: bytes, stream: BinaryIO) -> int:
    """Append bytes as those of a weight; return where they begin."""
    offset = _aligned(stream)
    stream.write(content)
    return offset


def _aligned(stream: BinaryIO) -> int:
    at = stream.tell()
    offset = align_up(at, _ALIGNMENT_BYTES)
    stream.write(bytes(offset - at))
    return offset


def _blocks(extent: Extent) -> Iterator[bytes]:
    with open(open_regular(extent.path), "rb") as source:
        source.seek(extent.offset)
        left_bytes = extent.size_bytes
        while left_bytes:
            block = source.read(min(left_bytes, _BLOCK_BYTES))
            if not block:
                raise StorageError(f"{extent.path} has become shorter; export the model again")
            left_bytes -= len(block)
            yield block


def _in_order(source: WeightSource) -> bytes:
    """Return the values of a weight that lies in another order than that of its dimensions."""
    raw = bytearray(b"".join(block for extent in source.extents for block in _blocks(extent)))
    flat = torch.frombuffer(raw, dtype=getattr(torch, source.dtype))
    whole = flat.as_strided(source.shape, source.stride).contiguous()
    return whole.view(-1).view(torch.uint8).numpy().tobytes()


def as_external(name: str, source: WeightSource, extent: Extent, folder: Path) -> Any:
    """Return the tensor of an initializer whose values lie in a file below ``folder``."""
    import onnx_ir

    dtype = onnx_ir.DataType[_ONNX_NAMES[source.dtype]]
    return onnx_ir.ExternalTensor(
        location=Path(extent.path).resolve().relative_to(folder.resolve()).as_posix(),
        offset=extent.offset,
        length=extent.size_bytes,
        dtype=dtype,
        shape=onnx_ir.Shape(source.shape),
        name=name,
        base_dir=folder,
    )
