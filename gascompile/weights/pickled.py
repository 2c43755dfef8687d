"""Checkpoints that ``torch.save`` wrote (``.bin``, ``.pt``): where in the file each tensor lies, without loading one.

Such a file is a zip archive with a record per storage, uncompressed, and a pickle that says which tensors are views of
them. Torch's safe loader reads the pickle, onto the meta device, and says where each storage begins; the archive's own
directory, read by Python, has to say the same. So weights are read in place, as those of safetensors files are, and
nothing of the file is run.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import re
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch
from torch import nn

from gascompile.core.errors import CheckpointError, first_line_of
from gascompile.core.sources import Extent, FileStamp, WeightSource
from gascompile.weights.checkpoint import FILE_DTYPES, MAX_HEADER_BYTES
from gascompile.weights.opening import opened

_CONTAINERS: Final = ("state_dict", "model_state_dict", "model")
"""Under which training loops keep a model beside their optimizer and counters."""
_LOCAL_HEADER_BYTES = 30  # of a file in a zip archive, before its name
_UNREADABLE = (
    OSError, RuntimeError, ValueError, LookupError, TypeError, AttributeError, AssertionError, EOFError,
    RecursionError, NotImplementedError, struct.error, zipfile.BadZipFile,
)  # fmt: skip
"""What torch and ``zipfile`` raise for archives that are cut short, changed or of another kind."""


@dataclass(frozen=True, slots=True)
class _Archive:
    """What the directory of an archive says, with the digest of all of it."""

    records: Mapping[int, int]
    """Bytes of each storage by where they begin in the file."""
    digest: str


def read_pickled_header(file: Path) -> tuple[dict[str, WeightSource], FileStamp]:
    """Return the tensors of one file of ``torch.save`` and its stamp.

    Tensors may share a storage, as tied weights do, or be a part of one. The digest of the stamp is of the archive's
    directory, which has a checksum of each storage, and of the pickle.

    Raises:
        CheckpointError: the file is damaged, of the format before torch 1.6, or holds something that the safe loader
            refuses or that cannot be read in place.
    """
    with opened(file) as stream:
        stat = os.fstat(stream.fileno())
        archive = _archive(file, stream)
        stream.seek(0)
        tensors = _tensors(file, _loaded(file, stream))
        now = os.fstat(stream.fileno())
    if (now.st_size, now.st_mtime_ns) != (stat.st_size, stat.st_mtime_ns):
        raise CheckpointError(f"{file} was written to while it was read; wait for the writer")
    path = str(file.resolve())
    sources = {name: _source(file, path, name, t, archive.records) for name, t in tensors.items()}
    return sources, FileStamp.of(path, stat, archive.digest)


def _archive(file: Path, stream: BinaryIO) -> _Archive:
    if stream.read(2) != b"PK":
        raise CheckpointError(
            f"{file} is of the format that torch wrote before 1.6, whose weights cannot be read in place; save it "
            'again: torch.save(torch.load(file, map_location="cpu", weights_only=True), file)'
        )
    try:
        with zipfile.ZipFile(stream) as archive:
            infos = archive.infolist()
            names = {info.filename.partition("/")[2]: info for info in infos}
            head = names.get("data.pkl")
            if head is None or "constants.pkl" in names:
                raise CheckpointError(
                    f"{file} is an archive, but not one of torch.save: it holds a program or something else; pass "
                    "the file of the model's state_dict()"
                )
            if head.file_size > MAX_HEADER_BYTES:
                raise CheckpointError(f"{file} has a pickle of {head.file_size} bytes, too many")
            if not any(info.CRC for info in infos):
                raise CheckpointError(
                    f"{file} was saved without checksums, by which changed weights are noticed; save it again with "
                    "torch.serialization.set_crc32_options(True), torch's default"
                )
            if len(names) != len(infos):
                raise CheckpointError(
                    f"{file} has two records of one name; the file is corrupt: download it again"
                )
            # Torch swaps bytes of such a file even on the meta device, where there are none: the process would end.
            big = torch.serialization.LoadEndianness.BIG
            if "byteorder" in names:
                is_little = archive.read(names["byteorder"]) == b"little"
            else:
                is_little = torch.serialization.get_default_load_endianness() != big
            if not is_little:
                raise CheckpointError(
                    f"{file} was written on a big-endian machine; load and save it again here"
                )
            state = hashlib.blake2b(archive.read(head), digest_size=20)
        for info in infos:
            state.update(repr((info.filename, info.CRC, info.file_size)).encode())
        return _Archive(_records(stream, infos, archive.start_dir), state.hexdigest())
    except _UNREADABLE as error:
        raise _damaged(file, error) from error


def _records(stream: BinaryIO, infos: list[zipfile.ZipInfo], end: int) -> dict[int, int]:
    """Return the bytes of each storage that lies in the file as it is, before ``end``, by where it begins there."""
    size_at = {}
    for info in infos:
        if info.compress_type == zipfile.ZIP_STORED and info.filename.partition("/data/")[2]:
            stream.seek(info.header_offset)
            header = stream.read(_LOCAL_HEADER_BYTES)
            name_bytes, extra_bytes = struct.unpack_from("<HH", header, 26)
            begin = info.header_offset + _LOCAL_HEADER_BYTES + name_bytes + extra_bytes
            if begin + info.file_size <= end:
                size_at[begin] = info.file_size
    return size_at


def _loaded(file: Path, stream: BinaryIO) -> Any:
    """Return what the file holds, its tensors without values."""
    try:
        return torch.load(stream, map_location="meta", weights_only=True)
    except pickle.UnpicklingError as error:
        if "Unsupported operand" in str(error):
            raise CheckpointError(
                f"{file} is pickled by a protocol that torch's safe loader does not read; where you trust it, save it "
                'again: torch.save(torch.load(file, map_location="cpu", weights_only=False), file)'
            ) from error
        named = re.search(r"GLOBAL (\S+)", str(error))
        what = f"objects of {named[1][:200]}" if named else "more than tensors"
        raise CheckpointError(
            f"{file} holds {what}, which torch's safe loader refuses, since a pickle can run any code; where you "
            "trust it, convert it once: safetensors.torch.save_model(model, file) of the model that its own library "
            "loads"
        ) from error
    except _UNREADABLE as error:
        if isinstance(error, NotImplementedError) and "meta tensor" in str(error):
            # Since torch 2.14, which makes none without values.
            raise CheckpointError(
                f"{file} holds tensors that are not plain, such as sparse ones; make them dense and save them again"
            ) from error
        raise _damaged(file, error) from error


def _damaged(file: Path, error: Exception) -> CheckpointError:
    reason = first_line_of(error, 300)
    return CheckpointError(
        f"{file} is truncated, corrupt or no file of torch.save ({reason}); download it again"
    )


def _tensors(file: Path, content: Any) -> dict[str, torch.Tensor]:
    """Return the weights: all that the file holds, or the model of a training loop's checkpoint."""
    if isinstance(content, Mapping):
        inner = [n for n in _CONTAINERS if isinstance(content.get(n), Mapping)]
        if len(inner) > 1:
            raise CheckpointError(
                f"{file} holds {' and '.join(map(repr, inner))}: save the one that is meant by itself"
            )
        weights = content[inner[0]] if inner else content
        odd = next((n for n, value in weights.items() if not _is_weight(n, value)), None)
        if weights and odd is None:
            return dict(weights)
        if weights:
            raise CheckpointError(
                f"{file}: {ascii(odd)[:200]} is {type(weights[odd]).__name__}, where a name with a dense tensor should "
                "be; save the model's state_dict() by itself"
            )
    raise CheckpointError(
        f"{file} holds no weights by name ({type(content).__name__}); pass the file of the model's state_dict()"
    )


def _is_weight(name: object, value: object) -> bool:
    return (
        isinstance(name, str)
        and bool(name)
        and name.isprintable()
        # Subclasses, such as those of torchao, mean something else by their storage.
        and type(value) in (torch.Tensor, nn.Parameter)
        and isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and not value.is_quantized
    )


def _source(
    file: Path, path: str, name: str, tensor: torch.Tensor, records: Mapping[int, int]
) -> WeightSource:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in FILE_DTYPES or tensor.is_conj() or tensor.is_neg():
        raise CheckpointError(
            f"{file}: '{name}' is of {dtype} in a form that cannot be read in place; save a plain tensor"
        )
    if not tensor.is_contiguous():
        raise CheckpointError(
            f"{file}: '{name}' of the strides {tensor.stride()} does not lie row by row, so it cannot be read in "
            "place; save the weights again, each made .contiguous()"
        )
    extents: tuple[Extent, ...] = ()
    if tensor.nbytes:
        storage = tensor.untyped_storage()
        begin: int = getattr(storage, "_checkpoint_offset", -1)
        offset = int(tensor.storage_offset()) * tensor.itemsize
        held_bytes = records.get(begin, -1)
        if held_bytes != storage.nbytes() or offset + tensor.nbytes > held_bytes:
            raise CheckpointError(
                f"{file}: the bytes of '{name}' are not where the archive's directory has them; the file is corrupt: "
                "download it again"
            )
        extents = (Extent(path=path, offset=begin + offset, size_bytes=tensor.nbytes),)
    return WeightSource(name=name, dtype=dtype, shape=tuple(tensor.shape), extents=extents)
