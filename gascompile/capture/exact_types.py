"""Exact types: whether code asks if a tensor is a ``torch.Tensor`` and no subclass, which none of a trace is."""

from __future__ import annotations

import dis
import types
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from gascompile.capture.fingerprint.code_origin import Origin, origin_of_file
from gascompile.core.errors import CaptureError

_COMPARES = {"IS_OP", "COMPARE_OP", "CONTAINS_OP"}
_ENDS = ("STORE_", "POP_TOP", "POP_JUMP", "JUMP", "RETURN", "RESUME", "FOR_ITER", "YIELD")
"""What an expression does not go beyond."""
_NAMED = {"Tensor", "Parameter", "torch.Tensor"}
_PLAIN = (torch.Tensor, nn.Parameter)
_TYPES = {("LOAD_GLOBAL", "type"), ("LOAD_NAME", "type"), ("LOAD_ATTR", "__class__")}
_TYPE_NAMES = {name for _, name in _TYPES}
_NOT_ASKED = {Origin.TORCH, Origin.OWN, Origin.PYTHON}


def require_no_exact_types(ran: Iterable[tuple[types.CodeType, Mapping[str, Any]]]) -> None:
    """Return if none of what ran compares the type of anything with that of plain tensors or parameters.

    Args:
        ran: code of the functions that a capture called, each with its globals.

    Raises:
        CaptureError: one does, as by ``type(x) is torch.Tensor``.
    """
    for code, space in ran:
        # Most code names no type, and need not be read.
        if _TYPE_NAMES.isdisjoint(code.co_names) or origin_of_file(code.co_filename) in _NOT_ASKED:
            continue
        for line, names in _comparisons(code):
            # By identity: a global may be an array, which compares element by element.
            if names & _NAMED or any(space.get(name) is kind for name in names for kind in _PLAIN):
                raise CaptureError(
                    f"{code.co_qualname} asks for the exact type of a tensor ({code.co_filename}:{line}): while it is "
                    "traced every tensor is of a subclass, so that the answer is another one than in a call. What to "
                    "do: isinstance(x, torch.Tensor)"
                )


@lru_cache(maxsize=8192)
def _comparisons(code: types.CodeType) -> tuple[tuple[int | None, frozenset[str]], ...]:
    """Return the lines of comparisons of a type, each with the names and texts in it."""
    found: list[tuple[int | None, frozenset[str]]] = []
    names: set[str] = set()
    is_type = False
    line: int | None = None
    for instruction in dis.get_instructions(code):
        line = instruction.positions.lineno if instruction.positions is not None else line
        is_compared = instruction.opname in _COMPARES
        if is_compared and is_type:
            found.append((line, frozenset(names)))
        if is_compared or instruction.opname.startswith(_ENDS):
            names, is_type = set(), False
        elif isinstance(instruction.argval, tuple):
            names.update(value for value in instruction.argval if isinstance(value, str))
        elif isinstance(instruction.argval, str):
            names.add(instruction.argval)
            is_type = is_type or (instruction.opname, instruction.argval) in _TYPES
    return tuple(found)
