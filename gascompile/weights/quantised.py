"""Quantised safetensors: which tensors of a Hugging Face directory make up which packed weight, and how.

``quantization_config`` of ``config.json`` says how weights are packed, headers say where the parts lie. Everything
is held against both: a field, a tensor or a shape that is not known would be read as something else. Nothing is
decoded here; the few values that a form depends on are read: shapes, zero points and the groups of columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import nn

from gascompile.core.errors import CheckpointError
from gascompile.core.sources import Extent, WeightSource
from gascompile.formats.packings import SCALE_NAMES, WORD_BITS, Packing, packing_of
from gascompile.weights.quantisation import Scheme, scheme_of
from gascompile.weights.rows import WeightRows

_CODES: Final[Mapping[str, str]] = {
    "gptq": "qweight", "awq": "qweight", "packed": "weight_packed", "fp8": "weight",
}  # fmt: skip
"""What the codes of a kind of packing are called, after the name of their layer."""
_GROUPS: Final[Mapping[str, str]] = {"gptq": "g_idx", "packed": "weight_g_idx"}
_ACTIVATIONS = ("input_scale", "activation_scale", "input_zero_point")
"""Of schemes that round activations, which nothing here does."""
_LARGEST_VALUES = 1 << 28
"""Of a part that is read to be checked."""


def require_layers(model: nn.Module, sources: Mapping[str, WeightSource], where: str) -> None:
    """Refuse packed weights of modules that may have them the other way round, such as GPT-2's.

    Raises:
        CheckpointError: names the module.
    """
    modules = dict(model.named_modules())
    for name, source in sources.items():
        module = modules.get(name.rpartition(".")[0])
        if packing_of(source.dtype) is None or module is None:
            continue
        if not isinstance(module, (nn.Linear, nn.Embedding)):
            raise CheckpointError(
                f"'{name:.300}' in {where} is packed ({source.dtype}) and belongs to a {type(module).__name__}, whose "
                "weight may lie the other way round; packed weights are read of nn.Linear and nn.Embedding alone: use "
                "the checkpoint before it was quantised"
            )


@dataclass(slots=True)
class _Layers:
    """The tensors of a checkpoint by layer, of which packed weights take theirs."""

    sources: dict[str, WeightSource]
    where: str
    weights: WeightRows

    def take(self, layer: str, part: str) -> WeightSource | None:
        """Take a tensor out, if the layer has it."""
        return self.sources.pop(f"{layer}.{part}", None)

    def need(self, layer: str, part: str) -> WeightSource:
        """Take a tensor out."""
        source = self.take(layer, part)
        if source is None:
            raise self.odd(layer, f"lacks its '{part}'")
        return source

    def values(self, source: WeightSource) -> torch.Tensor:
        """Return all values of a small tensor."""
        if source.size_bytes > _LARGEST_VALUES:
            raise CheckpointError(
                f"'{source.name}' in {self.where} is too large to be what it says"
            )
        return self.weights.whole(source)

    def odd(self, layer: str, problem: str) -> CheckpointError:
        """Return the error for a weight whose parts do not fit each other."""
        return CheckpointError(
            f"{self.where}: the packed weight of '{layer:.300}' {problem}; download the checkpoint again, or use one "
            "that was quantised by another library"
        )


def with_packed_weights(
    sources: Mapping[str, WeightSource], quantization: Any, where: str
) -> dict[str, WeightSource]:
    """Return the tensors of a directory with one source for each packed weight, in the place of its parts.

    Args:
        sources: what the headers of all files have.
        quantization: the ``quantization_config`` of the directory's ``config.json``.
        where: what errors call the directory.

    Raises:
        CheckpointError: a field of the configuration is not known or not read, parts are missing or do not fit each
            other, or values could be taken for others.
        StorageError: a file cannot be read.
    """
    scheme = scheme_of(quantization, where)
    codes = f".{_CODES[scheme.kind]}"
    with WeightRows() as weights:
        layers = _Layers(dict(sources), where, weights)
        for name, source in sources.items():
            is_codes = name.endswith(codes) and (
                scheme.kind != "fp8" or source.dtype.startswith("float8")
            )
            if is_codes:
                layer = name.removesuffix(codes)
                packed = _READERS[scheme.kind](layer, scheme, layers)
                for part in _ACTIVATIONS if scheme.rounds_activations else ():
                    layers.take(layer, part)
                if packed.name in layers.sources:
                    raise layers.odd(layer, "stands beside one that is not packed")
                layers.sources[packed.name] = packed
    return layers.sources


def _gptq(layer: str, scheme: Scheme, layers: _Layers) -> WeightSource:
    codes, scales = layers.need(layer, "qweight"), layers.need(layer, "scales")
    zeros, groups = layers.need(layer, "qzeros"), layers.take(layer, _GROUPS["gptq"])
    each = WORD_BITS // scheme.bits
    rows, columns = _last(codes), (codes.shape or (0,))[0] * each
    packing = _packing(layer, scheme, layers, scales)
    if groups is not None:
        packing = replace(packing, is_ordered=_is_ordered(layer, packing, columns, groups, layers))
    elif scheme.names_groups:
        raise layers.odd(layer, f"lacks its '{_GROUPS[scheme.kind]}', which its scheme needs")
    parts = {"codes": codes, "scales": scales, "zeros": zeros, "groups": groups}
    packed = _assembled(layer, packing, rows, columns, parts, layers)
    if rows % each:
        raise layers.odd(
            layer, f"has {rows} rows, which zero points of {each} in a word cannot be of"
        )
    if packing.is_less_one:
        _require_no_borrow(layer, zeros, scheme.bits, layers)
    return packed


def _awq(layer: str, scheme: Scheme, layers: _Layers) -> WeightSource:
    codes, scales = layers.need(layer, "qweight"), layers.need(layer, "scales")
    parts = {"codes": codes, "scales": scales, "zeros": layers.need(layer, "qzeros")}
    rows = _last(codes) * (WORD_BITS // scheme.bits)
    columns = (codes.shape or (0,))[0]
    packing = _packing(layer, scheme, layers, scales)
    return _assembled(layer, packing, rows, columns, parts, layers)


def _packed(layer: str, scheme: Scheme, layers: _Layers) -> WeightSource:
    codes, scales = layers.need(layer, "weight_packed"), layers.need(layer, "weight_scale")
    shape = layers.values(layers.need(layer, "weight_shape")).tolist()
    rows, columns = (int(size) for size in shape) if _is_shape(shape) else (0, 0)
    zeros, groups = layers.take(layer, "weight_zero_point"), layers.take(layer, _GROUPS["packed"])
    if scheme.zeros != (zeros is not None):
        raise layers.odd(
            layer, "has zero points where its scheme has none, or none where it has some"
        )
    packing = _packing(layer, scheme, layers, scales)
    if groups is not None:
        packing = replace(packing, is_ordered=_is_ordered(layer, packing, columns, groups, layers))
    elif scheme.names_groups:
        raise layers.odd(layer, f"lacks its '{_GROUPS[scheme.kind]}', which its scheme needs")
    parts = {"codes": codes, "scales": scales, "zeros": zeros, "groups": groups}
    return _assembled(layer, packing, rows, columns, parts, layers)


def _is_shape(values: Any) -> bool:
    return (
        isinstance(values, list)
        and len(values) == 2
        and all(isinstance(v, int) and 0 < v < 1 << 40 for v in values)
    )


def _fp8(layer: str, scheme: Scheme, layers: _Layers) -> WeightSource:
    codes, scales = layers.need(layer, "weight"), layers.need(layer, scheme.scale_name)
    if codes.dtype != "float8_e4m3fn" or len(codes.shape) != 2:
        raise layers.odd(
            layer, f"is {codes.dtype} of {list(codes.shape)}, not a matrix of float8_e4m3fn"
        )
    rows, columns = codes.shape
    packing = _packing(layer, scheme, layers, scales)
    if packing.group == 0:
        # Such a vector or number may be kept with dimensions of one, or without.
        wanted = packing.parts(rows, columns)[-1].shape
        if [d for d in scales.shape if d != 1] == [d for d in wanted if d != 1]:
            scales = replace(scales, shape=wanted)
    return _assembled(layer, packing, rows, columns, {"codes": codes, "scales": scales}, layers)


_Reader = Callable[[str, Scheme, _Layers], WeightSource]
_READERS: Final[Mapping[str, _Reader]] = {
    "gptq": _gptq, "awq": _awq, "packed": _packed, "fp8": _fp8,
}  # fmt: skip


def _last(source: WeightSource) -> int:
    return source.shape[-1] if source.shape else 0


def _packing(layer: str, scheme: Scheme, layers: _Layers, scales: WeightSource) -> Packing:
    if scales.dtype not in SCALE_NAMES:
        raise layers.odd(layer, f"has scales of {scales.dtype}, not of {', '.join(SCALE_NAMES)}")
    return Packing(
        kind=scheme.kind,
        bits=scheme.bits,
        group=scheme.group,
        block_rows=scheme.block_rows,
        scale=scales.dtype,
        zeros=scheme.zeros,
        is_less_one=scheme.is_less_one,
    )


def _assembled(
    layer: str,
    packing: Packing,
    rows: int,
    columns: int,
    parts: Mapping[str, WeightSource | None],
    layers: _Layers,
) -> WeightSource:
    """Return the weight that parts make up, whose shapes all have to be those of one matrix."""
    if not rows or not columns:
        raise layers.odd(layer, "has no values")
    if packing.kind in ("awq", "packed") and packing.group and columns % packing.group:
        raise layers.odd(layer, f"has {columns} columns, which are no groups of {packing.group}")
    extents: list[Extent] = []
    for part in packing.parts(rows, columns):
        source = parts[part.name]
        assert source is not None, "a packing has parts that are there"
        if (source.dtype, source.shape) != (part.dtype, part.shape):
            raise layers.odd(
                layer,
                f"is of {rows} x {columns} values, so '{source.name[-60:]}' should be {part.dtype} of "
                f"{list(part.shape)}, not {source.dtype} of {list(source.shape)[:4]}",
            )
        extents += source.extents
    if packing.kind in ("gptq", "awq") and extents[0].offset % 4:
        raise layers.odd(
            layer, "begins at a byte that is not a multiple of four, and is of numbers of four"
        )
    return WeightSource(
        name=f"{layer}.weight", dtype=packing.form, shape=(rows, columns), extents=tuple(extents)
    )


def _is_ordered(
    layer: str, packing: Packing, columns: int, groups: WeightSource, layers: _Layers
) -> bool:
    """Return whether columns are of other groups than of those that they lie in."""
    if (groups.dtype, groups.shape) != ("int32", (columns,)):
        raise layers.odd(layer, f"names groups by {groups.dtype} of {list(groups.shape)[:4]}")
    group_of = layers.values(groups)
    size = packing.group or columns
    count = packing.num_groups(columns)
    if torch.equal(group_of, torch.arange(columns, dtype=torch.int32) // size):
        return False
    if packing.kind == "packed" and bool((group_of == -1).all()):
        return False  # of a scheme without an order
    if int(group_of.min()) < 0 or int(group_of.max()) >= count:
        raise layers.odd(
            layer, f"names groups from {int(group_of.min())} to {int(group_of.max())} of {count}"
        )
    if not group_of.any():
        raise layers.odd(
            layer, "says that all columns are of the first group, which libraries read in two ways"
        )
    sizes = torch.bincount(group_of, minlength=count)
    if packing.kind == "packed" and bool((sizes != size).any()):
        raise layers.odd(layer, f"has groups that are not of {size} columns each")
    return True


def _require_no_borrow(layer: str, zeros: WeightSource, bits: int, layers: _Layers) -> None:
    """Refuse zero points of zero: stored less one, in a word with others, libraries read them in two ways."""
    raw, mask = layers.values(zeros), (1 << bits) - 1
    if any(bool((((raw >> place) & mask) == mask).any()) for place in range(0, WORD_BITS, bits)):
        raise CheckpointError(
            f"{layers.where}: '{zeros.name:.300}' has zero points of zero in GPTQ's first format, which libraries read "
            "in two ways; save the model with checkpoint_format gptq_v2 (GPTQModel: format=FORMAT.GPTQ_V2)"
        )
