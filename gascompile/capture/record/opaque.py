"""Opaque values: stand-ins of numbers and lists that may be counted on with, stored and appended to, and nothing else.

And of tensors that earlier calls have kept, which may only make room for others.

They show whether code uses what it keeps. No subclasses of what they stand for: C code reads those unseen,
of these it can only ask by a method. Whatever could tell one value from another is a use.
"""

from __future__ import annotations

import random
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy
import torch

from gascompile.capture.fingerprint.code_origin import Origin, origin_of_file

_NUMBERS = (bool, int, float)
_RANDOM = (random.Random, numpy.random.Generator, numpy.random.RandomState)
_OF_ALL = (getattr(random.random, "__self__", None), getattr(numpy.random.rand, "__self__", None))
"""The generators behind the functions of ``random`` and ``numpy.random``."""
_LOOKED_AT = {
    "__bool__": "decides a branch",
    **dict.fromkeys(("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"), "is compared"),
    **dict.fromkeys(("__str__", "__repr__", "__format__", "__bytes__"), "becomes text"),
    **dict.fromkeys(("__int__", "__float__", "__index__", "__complex__"), "is read as a number"),
    **dict.fromkeys(("__len__", "__iter__", "__getitem__", "__contains__"), "is read"),
    **dict.fromkeys(("__setitem__", "__delitem__", "__reversed__"), "is changed in place"),
    **dict.fromkeys(("__copy__", "__deepcopy__", "__reduce__", "__reduce_ex__"), "is copied"),
    **dict.fromkeys(("__hash__", "__call__", "__getattr__", "__invert__", "__round__"), "is used"),
    **dict.fromkeys(("__trunc__", "__floor__", "__ceil__"), "is rounded"),
}
_OPERATORS = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "divmod", "pow", "matmul", "lshift", "rshift", "and", "or",
    "xor",
)  # fmt: skip


class UsedError(BaseException):
    """A stand-in was looked at. No ``Exception``: code that goes on after errors must not go on after this one."""


class Uses:
    """What was looked at, in words, and the stand-ins that were made."""

    def __init__(self) -> None:
        """Begin with none."""
        self.texts: list[str] = []
        self.made: list[weakref.ref[_Opaque]] = []

    def note(self, name: str, what: str, frame: types.FrameType | None) -> None:
        """Take note of a use.

        Raises:
            UsedError: always.
        """
        while frame is not None and not _is_program(frame):
            frame = frame.f_back
        where = f" at {frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""
        self.texts.append(f"{name} {what}{where}")
        raise UsedError(self.texts[-1])


class _Opaque:
    """Of a type that ``isinstance`` takes for the real one, as that does not change with the value."""

    __slots__ = ("__weakref__", "_kind", "_name", "_uses")

    def __init__(self, kind: type, name: str, uses: Uses) -> None:
        self._kind, self._name, self._uses = kind, name, uses
        uses.made.append(weakref.ref(self))

    @property  # type: ignore[misc]  # what isinstance asks
    def __class__(self) -> type:
        return self._kind


class OpaqueNumber(_Opaque):
    """A number that sums, differences and products may be made of, and quotients by known numbers."""

    __slots__ = ()

    def _with(self, other: object, *, is_float: bool = False) -> OpaqueNumber:
        if type(other) is OpaqueNumber:
            is_float = is_float or other._kind is float
        elif type(other) in _NUMBERS:
            is_float = is_float or type(other) is float
        else:
            self._uses.note(self._name, f"meets a {type(other).__name__}", sys._getframe(2))
        kind = float if is_float else self._kind
        return OpaqueNumber(kind, self._name, self._uses)

    def _by(self, other: object, *, is_float: bool = False) -> OpaqueNumber:
        # By an opaque number it may fail, or not.
        if type(other) not in _NUMBERS or not other:
            self._uses.note(self._name, "is divided by what may be nothing", sys._getframe(2))
        return self._with(other, is_float=is_float)

    def __add__(self, other: object) -> OpaqueNumber:
        return self._with(other)

    __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __add__

    def __floordiv__(self, other: object) -> OpaqueNumber:
        return self._by(other)

    __mod__ = __floordiv__

    def __truediv__(self, other: object) -> OpaqueNumber:
        return self._by(other, is_float=True)

    def __neg__(self) -> OpaqueNumber:
        return OpaqueNumber(self._kind, self._name, self._uses)

    __pos__ = __abs__ = __neg__


class OpaqueList(_Opaque):
    """A list or deque that values may be put into."""

    __slots__ = ()

    def append(self, value: object) -> None:
        """Keep nothing."""

    appendleft = append

    def extend(self, values: Iterable[object]) -> None:
        """Take all values, as making them may be work of the program's."""
        for _ in values:
            pass

    extendleft = extend

    def __iadd__(self, values: Iterable[object]) -> OpaqueList:  # noqa: PYI034 - of a final class
        self.extend(values)
        return self


class OpaqueKept(_Opaque):
    """What an earlier call has kept, such as a tensor; no more may be done than to put another in its place.

    It does not pass for what it stands for: C code would take it for a tensor and read its memory.
    """

    __slots__ = ()

    @property  # type: ignore[misc]  # what isinstance asks
    def __class__(self) -> type:
        return OpaqueKept


class OpaqueSource(_Opaque):
    """What gives another value each time it is asked, such as an iterator; asking it is a use."""

    __slots__ = ()


_SAID: dict[str, object] = {
    "__str__": "...", "__repr__": "...", "__format__": "...", "__int__": 0, "__index__": 0, "__float__": 0.0,
}  # fmt: skip
"""What stands in a log message."""


def _hook(name: str, what: str) -> Callable[..., Any]:
    def looked_at(self: _Opaque, *_: object) -> Any:
        frame = sys._getframe(1)
        if name in _SAID and is_talk(frame.f_code):
            return _SAID[name]
        return self._uses.note(self._name, what, frame)

    looked_at.__name__ = name
    return looked_at


def _close(kind: type[_Opaque]) -> None:
    """Let every method that Python calls by itself, and every attribute, be a use, unless it is defined."""
    hooks = dict(_LOOKED_AT)
    for prefix in ("", "r", "i"):
        for operator in _OPERATORS:
            name = f"__{prefix}{operator}__"
            # Without one of these, Python takes the plain operator.
            if not (prefix == "i" and f"__{operator}__" in vars(kind)):
                hooks[name] = "is computed with"
    for name, what in hooks.items():
        if name not in vars(kind):
            setattr(kind, name, _hook(name, what))


_close(OpaqueNumber)
_close(OpaqueList)
_close(OpaqueSource)
_close(OpaqueKept)
setattr(OpaqueSource, "__next__", _hook("__next__", "is advanced"))  # noqa: B010 - as the others


def is_kept(value: object) -> bool:
    """Return whether a value is one that only an ``OpaqueKept`` stands for."""
    return isinstance(value, torch.Tensor) or type(value) in {dict, tuple}


def opaque(value: object, name: str, uses: Uses, *, keeps: bool) -> _Opaque | None:
    """Return a stand-in, or ``None`` where there is none for such values.

    Args:
        keeps: whether what has no number or length may have one, too. Comparisons by ``is`` are no uses that show, so
            that it takes more than a stand-in to show that nobody makes any.
    """
    if type(value) in {int, float}:
        return OpaqueNumber(type(value), name, uses)
    if type(value) in {list, deque}:
        return OpaqueList(type(value), name, uses)
    if keeps and is_kept(value):
        return OpaqueKept(type(value), name, uses)
    return OpaqueSource(type(value), name, uses) if is_source(value) else None


def is_source(value: object) -> bool:
    """Return whether a value gives another one each time it is asked; of what all draw from, captures see the state."""
    if isinstance(value, _RANDOM):
        return not any(value is of_all for of_all in _OF_ALL)
    return hasattr(type(value), "__next__")


def is_opaque(value: object) -> bool:
    """Return whether a value is a stand-in."""
    return issubclass(type(value), _Opaque)


def is_talk(code: types.CodeType) -> bool:
    """Return whether code is Python's own that makes log messages, of which nothing comes back."""
    path = code.co_filename
    return "/logging/" in path and origin_of_file(path) is Origin.PYTHON


def _is_program(frame: types.FrameType) -> bool:
    return origin_of_file(frame.f_code.co_filename) not in {
        Origin.OWN,
        Origin.TORCH,
        Origin.PYTHON,
    }
