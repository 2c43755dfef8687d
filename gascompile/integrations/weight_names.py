"""Weight names of transformers checkpoints: renamed, merged and concatenated entries as extents in place.

transformers 5 stores some weights under other names than its models use, such as the experts of a
mixture one by one. Where a conversion only puts pieces behind each other, the pieces are read straight
from the file to where they belong; no converted copy is written.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from gascompile.core.errors import CheckpointError
from gascompile.core.sources import Extent, WeightSource
from gascompile.integrations.adapter_names import base_name, with_base_names
from gascompile.integrations.huggingface import strip_prefix, transformers_models
from gascompile.weights.checkpoint import Checkpoint
from gascompile.weights.rows import lies_packed


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pieces:
    """A row-major tensor that lies in the files as a list of extents."""

    dtype: str
    shape: tuple[int, ...]
    extents: tuple[Extent, ...]


def with_model_names(model: Any, checkpoint: Checkpoint) -> Checkpoint:
    """Return ``checkpoint`` with the names and shapes that ``model`` uses, if transformers has any for it.

    A module around one transformers model may be given that model's own checkpoint, as may one with adapters.

    Raises:
        CheckpointError: a conversion needs arithmetic or a transpose, so the bytes cannot be used in place; or an
            adapter has no values.
    """
    if checkpoint.gguf is None:
        return with_base_names(model, _of_library(model, checkpoint))
    from gascompile.integrations.gguf_names import with_gguf_names

    return with_base_names(model, with_gguf_names(model, checkpoint))


def _of_library(model: Any, checkpoint: Checkpoint) -> Checkpoint:
    inner = transformers_models(model)
    if not inner:
        return checkpoint
    if "" in inner:
        return _apply(model, checkpoint)
    names = {n for n, _ in model.named_parameters(remove_duplicate=False)}
    if len(inner) != 1 or names & set(checkpoint.sources):
        return checkpoint
    ((path, wrapped),) = inner.items()
    inside = _apply(wrapped, checkpoint)
    sources = {f"{path}.{name}": source for name, source in inside.sources.items()}
    return Checkpoint(
        sources={name: _renamed(source, name) for name, source in sources.items()},
        stamps=inside.stamps,
    )


def _apply(model: Any, checkpoint: Checkpoint) -> Checkpoint:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    wanted = {n for n, _ in model.named_parameters(remove_duplicate=False)}
    wanted |= {n for n, _ in model.named_buffers(remove_duplicate=False)}
    wanted |= set(map(base_name, wanted))
    if wanted >= set(checkpoint.sources):
        return checkpoint
    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if not isinstance(t, WeightConverter)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    prefixes = strip_prefix(model, checkpoint.sources, wanted)
    result: dict[str, WeightSource] = {}
    groups: dict[tuple[str, int], dict[str, list[WeightSource]]] = {}
    for name in sorted(checkpoint.sources, key=_natural_order):
        source = checkpoint.sources[name]
        if name in wanted:
            result[name] = source
            continue
        target = prefixes.get(name, name)
        for renaming in renamings:
            target, _ = renaming.rename_source_key(target)
        for i, converter in enumerate(converters):
            renamed, pattern = converter.rename_source_key(target)
            if pattern is not None:
                groups.setdefault((renamed, i), {}).setdefault(pattern, []).append(source)
                break
        else:
            result[target] = source
    for (target, i), parts in groups.items():
        ordered = [parts[p] for p in converters[i].source_patterns if p in parts]
        result[target] = _convert(target, converters[i].operations, ordered)
    named = {name: _renamed(source, name) for name, source in result.items()}
    return Checkpoint(sources=named, stamps=checkpoint.stamps)


def _natural_order(name: str) -> tuple[tuple[int, int, str], ...]:
    return tuple(
        (0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"\.", name)
    )


def _renamed(source: WeightSource, name: str) -> WeightSource:
    return replace(source, name=name)


def _convert(
    target: str, operations: Sequence[Any], parts: list[list[WeightSource]]
) -> WeightSource:
    if any(lies_packed(source) for part in parts for source in part):
        raise CheckpointError(
            f"the weight '{target}' is made of several that are quantised, which cannot be read in place; use the "
            "checkpoint before it was quantised, with weights='int4' or 'int8'"
        )
    pieces = [
        [_Pieces(dtype=s.dtype, shape=s.shape, extents=s.extents) for s in part] for part in parts
    ]
    for operation in operations:
        kind = type(operation).__name__
        if kind == "MergeModulelist" and operation.dim == 0:
            pieces = [[_stack(part)] for part in pieces]
        elif kind == "Concatenate":
            pieces = [[_concatenate([p for part in pieces for p in part], operation.dim)]]
        else:
            raise CheckpointError(
                f"the weight '{target}' is stored in another layout than the model uses ({kind}), so it cannot be "
                "read in place; load the model once with transformers, save its state_dict with "
                "safetensors.torch.save_model and pass that file as checkpoint="
            )
    (whole,) = (p for part in pieces for p in part)
    return WeightSource(name=target, dtype=whole.dtype, shape=whole.shape, extents=whole.extents)


def _stack(items: list[_Pieces]) -> _Pieces:
    return _Pieces(
        dtype=items[0].dtype,
        shape=(len(items), *items[0].shape),
        extents=tuple(extent for item in items for extent in item.extents),
    )


def _concatenate(items: list[_Pieces], dim: int) -> _Pieces:
    """Join along ``dim``: for each index before ``dim`` the run of each item follows the other's."""
    first = items[0]
    outer = math.prod(first.shape[:dim])
    extents: list[Extent] = []
    for index in range(outer):
        for item in items:
            run_bytes = sum(e.size_bytes for e in item.extents) // outer
            extents += _cut(item.extents, index * run_bytes, run_bytes)
    size = sum(item.shape[dim] for item in items)
    return _Pieces(
        dtype=first.dtype,
        shape=(*first.shape[:dim], size, *first.shape[dim + 1 :]),
        extents=tuple(extents),
    )


def _cut(extents: tuple[Extent, ...], start: int, size_bytes: int) -> list[Extent]:
    """Return the extents of the bytes ``[start, start + size_bytes)`` of a tensor."""
    result, position = [], 0
    for extent in extents:
        low, high = max(start, position), min(start + size_bytes, position + extent.size_bytes)
        if low < high:
            result.append(
                Extent(
                    path=extent.path, offset=extent.offset + low - position, size_bytes=high - low
                )
            )
        position += extent.size_bytes
    return result
