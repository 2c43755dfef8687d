"""Dtypes of weights: which hold all values of which others, and weights as they are computed in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from gascompile.formats.layout import BLOCKS
from gascompile.formats.packings import packing_of

if TYPE_CHECKING:
    from gascompile.core.program import Program

FLOATING = frozenset(("float64", "float32", "bfloat16", "float16"))
_WIDER = {
    "bfloat16": ("float32", "float64"),
    "float16": ("float32", "float64"),
    "float32": ("float64",),
}


def is_lossless(stored: str, compute: str) -> bool:
    """Return whether every value of ``stored`` is one of ``compute``; those of blocks are float32.

    Values of a packing are those of the dtype of its scales, in which whoever unpacks it rounds them. Scales in
    float32 say of no dtype that it is the one: their values are rounded once, to what is computed in.
    """
    packing = packing_of(stored)
    if packing is not None and packing.scale == "float32":
        return compute in FLOATING
    if packing is not None:
        stored = packing.scale
    elif stored in BLOCKS:
        stored = "float32"
    return stored == compute or compute in _WIDER.get(stored, ())


def as_computed(program: Program, shapes: Mapping[str, tuple[int, ...]]) -> Program:
    """Return ``program`` with its weights as they are computed in again: dtype, and shape by ``shapes``."""
    # Late: what is known of dtypes alone needs no torch.
    from gascompile.core.program import BoundSpec

    bound = {
        name: BoundSpec(dtype=program.forms[name].compute, shape=shapes[name])
        if name in program.forms
        else spec
        for name, spec in program.bound.items()
    }
    return replace(program, bound=bound, forms={})
