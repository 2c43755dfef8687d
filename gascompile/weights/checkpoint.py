"""Checkpoints: where in which safetensors, GGUF or ``.bin`` file a weight lies. Headers are read, weights are not."""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gascompile.core import serial
from gascompile.core.errors import CheckpointError, FormatError
from gascompile.core.files import is_file, is_folder
from gascompile.core.model_libraries import model_libraries
from gascompile.core.serial import parse_json, read_json
from gascompile.core.sources import Extent, FileStamp, WeightSource
from gascompile.formats.packings import packing_of
from gascompile.weights.file_kinds import PICKLED, is_gguf, is_onnx, is_pickled
from gascompile.weights.opening import opened
from gascompile.weights.quantisation import quantisation_of

if TYPE_CHECKING:
    from torch import nn

    from gascompile.weights.gguf import Scalar

_INDEX = ".index.json"
_PICKLED_FILE = "pytorch_model.bin"
_IN_ORDER = ("model.safetensors", _PICKLED_FILE)
"""What transformers looks for in a folder: the whole file, then the index of its shards, of each in turn."""
MAX_HEADER_BYTES = 100 << 20
"""The limit of the safetensors format itself."""

_MAX_DIMENSIONS = 64  # ops of torch take no more

_DTYPES = {
    "F64": ("float64", 8), "F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2),
    "I64": ("int64", 8), "I32": ("int32", 4), "I16": ("int16", 2), "I8": ("int8", 1),
    "U8": ("uint8", 1), "BOOL": ("bool", 1), "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1), "U16": ("uint16", 2), "U32": ("uint32", 4), "U64": ("uint64", 8),
    "C64": ("complex64", 8),
}  # fmt: skip

FILE_DTYPES = frozenset(name for name, _ in _DTYPES.values())
"""Dtypes that safetensors files hold, with torch's names."""


_FILE_NAMES = {name: short for short, (name, _) in _DTYPES.items()}


def file_dtype(dtype: str) -> str:
    """Return what safetensors files call a dtype of torch's."""
    return _FILE_NAMES[dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The weights of a checkpoint by name, and the identity of its files."""

    sources: Mapping[str, WeightSource]
    stamps: tuple[FileStamp, ...]
    gguf: Mapping[str, Scalar] | None = None
    """What a GGUF file says of its model, whose names are llama.cpp's; ``None`` of other files."""


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Read the headers of a .safetensors, .gguf, .bin or .onnx file, a sharded directory or a Hugging Face directory.

    Raises:
        CheckpointError: a file is missing, truncated, corrupt or none of these.
    """
    root = Path(path)
    files = _files(root)
    # Each reader is imported where a file is of its format.
    if is_onnx(files[0]):
        from gascompile.weights.onnx_file import read_onnx

        graph = read_onnx(files[0])
        sources = {source.name: source for source in graph.weights.values()}
        return Checkpoint(sources=sources, stamps=graph.stamps)
    if is_gguf(files[0]):
        from gascompile.weights.gguf import read_gguf_header

        header = read_gguf_header(files[0])
        return Checkpoint(sources=header.sources, stamps=(header.stamp,), gguf=header.metadata)
    sources = {}
    stamps = []
    for file in files:
        of_file, stamp = _read_header(file)
        for name, source in of_file.items():
            if name in sources:
                raise CheckpointError(
                    f"the weight '{name}' stands in {sources[name].extents[0].path} and in {file}; "
                    "remove one of the files"
                )
            sources[name] = source
        stamps.append(stamp)
    quantisation = quantisation_of(root) if is_folder(root) else None
    if quantisation:
        if any(is_pickled(file) for file in files):
            raise CheckpointError(
                f"{root} holds quantised weights in files of torch.save, which cannot be read in place; use safetensors"
            )
        from gascompile.weights.quantised import with_packed_weights

        sources = with_packed_weights(sources, quantisation, str(root))
    return Checkpoint(sources=sources, stamps=tuple(stamps))


def _read_header(file: Path) -> tuple[dict[str, WeightSource], FileStamp]:
    if not is_pickled(file):
        return read_safetensors_header(file)
    # Here: what reads safetensors alone needs no torch.
    from gascompile.weights.pickled import read_pickled_header

    return read_pickled_header(file)


def _files(root: Path) -> list[Path]:
    if is_file(root):
        return [root]
    if not is_folder(root):
        raise CheckpointError(
            f"there is no checkpoint at {ascii(str(root))[:1000]}: pass a .safetensors, .gguf or .bin file or a "
            "directory that holds some"
        )
    files = _chosen(root)
    if len(files) > 1 and files[0].suffix == ".gguf":
        raise CheckpointError(
            f"{root} holds {len(files)} .gguf files; pass the one that is meant, such as {files[0].name}"
        )
    if files:
        return _shard_files(files[0]) if files[0].name.endswith(_INDEX) else files
    pickled = sorted(path.name for path in root.iterdir() if path.suffix in PICKLED)
    if pickled:
        raise CheckpointError(
            f"{root} holds no .safetensors file and no {_PICKLED_FILE}; pass the file with the model's weights, if "
            f"that is {ascii(pickled[0])[:200]}"
        )
    raise CheckpointError(f"{root} holds no .safetensors file")


def _chosen(folder: Path) -> list[Path]:
    """Return the files, or the index of those, that hold a folder's weights: those that transformers takes, if any.

    What was there before a model was saved as one file, or by another library, stays beside it.
    """
    for name in _IN_ORDER:
        for file in (folder / name, folder / f"{name}{_INDEX}"):
            if is_file(file):
                return [file]
    return sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.gguf"))


def kind_of_weights(folder: Path) -> Literal["safetensors", "bin", "gguf", ""]:
    """Return in which files the weights of a folder are that ``open_checkpoint`` reads; empty where there are none.

    An index without any shard, as beside a model's configuration, says what the weights would be.
    """
    files = _chosen(folder)
    if not files:
        return ""
    kind = Path(files[0].name.removesuffix(_INDEX)).suffix
    if not any(folder.glob(f"*{kind}")):
        return ""
    return "bin" if kind == ".bin" else "gguf" if kind == ".gguf" else "safetensors"


def has_named_safetensors(folder: Path) -> bool:
    """Return whether a folder has safetensors files under transformers' names, which it prefers to all others."""
    name = _IN_ORDER[0]
    return is_file(folder / name) or is_file(folder / f"{name}{_INDEX}")


def _shard_files(index: Path) -> list[Path]:
    files = [index.parent / name for name in _shards(index)]
    missing = [file for file in files if not is_file(file)]
    if missing:
        raise CheckpointError(
            f"{index} names the shard {missing[0].name}, which is not there ({len(missing)} of {len(files)} are "
            "missing); download the checkpoint again"
        )
    return files


def header_digest(file: Path) -> str:
    """Return the digest that the stamp of a file has; raises ``CheckpointError``."""
    (stamp,) = open_checkpoint(file).stamps
    return stamp.digest


def _shards(index: Path) -> list[str]:
    """Return the names of the files that an index lists, which lie beside it."""
    data = read_json(index, strict=False)
    weight_map = data.get("weight_map") if isinstance(data, dict) else None
    names = weight_map.values() if isinstance(weight_map, dict) else ()
    for name in names:
        if (
            not isinstance(name, str)
            or not name
            or Path(name).name != name
            or not name.isprintable()
        ):
            raise CheckpointError(
                f"{index}: weight_map names {ascii(name)[:100]}, which is no file beside it; download it again"
            )
    if not names:
        raise CheckpointError(f"{index} has no weight_map of file names; download it again")
    return sorted(set(names))


def read_safetensors_header(file: Path) -> tuple[dict[str, WeightSource], FileStamp]:
    """Return the tensors of one safetensors file and its stamp; raises ``CheckpointError``."""
    with opened(file) as stream:
        stat = os.fstat(stream.fileno())
        prefix = stream.read(8)
        if len(prefix) < 8:
            raise CheckpointError(
                f"{file} is truncated: {len(prefix)} bytes are no safetensors header"
            )
        (header_bytes,) = struct.unpack("<Q", prefix)
        if header_bytes > min(MAX_HEADER_BYTES, stat.st_size - 8):
            other = ", nor one of torch.save" if file.suffix in PICKLED else ""
            raise CheckpointError(
                f"{file} is truncated or not a safetensors file{other}: it says that its header has {header_bytes} "
                f"bytes, the file has {stat.st_size}; download it again"
            )
        raw = stream.read(header_bytes)
    try:
        header = parse_json(raw, where="its header")
    except FormatError as error:
        raise CheckpointError(
            f"{file} has a corrupt safetensors header ({error}); download it again"
        ) from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{file} has a header that is no object; download it again")
    data_bytes, path = stat.st_size - 8 - header_bytes, str(file.resolve())
    sources = {
        name: _source(path, name, entry, 8 + header_bytes, data_bytes)
        for name, entry in header.items()
        if name != "__metadata__"
    }
    _check_coverage(file, header, data_bytes)
    return sources, FileStamp.of(path, stat, serial.raw_digest(raw))


def _source(file: str, name: str, entry: Any, data_start: int, data_bytes: int) -> WeightSource:
    try:
        if isinstance(kind := entry["dtype"], str) and kind not in _DTYPES:
            raise CheckpointError(
                f"{file}: {ascii(name)[:200]} has the dtype {ascii(kind)[:40]}, which cannot be read; use a checkpoint "
                f"of {', '.join(_DTYPES)}"
            )
        dtype, itemsize = _DTYPES[kind]
        shape, offsets = tuple(entry["shape"]), tuple(entry["data_offsets"])
        if not all(type(n) is int and 0 <= n < 1 << 62 for n in (*shape, *offsets)):
            raise ValueError("its shape and offsets are not whole numbers")
        begin, end = offsets
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{file}: the header entry of {ascii(name)[:200]} cannot be read ({type(error).__name__}: {error}); "
            "download it again"
        ) from error
    if not name or not name.isprintable() or len(shape) > _MAX_DIMENSIONS:
        raise CheckpointError(
            f"{file}: {ascii(name)[:200]} of {len(shape)} dimensions is no tensor; download it again"
        )
    count = 1
    for dim in shape:
        count *= dim
    if begin < 0 or end - begin != count * itemsize:
        raise CheckpointError(
            f"{file}: '{name}' should have {count * itemsize} bytes by its shape {list(shape)} and dtype {dtype}, "
            f"its offsets span {end - begin}; the file is corrupt: download it again"
        )
    if end > data_bytes:
        raise CheckpointError(
            f"{file} is truncated: '{name}' ends at byte {end} of the data, the file holds {data_bytes}; "
            "download it again"
        )
    extent = Extent(path=file, offset=data_start + begin, size_bytes=end - begin)
    return WeightSource(
        name=name, dtype=dtype, shape=shape, extents=(extent,) if end > begin else ()
    )


def _check_coverage(file: Path, header: Mapping[str, Any], data_bytes: int) -> None:
    spans = sorted(
        (*entry["data_offsets"], name) for name, entry in header.items() if name != "__metadata__"
    )
    end = 0
    for begin, stop, name in spans:
        if begin != end:
            fault = "bytes that another has as well" if begin < end else "behind bytes of none"
            raise CheckpointError(
                f"{file}: '{name}' begins at byte {begin} of the data, {fault}: the one before it ends at {end}; "
                "the file is corrupt: download it again"
            )
        end = stop
    if end != data_bytes:
        raise CheckpointError(
            f"{file} holds {data_bytes} bytes of weights, its header describes {end}; the file is corrupt: "
            "download it again"
        )


def open_checkpoint_of(model: nn.Module, path: Path) -> Checkpoint:
    """Read the headers of a checkpoint, under the names that ``model`` uses.

    Raises:
        CheckpointError: as ``open_checkpoint``; or the names of a library's model cannot be used in place, or what
            is packed is no layer whose rows are its outputs.
    """
    checkpoint = open_checkpoint(path)
    for library in model_libraries():
        checkpoint = library.with_model_names(model, checkpoint)
    if any(packing_of(source.dtype) for source in checkpoint.sources.values()):
        from gascompile.weights.quantised import require_layers

        require_layers(model, checkpoint.sources, str(path))
    return checkpoint


def has_own_values(model: nn.Module) -> set[str]:
    """Return the parameters that were given to a model on the meta device since, such as adapters.

    No checkpoint has to hold them. A model without any tensor on the meta device has none: what its checkpoint lacks
    would be taken for the checkpoint's.
    """
    named = dict(model.named_parameters(remove_duplicate=False))
    if not any(parameter.is_meta for parameter in named.values()):
        return set()
    return {name for name, parameter in named.items() if not parameter.is_meta}
