"""Kept watches: the values that a capture of another process read, found again in this one."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from gascompile.capture.fingerprint.code_names import codes_in
from gascompile.capture.fingerprint.code_origin import key_of
from gascompile.capture.record.dependencies import Dependencies, moved_places
from gascompile.capture.record.library_values import place_key
from gascompile.capture.record.record import is_of_library, is_own
from gascompile.capture.record.watched import Watches
from gascompile.capture.record.watches import Code, watch


def watched(
    model: nn.Module,
    known: Dependencies,
    functions: Sequence[Callable[..., Any]] = (),
    *,
    versions: bool = True,
) -> Watches:
    """Return the values that a capture of another process read, as they are now; see ``Recorder``."""
    code, moved = _code_of(known), moved_places(known)
    watches = watch(
        model,
        functions,
        [row for row in code if is_own(*row)],
        known.reading(),
        versions=versions,
        libraries=[row for row in code if is_of_library(row[0])],
        steady=lambda owner, key: place_key(owner, key) not in moved,
    )
    watches.variables(known.environment)
    watches.files(known.files)
    watches.settings(known.settings)
    return watches.without(frozenset(known.inert))


def _code_of(known: Dependencies) -> list[Code]:
    """Return the functions that ran and that are loaded, with their globals."""
    ran, codes_there = set(known.ran), []
    files, names = ({key.rpartition(":")[part] for key in ran} for part in (0, 2))
    modules: list[tuple[str, Any]] = list(sys.modules.items())
    for name, module in modules:
        if isinstance(module, types.ModuleType) and vars(module).get("__file__") in files:
            codes = (code for code in _codes(name, module) if code.co_qualname in names)
            codes_there += [(code, vars(module)) for code in codes if key_of(code) in ran]
    return codes_there


def _codes(name: str, module: types.ModuleType) -> Iterator[types.CodeType]:
    """Yield the code of a module's functions and methods."""
    todo = [value for value in vars(module).values() if _module_of(value) == name]
    seen: set[int] = set()
    for value in todo:
        # By its type alone: some classes warn whoever asks their objects anything.
        if issubclass(type(value), type):
            # Classes may hold each other.
            todo += [] if id(value) in seen else vars(value).values()
            seen.add(id(value))
            continue
        inner: Any = value
        if issubclass(type(value), property):
            inner = value.fget
        elif issubclass(type(value), (classmethod, staticmethod, types.MethodType)):
            inner = value.__func__
        if not callable(inner):
            continue
        code = getattr(inspect.unwrap(inner), "__code__", None)
        if isinstance(code, types.CodeType):
            yield from codes_in(code)


def _module_of(value: object) -> object:
    """Return the name of the module that made a value, past what its class does when it is asked: some warn."""
    try:
        return object.__getattribute__(value, "__module__")
    except AttributeError:
        return None
