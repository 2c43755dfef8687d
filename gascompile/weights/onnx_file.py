"""ONNX files: the graph, and where in which file each weight lies. Weights are not read.

A weight lies in a file of external data beside the model, or within the model's own file, where the fields of the
protobuf are walked to find its first byte. Either way it is read in place, as those of safetensors files are. A file
may come from anywhere: what it says of places and sizes is checked before anything is believed.
"""

from __future__ import annotations

import itertools
import mmap
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final

from gascompile.core import serial
from gascompile.core.errors import CheckpointError, first_line_of
from gascompile.core.files import is_file, open_regular
from gascompile.core.sources import Extent, FileStamp, WeightSource
from gascompile.weights.onnx_check import check_graph, has_shapes
from gascompile.weights.opening import opened

if TYPE_CHECKING:
    import onnx_ir

DTYPES: Final = {
    "FLOAT": ("float32", 4), "DOUBLE": ("float64", 8), "FLOAT16": ("float16", 2), "BFLOAT16": ("bfloat16", 2),
    "INT8": ("int8", 1), "INT16": ("int16", 2), "INT32": ("int32", 4), "INT64": ("int64", 8),
    "UINT8": ("uint8", 1), "BOOL": ("bool", 1),
}  # fmt: skip
"""Of ONNX's types those whose values torch computes with, by torch's names, and bytes of a value."""
_FLOATING: Final = frozenset(("FLOAT", "DOUBLE", "FLOAT16", "BFLOAT16"))
_SMALL_FLOAT_BYTES: Final = 256  # the same of floats, from which no shape is computed
_SMALL_BYTES: Final = 4096
"""Initializers below these are constants of the graph, which shapes and indices are computed from."""
_TYPED_LIMIT_BYTES: Final = 1 << 20
"""Of an initializer that is a list of numbers in the protobuf, which has no bytes to read in place."""
_GRAPH, _INITIALIZER, _RAW_DATA = 7, 5, 9
"""Numbers of fields in ONNX's protobuf."""

_OF_MODULES: Final = frozenset((
    "T_destination", "add_module", "apply", "bfloat16", "buffers", "call_super_init", "children", "compile",
    "cpu", "cuda", "double", "dump_patches", "eval", "extra_repr", "float", "forward", "get_buffer",
    "get_extra_state", "get_parameter", "get_submodule", "half", "inputs", "ipu", "known", "load_state_dict",
    "made_up_inputs", "modules", "mtia", "named_buffers", "named_children", "named_modules", "named_parameters",
    "outputs", "parameters", "register_backward_hook", "register_buffer", "register_forward_hook",
    "register_forward_pre_hook", "register_full_backward_hook", "register_full_backward_pre_hook",
    "register_load_state_dict_post_hook", "register_load_state_dict_pre_hook", "register_module",
    "register_parameter", "register_state_dict_post_hook", "register_state_dict_pre_hook", "requires_grad_",
    "set_extra_state", "set_submodule", "share_memory", "state_dict", "steps", "tensors", "to", "to_empty",
    "train", "training", "type", "xpu", "zero_grad",
))  # fmt: skip
"""What modules have under these names, torch's own and that of a graph; here since torch may not be installed."""
_NOT_NAMES: Final = ("_", "onnx_constant_")


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxFile:
    """A model as it stands in its file."""

    model: onnx_ir.Model
    weights: Mapping[str, WeightSource]
    """By the name in the graph; a source has the name that the weight has in a module."""
    constants: Mapping[str, tuple[str, tuple[int, ...], bytes]]
    """Small initializers by name: torch's dtype, shape, little-endian bytes."""
    stamps: tuple[FileStamp, ...]


def read_onnx(file: Path) -> OnnxFile:
    """Read the graph of an ONNX model, with the dtypes and shapes that ONNX infers, and find its weights.

    Raises:
        CheckpointError: onnx is not installed; the file is damaged or no ONNX model, or its weights are not where it
            says or cannot be read in place.
    """
    proto, stat, digest = _proto(file)
    graph = proto.graph
    if graph.sparse_initializer:
        raise CheckpointError(
            f"{file}: '{graph.sparse_initializer[0].values.name[:200]}' is a sparse initializer, which cannot be read "
            "in place; save it as a dense tensor"
        )
    model = _inferred(file, proto)
    inline = _inline_offsets(file, proto)
    weights: dict[str, WeightSource] = {}
    constants = {}
    taken: set[str] = set()
    for number, tensor in enumerate(graph.initializer):
        source = _source(file, tensor, inline.get(number), weight_name(tensor.name, taken))
        if source.extents and _is_weight(tensor, source):
            weights[tensor.name] = source
            taken.add(source.name)
        else:
            constants[tensor.name] = (source.dtype, source.shape, _content(file, tensor, source))
    _check_overlaps(file, weights)
    own = FileStamp.of(str(file.resolve()), stat, digest)
    paths = {extent.path for source in weights.values() for extent in source.extents} - {own.path}
    # Of external data, the model's file says where tensors lie.
    others = tuple(FileStamp.of(path, os.stat(path), digest) for path in sorted(paths))
    return OnnxFile(model=model, weights=weights, constants=constants, stamps=(own, *others))


def weight_name(name: str, taken: set[str]) -> str:
    """Return the name in a module of an initializer: parts of letters, digits and underscores, as modules have."""
    parts = ["".join(c if c.isascii() and c.isalnum() else "_" for c in p) for p in name.split(".")]
    parts = [f"{p}_" if p in _OF_MODULES or p.startswith(_NOT_NAMES) else p for p in parts]
    free = plain = ".".join(part for part in parts if part) or "weight"
    number = 1
    # A module cannot be a parameter, too.
    while any(free == t or t.startswith(f"{free}.") or free.startswith(f"{t}.") for t in taken):
        number += 1
        free = f"{plain.replace('.', '_')}_{number}"
    return free


def require_onnx(where: str) -> None:
    """Refuse what needs the onnx packages where they are not installed; raises ``CheckpointError``."""
    try:
        import onnx  # noqa: F401
        import onnx_ir  # noqa: F401
    except ImportError as error:
        raise CheckpointError(
            f"{where} is an ONNX model, which needs onnx and onnx_ir ({error}); install them with: "
            "pip install 'gascompile[onnx]'"
        ) from error


def _proto(file: Path) -> tuple[Any, os.stat_result, str]:
    """Return the parsed file without external data, its state, and the digest of all but large initializers."""
    require_onnx(str(file))
    import onnx
    from google.protobuf.message import DecodeError

    with opened(file) as stream:
        stat = os.fstat(stream.fileno())
        raw = stream.read()
        try:
            proto = onnx.ModelProto.FromString(raw)
            if has_shapes(proto):
                # By its path: where external data lies is checked, too.
                onnx.checker.check_model(str(file))
            else:
                check_graph(proto)
        except (DecodeError, onnx.checker.ValidationError, ValueError, RuntimeError) as error:
            raise _damaged(file, error) from error
    return proto, stat, serial.raw_digest(raw)


def _damaged(file: Path, error: Exception) -> CheckpointError:
    reason = ascii(first_line_of(error, 300))[1:-1]
    return CheckpointError(
        f"{file} is damaged or no ONNX model: {reason}; export it again, or download it again"
    )


def _inferred(file: Path, proto: Any) -> onnx_ir.Model:
    """Return the graph with the type of every value that ONNX's own rules can tell."""
    import onnx
    import onnx_ir

    for nodes in (proto.graph.node, *(function.node for function in proto.functions)):
        _require_inferable(file, nodes)
    try:
        inferred = onnx.shape_inference.infer_shapes(proto, check_type=True, data_prop=True)
        return onnx_ir.serde.deserialize_model(inferred)
    except (onnx.shape_inference.InferenceError, ValueError, RuntimeError, TypeError, LookupError, AttributeError,
            ArithmeticError) as error:  # fmt: skip
        raise _damaged(file, error) from error


def _require_inferable(file: Path, nodes: Any) -> None:
    """Refuse what ONNX's inference ends the process for: a Split that has more results than it says."""
    for node in nodes:
        said = [a.i for a in node.attribute if a.name == "num_outputs"]
        if node.op_type == "Split" and said and any(count != len(node.output) for count in said):
            raise CheckpointError(
                f"{file}: the node {ascii(node.name or node.output[0])[:200]} (Split) has {len(node.output)} outputs, "
                f"and num_outputs is {said[0]}; the file is corrupt: export it again"
            )
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                _require_inferable(file, graph.node)


def _source(file: Path, tensor: Any, inline: Extent | None, name: str) -> WeightSource:
    import onnx

    kind = onnx.TensorProto.DataType.Name(tensor.data_type)
    if kind not in DTYPES:
        raise CheckpointError(
            f"{file}: the initializer {ascii(tensor.name)[:200]} is of {kind}, with which torch does not compute; "
            "export the model before it was quantised"
        )
    dtype, itemsize = DTYPES[kind]
    shape = tuple(tensor.dims)
    size_bytes = itemsize
    for dim in shape:
        if not 0 <= dim < 1 << 62:
            raise CheckpointError(f"{file}: {ascii(tensor.name)[:200]} has a dimension of {dim}")
        size_bytes *= dim
    extent = inline
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        extent = _external(file, tensor, size_bytes)
    if extent is not None and extent.size_bytes != size_bytes:
        raise CheckpointError(
            f"{file}: {ascii(tensor.name)[:200]} should have {size_bytes} bytes by its shape {list(shape)} and dtype "
            f"{dtype}, the file gives it {extent.size_bytes}; the file is corrupt: export it again"
        )
    extents = (extent,) if extent is not None and size_bytes else ()
    return WeightSource(name=name, dtype=dtype, shape=shape, extents=extents)


def _is_weight(tensor: Any, source: WeightSource) -> bool:
    import onnx

    kind = onnx.TensorProto.DataType.Name(tensor.data_type)
    is_values = kind in _FLOATING and len(source.shape) > 0
    return source.size_bytes >= (_SMALL_FLOAT_BYTES if is_values else _SMALL_BYTES)


def _external(file: Path, tensor: Any, size_bytes: int) -> Extent:
    said = {entry.key: entry.value for entry in tensor.external_data}
    name = ascii(tensor.name)[:200]
    try:
        offset, length = int(said.get("offset") or 0), int(said.get("length") or size_bytes)
    except ValueError as error:
        raise CheckpointError(f"{file}: {name} has no number as its offset or length") from error
    path = _beside(file, said.get("location", ""), name)
    held_bytes = path.stat().st_size
    if offset < 0 or length < 0 or offset + length > held_bytes:
        raise CheckpointError(
            f"{path} is truncated: {name} lies at bytes {offset} to {offset + length} by {file.name}, the file holds "
            f"{held_bytes}; download it again"
        )
    return Extent(path=str(path), offset=offset, size_bytes=length)


def _beside(file: Path, location: str, name: str) -> Path:
    """Return the file of external data: a regular one below the model's folder, as ONNX demands."""
    relative = PurePosixPath(location)
    if (
        not location.isprintable()
        or not relative.name
        or relative.is_absolute()
        or ".." in relative.parts
    ):
        raise CheckpointError(
            f"{file}: {name} lies at {ascii(location)[:200]}, which is no path below the model's folder; save the "
            "model with its data beside it"
        )
    path = (file.parent / relative).resolve()
    # A download cache links both files to where their contents lie.
    homes = (file.parent.resolve(), file.resolve().parent)
    if not any(path.is_relative_to(home) for home in homes):
        raise CheckpointError(
            f"{file}: the link {ascii(location)[:200]} leads out of the model's folder; put the file itself there"
        )
    if not is_file(path):
        raise CheckpointError(
            f"{file} keeps {name} in {ascii(location)[:200]}, which is not there; put it beside the model"
        )
    # onnx refuses these where it checks a file by its path.
    if (file.parent / relative).is_symlink() or path.stat().st_nlink > 1:
        raise CheckpointError(
            f"{file}: {ascii(location)[:200]} is a link, or a file of several names; put the file itself there"
        )
    return path


def _content(file: Path, tensor: Any, source: WeightSource) -> bytes:
    """Return the bytes of a constant."""
    import onnx_ir

    if source.extents:
        (extent,) = source.extents
        with open(extent.path, "rb") as stream:
            stream.seek(extent.offset)
            return stream.read(extent.size_bytes)
    try:
        content = bytes(onnx_ir.serde.deserialize_tensor(tensor).tobytes())
    except (ValueError, TypeError, RuntimeError) as error:
        raise _damaged(file, error) from error
    if len(content) > _TYPED_LIMIT_BYTES:
        raise CheckpointError(
            f"{file} holds {ascii(tensor.name)[:200]} as {len(content)} bytes of single numbers, not to be read in "
            "place; save the model with external data: onnx.save(model, file, save_as_external_data=True)"
        )
    return content


def _check_overlaps(file: Path, weights: Mapping[str, WeightSource]) -> None:
    """Refuse weights of which one begins within another; the same bytes for two are as those of tied weights."""
    spans = sorted(
        {(e.path, e.offset, e.offset + e.size_bytes) for s in weights.values() for e in s.extents}
    )
    for before, after in itertools.pairwise(spans):
        if before[0] == after[0] and after[1] < before[2]:
            raise CheckpointError(
                f"{file}: two weights overlap at byte {after[1]} of {after[0]}; the file is corrupt: export it again"
            )


def _inline_offsets(file: Path, proto: Any) -> dict[int, Extent]:
    """Return where in the model's own file the raw bytes of initializers lie, by their number in the graph.

    The parser does not tell, so the fields are walked; what lies there has to be what the parser found.
    """
    tensors = proto.graph.initializer
    if not any(tensor.HasField("raw_data") for tensor in tensors):
        return {}
    extents: dict[int, Extent] = {}
    number = 0
    path = str(file.resolve())
    with open(open_regular(file), "rb") as stream:
        data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            for begin, end in _fields(data, 0, len(data), _GRAPH):
                for first, last in _fields(data, begin, end, _INITIALIZER):
                    spans = list(_fields(data, first, last, _RAW_DATA))
                    if spans:
                        start, stop = spans[-1]
                        same = (
                            number < len(tensors) and data[start:stop] == tensors[number].raw_data
                        )
                        if not same:
                            raise ValueError("initializers do not lie where they were read")
                        extents[number] = Extent(path=path, offset=start, size_bytes=stop - start)
                    number += 1
        except (IndexError, ValueError) as error:
            raise _damaged(file, error) from error
        finally:
            data.close()
    return extents


def _fields(data: mmap.mmap, begin: int, end: int, wanted: int) -> Iterator[tuple[int, int]]:
    """Yield the bytes of every length-delimited field of a number in a message."""
    at = begin
    while at < end:
        key, at = _varint(data, at)
        wire = key & 7
        if wire == 0:
            _, at = _varint(data, at)
        elif wire == 2:
            size, at = _varint(data, at)
            if at + size > end:
                raise ValueError("a field is longer than its message")
            if key >> 3 == wanted:
                yield at, at + size
            at += size
        elif wire in (1, 5):
            at += 8 if wire == 1 else 4
        else:
            raise ValueError(f"a field is of the wire type {wire}")


def _varint(data: mmap.mmap, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if not byte & 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number has more than 64 bits")
