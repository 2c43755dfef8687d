"""Object fields: what an object of a class made in Python holds, and whether it may hold more than shows."""

from __future__ import annotations

import contextlib
import types
from functools import cache
from typing import Any

from torch import nn

_HEAP_HEADER_BYTES = object.__basicsize__
_MADE = {"__weakref__", "__dict__"}
_OF_TORCH = {"_compiled_call_impl"}
"""Set on modules by torch's own machinery."""
_OF_PROCESS = "_original_object_hash"
"""Python's hash of a transformers configuration: another one in each process."""


def state_of(value: Any) -> dict[str, Any]:
    """Return the fields that say what an object is, in their order by name."""
    kept = _MADE | (_OF_TORCH if issubclass(type(value), nn.Module) else set())
    if any(str(base.__module__).startswith("transformers.") for base in type(value).__mro__):
        kept = kept | {_OF_PROCESS}
    return {name: item for name, item in sorted(fields_of(value).items()) if name not in kept}


def fields_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object and what lies in its slots."""
    fields = dict(vars(value)) if hasattr(value, "__dict__") else {}
    for base in type(value).__mro__:
        for name, slot in vars(base).items():
            if isinstance(slot, types.MemberDescriptorType):  # empty, or hidden by a class below
                with contextlib.suppress(AttributeError):
                    fields.setdefault(name, slot.__get__(value))
    return fields


@cache
def hides_state(kind: Any) -> bool:
    """Return whether an instance holds more than its ``__dict__`` and its slots, as types made in C do."""
    if any(base.__itemsize__ for base in kind.__mro__ if base is not object):
        return True
    slots = sum(
        isinstance(item, types.MemberDescriptorType) and origin_is_python(base)
        for base in kind.__mro__
        for item in vars(base).values()
    )
    pointers = slots + (kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0)
    return bool(kind.__basicsize__ > _HEAP_HEADER_BYTES + 8 * pointers)


def origin_is_python(kind: type) -> bool:
    """Return whether a class was made by a ``class`` statement, whose slots hold objects."""
    return bool(kind.__flags__ & (1 << 9)) and "__module__" in vars(kind)
