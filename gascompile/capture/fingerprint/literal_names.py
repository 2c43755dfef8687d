"""Literal names: the attributes that ``getattr`` and ``hasattr`` are asked for by a text that stands in the code."""

from __future__ import annotations

import dis
import types
from collections.abc import Iterable
from itertools import islice

ASKING = frozenset({"getattr", "hasattr"})
GLOBALS = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_GLOBALS"}
# Python 3.11 takes the arguments off in the first of the two.
_CALL = "PRECALL" if "PRECALL" in dis.opmap else "CALL"
_PUSHES = {
    "LOAD_CONST", "LOAD_SMALL_INT", "LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_BORROW", "LOAD_DEREF", "LOAD_CLOSURE",
    "LOAD_GLOBAL", "LOAD_NAME", "PUSH_NULL",
}  # fmt: skip
"""All that puts something onto the stack and looks at nothing that lies there."""
_SILENT = {"EXTENDED_ARG", "CACHE", "NOP"}
_JUMPS = {*dis.hasjrel, *dis.hasjabs}


def literal_names(code: types.CodeType) -> frozenset[str] | None:
    """Return the names that a function, without those inside it, asks for; ``None`` where one stands in no text."""
    if ASKING.isdisjoint(code.co_names):
        return frozenset()
    steps = [step for step in dis.get_instructions(code) if step.opname not in _SILENT]
    found = set()
    for number, step in enumerate(steps, 1):
        if step.opname in GLOBALS and step.argval in ASKING:
            name = _asked(islice(steps, number, None))
            if name is None:
                return None
            found.add(name)
    return frozenset(found)


def _asked(steps: Iterable[dis.Instruction]) -> str | None:
    """Return the second argument of the call whose function was put onto the stack before these steps."""
    # How many values lie above the function, and the second of them, where it is a text.
    above, name = 0, None
    for step in steps:
        if step.opname == "PUSH_NULL" and not above:
            continue  # it lies beneath the arguments
        if step.is_jump_target or step.opcode in _JUMPS:
            return None
        if step.opname == _CALL and step.arg == above:
            return name
        after = above + dis.stack_effect(step.opcode, step.arg, jump=False)
        if step.opname not in _PUSHES:
            # It may look at whatever lies on top, and leave something else there.
            if not above or after < 1:
                return None
            name = None if min(above, after) <= 2 else name
        elif above == 1:
            is_text = step.opname == "LOAD_CONST" and isinstance(step.argval, str)
            name = step.argval if is_text else None
        above = after
    return None
