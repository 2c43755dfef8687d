"""Which weight moves in which form: as it is stored by default, in fewer bytes where the user asks for it.

Without being asked a weight moves as it is stored where its values are all values of the dtype that is
computed in, so that nothing is lost. Lossy forms are for the large matrices of linear layers and
embeddings; all that is small or used in another way keeps what it has. Tables that are only looked up in
keep it in ``int8`` and ``int4``, too. Under these, bytes are left over for the weights whose errors the
outputs feel most: they move in more bits.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import torch

from gascompile.core.errors import UnsupportedOpError
from gascompile.core.program import Program
from gascompile.core.sources import WeightSource
from gascompile.formats.allocation import CEILINGS, TARGETS, UNMEASURED_CEILINGS, Choice, allocate
from gascompile.formats.dtypes import FLOATING, is_lossless
from gascompile.formats.layout import DEFAULT_GROUPS, FORMS, LOW_BITS, is_read_packed
from gascompile.formats.ops import FormSpec, transfer_matrix
from gascompile.weights.checkpoint import Checkpoint

if TYPE_CHECKING:
    from gascompile.precision.sensitivity import Sensitivity

LEAST_BYTES = 64 << 10
"""Weights of fewer bytes, as they are computed in, are not worth a loss."""
_EMBEDDING = torch.ops.aten.embedding.default
_LINEAR = torch.ops.aten.linear.default
_Uses = set[object]
TRIED: Final[Mapping[str, tuple[str, ...]]] = {
    "int8": tuple(LOW_BITS),
    "int4": ("int4", *LOW_BITS),
}
"""Packed forms that each of ``weights=`` chooses among, beside two bytes a value."""
_USUAL_ERRORS: Final[Mapping[str, float]] = {
    "int4": 0.072,
    **{form: 0.0048 / (1 << low_bits) for form, low_bits in LOW_BITS.items()},
    "bfloat16": 0.0017,
}
"""Of weights whose values follow a bell curve."""
_LEAST_GAIN = 1 / 4
"""Of the mean of the layers around, per value: inputs of one token, say, tell nothing of what attention compares."""
_AROUND = 4
"""Layers on each side whose mean is that of the layers around. Chosen, not measured."""


def is_stored_losslessly(program: Program, stored: Mapping[str, str]) -> bool:
    """Return whether all weights can be computed in their dtype without rounding what is stored."""
    weights = program.bound.keys() - program.states
    return all(is_lossless(stored[name], program.bound[name].dtype) for name in weights)


def stored_sources(
    program: Program, canonical: Mapping[str, str], checkpoint: Checkpoint | None
) -> dict[str, WeightSource]:
    """Return where the weights of the program that the checkpoint holds lie in it."""
    if checkpoint is None:
        return {}
    aliases: dict[str, list[str]] = {name: [name] for name in program.bound}
    for name, first in canonical.items():
        if first in aliases:
            aliases[first].append(name)
    return {
        name: next(checkpoint.sources[n] for n in names if n in checkpoint.sources)
        for name, names in aliases.items()
        if any(n in checkpoint.sources for n in names)
    }


def choose_forms(
    program: Program,
    stored: Mapping[str, str],
    weights: str | None,
    sensitivities: Mapping[str, Sensitivity] | None = None,
    interleaved: Mapping[str, int] | None = None,
) -> dict[str, FormSpec]:
    """Return the form of every weight that moves in another one, or with its rows in another order, than it is used.

    Args:
        program: as captured.
        stored: dtype of every weight in its file.
        weights: ``None``, ``bf16``, ``int8`` or ``int4``; ``form_trials`` tells which of them is fastest.
        sensitivities: of the weights that ``matrices_to_pack`` names, as measured. Without them the first layers
            that run count most, as all others pass their errors on.
        interleaved: heads of the weights whose rows lie pair by pair.

    Raises:
        UnsupportedOpError: ``weights`` asks for a form, and no weight of the program can have it, or they have one.
    """
    heads = interleaved or {}
    blocks = next((form for form in stored.values() if is_read_packed(form)), None)
    if blocks is not None and weights in TRIED:
        raise UnsupportedOpError(
            f"the checkpoint holds weights in {blocks}: packing them again as {weights} would lose more; leave "
            "weights= out, and they move as they are stored"
        )
    matrices = _matrices(program) if weights is not None else {}
    lossy: dict[str, str] = {}
    if weights == "bf16":
        lossy = dict.fromkeys(matrices, "bfloat16")
    elif weights is not None:
        lossy = _allocated(program, stored, weights, sensitivities)
    if weights not in (None, "bf16") and not lossy:
        raise UnsupportedOpError(
            f"no weight of '{program.name}' can move as {weights}: that is for the matrices of linear layers and "
            f"embeddings from {LEAST_BYTES >> 10} KiB on; leave weights= out"
        )
    forms: dict[str, FormSpec] = {}
    for name, bound in program.bound.items():
        if name in program.states or bound.dtype not in FLOATING or bound.stride is not None:
            continue
        has_blocks = is_read_packed(stored[name])
        is_kept = has_blocks or is_lossless(stored[name], bound.dtype)
        kept = stored[name] if is_kept else bound.dtype
        wire = lossy.get(name, kept)
        if has_blocks or _bits(wire) >= _bits(kept):
            wire = kept
        if wire != bound.dtype or name in heads:
            forms[name] = FormSpec(
                stored=stored[name], wire=wire, interleaved_heads=heads.get(name, 0)
            )
    return forms


def matrices_to_pack(program: Program) -> list[str]:
    """Return the weights that ``int8`` and ``int4`` are for, in the order in which layers first read them.

    Of a table that is only looked up in a few rows move, and every layer passes their errors on.
    """
    return [name for name, uses in _matrices(program).items() if uses != {_EMBEDDING}]


def _allocated(
    program: Program,
    stored: Mapping[str, str],
    weights: str,
    sensitivities: Mapping[str, Sensitivity] | None,
) -> dict[str, str]:
    """Return the forms of all large matrices: an error that is small enough, or the least under the ceiling."""
    names = matrices_to_pack(program)
    numel = {name: math.prod(program.bound[name].shape) for name in names}
    gains = _gains(numel, sensitivities)
    choices = {}
    for name in names:
        bound = program.bound[name]
        kept = stored[name] if is_lossless(stored[name], bound.dtype) else bound.dtype
        is_narrow = _bits(kept) <= _bits("bfloat16")
        wide = kept if is_narrow else "bfloat16"
        errors = {wide: 0.0 if is_narrow else _USUAL_ERRORS[wide]}
        measured = sensitivities[name].errors if sensitivities else {}
        for form in TRIED[weights]:
            if form != "int4" or bound.shape[1] % DEFAULT_GROUPS[form] == 0:
                errors[form] = measured.get(form, _USUAL_ERRORS[form])
        choices[name] = [
            Choice(form, _size_bytes(form, bound.shape), gains[name] * error**2)
            for form, error in errors.items()
        ]
    plain_bytes = 2 * sum(numel.values())
    if sensitivities is None:
        return allocate(choices, int(UNMEASURED_CEILINGS[weights] * plain_bytes))
    return allocate(choices, int(CEILINGS[weights] * plain_bytes), enough=TARGETS[weights] ** 2)


def _gains(
    numel: Mapping[str, int], sensitivities: Mapping[str, Sensitivity] | None
) -> dict[str, float]:
    if sensitivities is None:
        return {name: size / (1 + place) ** 2 for place, (name, size) in enumerate(numel.items())}
    densities = [sensitivities[name].gain / size for name, size in numel.items()]
    around = [densities[max(i - _AROUND, 0) : i + _AROUND + 1] for i in range(len(densities))]
    return {
        name: size * max(density, _LEAST_GAIN * statistics.fmean(near))
        for (name, size), density, near in zip(numel.items(), densities, around, strict=True)
    }


def _size_bytes(form: str, shape: tuple[int, ...]) -> int:
    dtype, size = transfer_matrix(form, shape[0], shape[1], DEFAULT_GROUPS.get(form, 0))
    element: torch.dtype = getattr(torch, dtype)
    return math.prod(size) * element.itemsize


def _matrices(program: Program) -> dict[str, _Uses]:
    """Return the large matrices that linear layers and embeddings alone read, each with which of them do."""
    uses_of: dict[str, _Uses] = {}
    order: dict[str, int] = {}
    places = {node: place for place, node in enumerate(program.graph_module.graph.nodes)}
    for node in places:
        name = program.bindings.get(node.name) if node.op == "placeholder" else None
        if name is None or name in program.states or not node.users:
            continue
        bound = program.bound[name]
        if len(bound.shape) != 2 or bound.size_bytes < LEAST_BYTES or bound.dtype not in FLOATING:
            continue
        if bound.stride is not None:
            continue
        uses: _Uses = {
            user.target
            for user in node.users
            if (user.target is _LINEAR and user.args[1] is node and user.args[0] is not node)
            or (user.target is _EMBEDDING and user.args[0] is node)
        }
        if uses and all(user.target in uses for user in node.users):
            uses_of[name] = uses
            order[name] = min(places[user] for user in node.users)
    return {name: uses_of[name] for name in sorted(uses_of, key=lambda name: order[name])}


def _bits(form: str) -> int:
    if form in FORMS:
        return 4 if form == "int4" else 8 + LOW_BITS[form]
    return 8 * int(getattr(torch, form).itemsize)
