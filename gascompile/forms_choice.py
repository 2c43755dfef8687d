"""Which weight moves in which form: as it is stored by default, in fewer bytes where the user asks for it.

Without being asked a weight moves as it is stored where its values are all values of the dtype that is
computed in, so that nothing is lost. Lossy forms are for the large matrices of linear layers and
embeddings; all that is small or used in another way keeps what it has. Tables that are only looked up in
keep it in ``int8`` and ``int4``, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from gascompile.checkpoint import Checkpoint
from gascompile.errors import UnsupportedOpError
from gascompile.packing import DEFAULT_GROUPS
from gascompile.program import BoundSpec, Program
from gascompile.wire_ops import FormSpec

LEAST_BYTES = 64 << 10
"""Weights of fewer bytes, as they are computed in, are not worth a loss."""
_WIDER = {
    "bfloat16": ("float32", "float64"),
    "float16": ("float32", "float64"),
    "float32": ("float64",),
}
FLOATING = frozenset(("float64", "float32", "bfloat16", "float16"))
_EMBEDDING = torch.ops.aten.embedding.default
_LINEAR = torch.ops.aten.linear.default
_Uses = set[object]
_INT4_SHARE = 0.5
"""Of the largest layer's bytes: smaller ones stay ``int8`` in ``int4``. They are a small part of what moves, and
attention, whose matrices they mostly are, passes errors on to every layer after it."""


def is_lossless(stored: str, compute: str) -> bool:
    """Return whether every value of ``stored`` is one of ``compute``."""
    return stored == compute or compute in _WIDER.get(stored, ())


def stored_dtypes(
    program: Program, canonical: Mapping[str, str], checkpoint: Checkpoint | None
) -> dict[str, str]:
    """Return the dtype in which every weight lies in the checkpoint, or else in the model."""
    found = {name: bound.dtype for name, bound in program.bound.items()}
    if checkpoint is None:
        return found
    aliases: dict[str, list[str]] = {name: [name] for name in found}
    for name, first in canonical.items():
        if first in aliases:
            aliases[first].append(name)
    for name, names in aliases.items():
        source = next((checkpoint.sources[n] for n in names if n in checkpoint.sources), None)
        if source is not None:
            found[name] = source.dtype
    return found


def choose_forms(
    program: Program, stored: Mapping[str, str], weights: str | None
) -> dict[str, FormSpec]:
    """Return the form of every weight that moves in another one than it is computed in.

    Args:
        program: as captured.
        stored: dtype of every weight in its file.
        weights: ``None``, ``bf16``, ``int8`` or ``int4``; ``form_trials`` tells which of them is fastest.

    Raises:
        UnsupportedOpError: ``weights`` asks for a form, and no weight of the program can have it.
    """
    matrices = _matrices(program) if weights is not None else {}
    lossy = _lossy(program, matrices, weights) if weights is not None else {}
    if weights not in (None, "bf16") and not lossy:
        raise UnsupportedOpError(
            f"no weight of '{program.name}' can move as {weights}: that is for the matrices of linear layers and "
            f"embeddings from {LEAST_BYTES >> 10} KiB on; leave weights= out"
        )
    found: dict[str, FormSpec] = {}
    for name, bound in program.bound.items():
        if name in program.states or bound.dtype not in FLOATING:
            continue
        kept = stored[name] if is_lossless(stored[name], bound.dtype) else bound.dtype
        wire = lossy.get(name, kept)
        if _bits(wire) >= _bits(kept):
            wire = kept
        if wire != bound.dtype:
            found[name] = FormSpec(stored=stored[name], wire=wire)
    return found


def as_computed(program: Program, shapes: Mapping[str, tuple[int, ...]]) -> Program:
    """Return ``program`` with its weights as they are computed in again: dtype, and shape by ``shapes``."""
    bound = {
        name: BoundSpec(dtype=program.forms[name].compute, shape=shapes[name])
        if name in program.forms
        else spec
        for name, spec in program.bound.items()
    }
    return replace(program, bound=bound, forms={})


def _lossy(program: Program, matrices: Mapping[str, _Uses], weights: str) -> dict[str, str]:
    """Return the form of every large matrix that may lose something; ``matrices`` says what reads each."""
    if weights == "bf16":
        return dict.fromkeys(matrices, "bfloat16")
    # Of a table only the rows that are looked up move, and every layer passes their errors on.
    matrices = {name: uses for name, uses in matrices.items() if uses != {_EMBEDDING}}
    if weights == "int8":
        return dict.fromkeys(matrices, "int8")
    heads = _vocabulary_rows(program)
    layers = {
        name: program.bound[name].size_bytes
        for name, uses in matrices.items()
        if uses == {_LINEAR} and program.bound[name].shape[0] not in heads
    }
    limit_bytes = _INT4_SHARE * max(layers.values(), default=0)
    return {
        name: "int4"
        if layers.get(name, -1) >= limit_bytes
        and program.bound[name].shape[1] % DEFAULT_GROUPS["int4"] == 0
        else "int8"
        for name in matrices
    }


def _matrices(program: Program) -> dict[str, _Uses]:
    """Return the large matrices that linear layers and embeddings alone read, each with which of them do."""
    found: dict[str, _Uses] = {}
    for node in program.graph_module.graph.nodes:
        name = program.bindings.get(node.name) if node.op == "placeholder" else None
        if name is None or name in program.states or not node.users:
            continue
        bound = program.bound[name]
        if len(bound.shape) != 2 or bound.size_bytes < LEAST_BYTES or bound.dtype not in FLOATING:
            continue
        uses: _Uses = {
            user.target
            for user in node.users
            if (user.target is _LINEAR and user.args[1] is node and user.args[0] is not node)
            or (user.target is _EMBEDDING and user.args[0] is node)
        }
        if uses and all(user.target in uses for user in node.users):
            found[name] = uses
    return found


def _vocabulary_rows(program: Program) -> set[int]:
    """Return the numbers of rows of all embeddings: a layer with as many outputs is a head."""
    return {
        program.bound[program.bindings[node.args[0].name]].shape[0]
        for node in program.op_nodes()
        if node.target is _EMBEDDING
        and isinstance(node.args[0], torch.fx.Node)
        and node.args[0].name in program.bindings
    }


def _bits(form: str) -> int:
    bits = {"int4": 4, "int8": 8}
    return bits[form] if form in bits else 8 * getattr(torch, form).itemsize
