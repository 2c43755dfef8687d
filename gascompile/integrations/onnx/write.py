"""ONNX files are written whole or not at all, with their weights as external data; no file of a user's is replaced."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gascompile.bundles.bundle import require_unchanged
from gascompile.bundles.files import Weights
from gascompile.core.errors import CheckpointError, StorageError, UnsupportedOpError, first_line_of
from gascompile.core.progress import task
from gascompile.core.sources import Extent, WeightSource
from gascompile.integrations.onnx.external import (
    append,
    as_external,
    copy_weight,
    partial_file,
    place_weights,
    require_space,
)
from gascompile.weights.onnx_check import check_graph

if TYPE_CHECKING:
    import onnx_ir

_INLINE_BYTES: Final = 1 << 16
"""Constants of the graph below this are part of the model's file."""
_LIMIT_BYTES: Final = (1 << 31) - 1
"""Of one message of protobuf."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What an ONNX file has, and where."""

    file: Path
    data: Path | None
    """Of the weights that were copied; ``None`` where none was."""
    num_weights: int
    copied_bytes: int
    in_place_bytes: int
    """Of weights that are referenced in the files where they lay."""
    left: tuple[Path, ...]
    """Data that the file of before had and this one has not. They stay: no file says which other models use them."""


def require_unwritten(file: Path, *, overwrite: bool) -> None:
    """Refuse a file that cannot be written, or that is there already, before anything slow.

    Raises:
        ValueError: its name does not end in .onnx.
        StorageError: it is there, or its folder is not.
    """
    if file.suffix != ".onnx":
        raise ValueError(f"{str(file)[:1000]!r} is no name of an ONNX file; let it end in .onnx")
    if not file.parent.is_dir():
        raise StorageError(f"the folder {file.parent} is not there; make it first")
    if file.is_dir():
        raise StorageError(f"{file} is a folder; name a file")
    if overwrite:
        return
    for path in (file, _data_file(file)):
        if os.path.lexists(path):
            raise StorageError(
                f"{path} is there already, and is not replaced; choose another name, or pass --overwrite "
                "(overwrite=True)"
            )


def write_onnx(
    model: onnx_ir.Model,
    weights: Weights,
    file: Path,
    *,
    overwrite: bool = False,
) -> Written:
    """Write a graph with the values of its initializers; a kill leaves what was there before, or all of it.

    Args:
        model: initializers without values are weights.
        weights: where their values lie, by name.
        file: to be written.
        overwrite: whether a file of that name may be replaced; its data stays.

    Raises:
        StorageError: a file is there, cannot be read or cannot be written.
        CheckpointError: a weight has no values.
        UnsupportedOpError: ONNX's checker refuses the graph.
    """
    require_unwritten(file, overwrite=overwrite)
    lacking = [n for n, v in model.graph.initializers.items() if v.const_value is None]
    sources = {name: _source(weights, name) for name in lacking}
    before = _data_of(file) if overwrite else []
    data = _data_file(file)
    number = 1
    while os.path.lexists(data):
        number += 1
        data = file.with_name(f"{file.name}.{number}.data")
    in_place, others = place_weights(sources, file.parent)
    large = [
        (value, tensor) for value in model.graph.initializers.values()
        if (tensor := value.const_value) is not None and _is_large(tensor)
    ]  # fmt: skip
    needed_bytes = sum(sources[n].size_bytes for n in others)
    needed_bytes += sum(tensor.nbytes for _, tensor in large)
    require_space(needed_bytes, file.parent)
    with (
        partial_file(data) as (stream, temporary),
        task("Copying weights", needed_bytes) as advance,
    ):
        extents = dict(in_place)
        for name in others:
            begin = copy_weight(sources[name], stream, advance)
            extents[name] = _extent(data, begin, stream.tell())
        for value, tensor in large:
            begin = append(tensor.tobytes(), stream)
            _point(value, _constant_source(value), _extent(data, begin, stream.tell()), file.parent)
        for name, extent in extents.items():
            _point(model.graph.initializers[name], sources[name], extent, file.parent)
        copied_bytes = stream.tell()
        stream.flush()
        os.fsync(stream.fileno())
        for stamp in weights.stamps:
            require_unchanged(stamp)
        _publish(_checked(model, file), file, temporary if copied_bytes else None, data)
    used = {Path(extent.path).resolve() for extent in in_place.values()}
    return Written(
        file=file,
        data=data if copied_bytes else None,
        num_weights=len(sources),
        copied_bytes=sum(sources[name].size_bytes for name in others),
        in_place_bytes=sum(extent.size_bytes for extent in in_place.values()),
        left=tuple(old for old in before if old.exists() and old.resolve() not in used),
    )


def _data_file(file: Path) -> Path:
    return file.with_name(f"{file.name}.data")


def _source(weights: Weights, name: str) -> WeightSource:
    source = weights.sources.get(name)
    if source is None:
        raise CheckpointError(
            f"the weight '{name}' has no values; pass checkpoint= with the model's weights"
        )
    return source


def _extent(data: Path, begin: int, end: int) -> Extent:
    return Extent(path=str(data), offset=begin, size_bytes=end - begin)


def _is_large(tensor: Any) -> bool:
    import onnx_ir

    return not isinstance(tensor, onnx_ir.ExternalTensor) and bool(tensor.nbytes >= _INLINE_BYTES)


def _constant_source(value: onnx_ir.Value) -> WeightSource:
    from gascompile.weights.onnx_file import DTYPES

    tensor: Any = value.const_value
    dtype = DTYPES.get(tensor.dtype.name)
    if dtype is None:
        raise UnsupportedOpError(f"the constant '{value.name}' is of {tensor.dtype.name}")
    return WeightSource(
        name=str(value.name), dtype=dtype[0], shape=tuple(tensor.shape.numpy()), extents=()
    )


def _point(value: onnx_ir.Value, source: WeightSource, extent: Extent, folder: Path) -> None:
    value.const_value = as_external(str(value.name), source, extent, folder)


def _checked(model: onnx_ir.Model, file: Path) -> bytes:
    """Return the content of the model's file, which ONNX's own checker has taken."""
    import onnx
    import onnx_ir

    proto = onnx_ir.serde.serialize_model(model)
    if proto.ByteSize() > _LIMIT_BYTES:
        raise UnsupportedOpError(
            f"the graph of {file} has {proto.ByteSize()} bytes, more than a protobuf may have"
        )
    raw = bytes(proto.SerializeToString())
    try:
        # The data is renamed together with the model, so it is not there to be looked at.
        check_graph(proto)
    except onnx.checker.ValidationError as error:
        raise UnsupportedOpError(
            f"ONNX's checker refuses the graph of {file}: {first_line_of(error)}"
        ) from error
    return raw


def _publish(raw: bytes, file: Path, temporary: Path | None, data: Path) -> None:
    """Rename the data and then the model, which makes both valid."""
    with partial_file(file) as (stream, model):
        stream.write(raw)
        stream.flush()
        os.fsync(stream.fileno())
        if temporary is not None:
            os.replace(temporary, data)
        os.replace(model, file)


def _data_of(file: Path) -> list[Path]:
    """Return the data files under the names that this module gives which an ONNX file has."""
    import onnx
    from google.protobuf.message import DecodeError

    try:
        graph = onnx.load(file, load_external_data=False).graph
    except (OSError, DecodeError, ValueError):
        return []
    said = {e.value for t in graph.initializer for e in t.external_data if e.key == "location"}
    ours = re.compile(re.escape(file.name) + r"(\.[0-9]+)?\.data")
    return [file.with_name(name) for name in sorted(said) if ours.fullmatch(name)]
