"""Trace inputs: what a capture is given in the place of the caller's tensors.

They have the shapes, strides and sharing of the real ones and no values, so that a capture can neither depend on
values nor touch them. What is one tensor for the caller is one tensor here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from gascompile.core.errors import UnsupportedOpError
from gascompile.core.program import InputSpec
from gascompile.core.signature import require_plain, same_memory, same_tensors, strides_of
from gascompile.core.strides import span_elements

Call = tuple[tuple[Any, ...], dict[str, Any]]


def trace_inputs(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], *, device: str, overlapping: bool
) -> Call:
    """Return the call with a substitute for each tensor, on ``device`` where it is not on the meta device.

    Args:
        args: positional arguments.
        kwargs: keyword arguments.
        device: where the program is captured.
        overlapping: whether tensors that share memory shall share it in the trace.

    Raises:
        UnsupportedOpError: a tensor is of a kind that no plan can have.
    """
    leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            require_plain(leaf, f"argument {number} of the example inputs")
    made = _views(leaves, device) if overlapping else {}
    for number, first in enumerate(same_tensors(leaves)):
        leaf = leaves[number]
        if isinstance(leaf, torch.Tensor) and first not in made:
            where = leaf.device if leaf.is_meta else device
            made[first] = torch.empty_strided(
                leaf.shape, strides_of(leaf), dtype=leaf.dtype, device=where
            )
    first_of = same_tensors(leaves)
    substitutes = [
        made[first_of[number]] if isinstance(leaf, torch.Tensor) else leaf
        for number, leaf in enumerate(leaves)
    ]
    call: Call = pytree.tree_unflatten(substitutes, spec)
    return call


def _views(leaves: list[Any], device: str) -> dict[int, torch.Tensor]:
    """Return substitutes of the tensors that share memory, by their first number."""
    members: dict[int, list[tuple[int, int]]] = {}
    for number, (base, offset_bytes) in enumerate(same_memory(leaves)):
        members.setdefault(base, []).append((offset_bytes, number))
    first_of = same_tensors(leaves)
    made: dict[int, torch.Tensor] = {}
    for group in members.values():
        if len({first_of[number] for _, number in group}) < 2:
            continue
        lowest = min(offset for offset, _ in group)
        memory = torch.empty(_end_bytes(group, leaves) - lowest, dtype=torch.uint8, device=device)
        for offset, number in group:
            leaf = leaves[number]
            begin, rest = divmod(offset - lowest, leaf.itemsize)
            if rest:
                raise UnsupportedOpError(
                    f"arguments {group[0][1]} and {number} overlap in memory, {offset - lowest} bytes apart, which "
                    f"is no multiple of an element of {leaf.dtype}; pass a clone of one of them"
                )
            view = torch.empty(0, dtype=leaf.dtype, device=device)
            made[first_of[number]] = view.set_(
                memory.untyped_storage(), begin, leaf.shape, strides_of(leaf)
            )
    return made


def _end_bytes(group: list[tuple[int, int]], leaves: list[Any]) -> int:
    ends: list[int] = [
        offset + span_elements(leaves[n].shape, leaves[n].stride()) * leaves[n].itemsize
        for offset, n in group
    ]
    return max(ends)


def with_sharing(
    inputs: tuple[InputSpec, ...], leaves: list[Any], written: frozenset[str]
) -> tuple[InputSpec, ...]:
    """Return the inputs with what is ``written`` and what ``leaves`` share: one tensor, or memory that ops write to."""
    memory = same_memory(leaves)
    bases = {memory[n][0] for n, spec in enumerate(inputs) if spec.name in written}
    first_of = same_tensors(leaves)
    specs = []
    for number, spec in enumerate(inputs):
        base, offset_bytes = memory[number]
        first = first_of[number]
        shares = base in bases and any(
            other == base and first_of[n] != first for n, (other, _) in enumerate(memory)
        )
        specs.append(
            replace(
                spec,
                written=spec.name in written,
                same_as=inputs[first].name if first != number else "",
                base=inputs[base].name if shares else "",
                offset_bytes=offset_bytes if shares else 0,
            )
        )
    return tuple(specs)


def overlaps(leaves: list[Any]) -> bool:
    """Return whether two tensors that are not one share memory."""
    groups = {base for base, _ in same_memory(leaves)}
    return len(groups) < len(set(same_tensors(leaves)))
