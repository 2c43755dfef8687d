"""Find the bytes of every tensor a program needs: in a checkpoint, in the model, or rebuilt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from gascompile.bundles.files import Weights
from gascompile.core.errors import CheckpointError, UnsupportedOpError
from gascompile.core.model_libraries import ignorable_weights, rebuild_buffers
from gascompile.core.program import BoundSpec, Program
from gascompile.core.sizes import reserve_bytes
from gascompile.core.sources import FileStamp, WeightSource
from gascompile.core.workload import Forms
from gascompile.formats.dtypes import FLOATING, as_computed, is_lossless
from gascompile.formats.layout import group_of, is_read_packed
from gascompile.formats.ops import transfer_matrix
from gascompile.weights.checkpoint import Checkpoint, has_own_values
from gascompile.weights.mapped import mapped_weights
from gascompile.weights.matching import aliases_of, match_weights
from gascompile.weights.memory_layout import as_span, with_strides
from gascompile.weights.store import spill

HELD_LIMIT_BYTES = 1 << 20
"""Buffers outside the checkpoint below this size stay in RAM instead of becoming a file to stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """Where every bound tensor of a program comes from."""

    weights: Weights
    held: Mapping[str, torch.Tensor]


def with_held_tensors(
    program: Program, model: nn.Module, constants: Mapping[str, torch.Tensor]
) -> Program:
    """Return ``program`` with constants and small non-persistent buffers among the tensors kept in RAM."""
    held = {name for name in program.bound if name in constants}
    persistent = model.state_dict(keep_vars=True).keys()
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    for name, spec in program.bound.items():
        if name in buffers and name not in persistent and spec.size_bytes < HELD_LIMIT_BYTES:
            held.add(name)
    _check_shared(program, model)
    return replace(program, states=program.states | held)


def _check_shared(program: Program, model: nn.Module) -> None:
    """Refuse a mutated buffer that overlaps another: the other one's copy would not see the change."""
    owners: dict[int, list[str]] = {}
    named = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in named:
        if name in program.bound and tensor.device.type != "meta" and tensor.numel():
            owners.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
    for names in owners.values():
        changed = [name for name in names if name in program.states]
        if changed and len(names) > 1:
            other = next(name for name in names if name != changed[0])
            raise UnsupportedOpError(
                f"the model changes '{changed[0]}', which shares memory with '{other}': a plan keeps them apart; "
                "keep one of them and take the view of it in forward"
            )


def resolve_weights(
    model: nn.Module,
    program: Program,
    *,
    canonical: Mapping[str, str],
    constants: Mapping[str, torch.Tensor],
    checkpoint: Checkpoint | None,
    store: Path,
    where: str,
    lossy: bool = False,
) -> Resolved:
    """Return the source of every weight and the value of every held tensor of ``program``.

    Weights of a model in memory that are maps of safetensors files are read from those. What stands in no file is
    spilled into ``store``, and what moves in another form than it is stored in is converted into it. A mutated
    buffer of a model in memory is shared with it, so that the model sees the updates as it would in eager mode.

    Args:
        model: where names, and what no checkpoint holds, come from.
        program: with the forms that its weights move in.
        canonical: name in the model -> name in the program.
        constants: tensors that are part of the graph.
        checkpoint: where the weights lie, if they lie in files.
        store: folder of weights without a file of their own.
        where: what errors call the checkpoint.
        lossy: whether weights may be rounded to another dtype than they are stored in.

    Raises:
        CheckpointError: a weight is missing, extra, or of another shape or dtype; tied ones differ.
        StorageError: the store cannot be written.
    """
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    tensors |= dict(model.named_buffers(remove_duplicate=False))
    needed = [name for name in program.bound if name not in constants]
    forms = program.forms
    wire, program = program, as_computed(program, {n: tuple(t.shape) for n, t in tensors.items()})
    from_file = _from_checkpoint(
        model, program, needed, tensors, canonical, checkpoint, where, store, lossy=lossy
    )
    _check_row_orders(from_file, forms, where)
    # From here on rows are in the order in which the program takes them.
    from_file = {n: replace(source, interleaved_heads=0) for n, source in from_file.items()}
    rest = [name for name in needed if name not in from_file]
    rebuilt = rebuild_buffers(model) if any(tensors[n].device.type == "meta" for n in rest) else {}
    held: dict[str, torch.Tensor] = {n: t for n, t in constants.items() if n in program.bound}
    to_spill: dict[str, torch.Tensor] = {}
    for name in rest:
        value = rebuilt.get(name, tensors[name])
        if value.device.type == "meta":
            raise _no_value(name, persistent=name in model.state_dict(keep_vars=True), where=where)
        kept = name in program.states
        (held if kept else to_spill)[name] = with_strides(value, program.bound[name])
    sources: dict[str, WeightSource] = {}
    for name, source in from_file.items():
        bound = program.bound[name]
        if name not in program.states and bound.stride is None:
            sources[name] = source
            continue
        value = with_strides(_read(source, where).to(getattr(torch, bound.dtype)), bound)
        (held if name in program.states else to_spill)[name] = value
    stamps = checkpoint.stamps if checkpoint else ()
    mapped = mapped_weights(
        {n: t for n, t in to_spill.items() if t is tensors[n] and program.bound[n].stride is None}
    )
    sources |= mapped.sources
    stamps += mapped.stamps
    to_spill = {name: value for name, value in to_spill.items() if name not in mapped.sources}
    if to_spill:
        spilled = spill({n: as_span(t, program.bound[n]) for n, t in to_spill.items()}, store)
        sources |= {n: _laid_out(s, program.bound[n]) for n, s in spilled.sources.items()}
        stamps += spilled.stamps
    sources, stamps = _in_transfer_formats(wire, sources, stamps, store)
    used = {extent.path for source in sources.values() for extent in source.extents}
    return Resolved(
        weights=Weights(
            sources=sources, stamps=tuple(stamp for stamp in stamps if stamp.path in used)
        ),
        held=held,
    )


def _laid_out(source: WeightSource, bound: BoundSpec) -> WeightSource:
    if bound.stride is None:
        return source
    return replace(source, shape=bound.shape, stride=bound.stride)


def _in_transfer_formats(
    program: Program,
    sources: Mapping[str, WeightSource],
    stamps: tuple[FileStamp, ...],
    store: Path,
) -> tuple[dict[str, WeightSource], tuple[FileStamp, ...]]:
    """Return ``sources`` with the weights that move in another form than they lie in converted into ``store``."""
    wires = {
        name: program.forms[name].wire if name in program.forms else program.bound[name].dtype
        for name in sources
    }
    other = {name: wire for name, wire in wires.items() if wire != sources[name].dtype}
    kept = {name: _as_lying(source) for name, source in sources.items() if name not in other}
    if not other:
        return kept, stamps
    from gascompile.weights.convert import Item, converted

    items = {name: Item(source=sources[name], wire=wire) for name, wire in other.items()}
    repacked = converted(items, stamps, store)
    return {**kept, **repacked.sources}, (*stamps, *repacked.stamps)


def _as_lying(source: WeightSource) -> WeightSource:
    """Return a packed weight as the bytes that it is, as it moves; others as they are."""
    if not is_read_packed(source.dtype):
        return source
    rows, columns = source.shape
    dtype, shape = transfer_matrix(source.dtype, rows, columns, group_of(source.dtype))
    return replace(source, dtype=dtype, shape=shape)


def _check_row_orders(
    sources: Mapping[str, WeightSource], forms: Mapping[str, Forms], where: str
) -> None:
    """Refuse a weight whose rows lie in another order than the program takes them in."""
    for name, source in sources.items():
        taken = forms[name].interleaved_heads if name in forms else None
        if source.interleaved_heads != (taken or 0):
            raise CheckpointError(
                f"the rows of '{name}' lie in {where} in another order than this program takes them; compile the "
                "model again with this checkpoint"
            )


def _from_checkpoint(
    model: nn.Module,
    program: Program,
    needed: list[str],
    tensors: Mapping[str, torch.Tensor],
    canonical: Mapping[str, str],
    checkpoint: Checkpoint | None,
    where: str,
    store: Path,
    *,
    lossy: bool,
) -> dict[str, WeightSource]:
    if checkpoint is None:
        return {}
    aliases = aliases_of(canonical)
    persistent = model.state_dict(keep_vars=True).keys() - has_own_values(model)
    in_file = {
        name for name, names in aliases.items() if any(n in checkpoint.sources for n in names)
    }
    required = [
        n
        for n in needed
        if n in in_file or any(alias in persistent for alias in aliases.get(n, (n,)))
    ]
    return match_weights(
        {name: (program.bound[name].dtype, program.bound[name].shape) for name in required},
        checkpoint,
        names=aliases,
        ignorable={*tensors, *ignorable_weights(model, checkpoint.sources)},
        where=where,
        accepts=_may_be_rounded if lossy else is_lossless,
        store=store,
    )


def _may_be_rounded(stored: str, compute: str) -> bool:
    return stored == compute or (
        (stored in FLOATING or is_read_packed(stored)) and compute in FLOATING
    )


def _no_value(name: str, *, persistent: bool, where: str) -> CheckpointError:
    if persistent:
        return CheckpointError(
            f"'{name}' is on the meta device and no checkpoint was given; pass checkpoint= with the model's weights"
        )
    return CheckpointError(
        f"the buffer '{name}' is on the meta device and not part of {where}, so its values are lost; build the model "
        "with real buffers (accelerate.init_empty_weights(include_buffers=False)) or assign it before compiling"
    )


def _read(source: WeightSource, where: str) -> torch.Tensor:
    """Read one small tensor that stays in RAM."""
    if is_read_packed(source.dtype):
        raise CheckpointError(
            f"'{source.name}' lies packed in {where}, and calls change it or it has strides of its own; pass a "
            "safetensors file"
        )
    raw = bytearray()
    try:
        for extent in source.extents:
            with open(extent.path, "rb") as stream:
                stream.seek(extent.offset)
                raw += stream.read(extent.size_bytes)
    except OSError as error:
        raise CheckpointError(
            f"cannot read '{source.name}' from {where}: {error.strerror or error}"
        ) from error
    dtype = getattr(torch, source.dtype)
    if not raw:
        return torch.empty(source.shape, dtype=dtype)
    return torch.frombuffer(raw, dtype=dtype).reshape(source.shape)


def reserved_bytes(model: nn.Module) -> int:
    """Return what all weights of a model take in an arena, which no plan exceeds."""
    weights = {id(p): p for p in (*model.parameters(), *model.buffers())}
    return sum(reserve_bytes(p.numel() * p.element_size()) for p in weights.values())
