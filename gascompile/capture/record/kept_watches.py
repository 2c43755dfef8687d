"""Kept watches: the values that a capture of another process read, found again in this one."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from gascompile.capture.fingerprint.code_names import codes_in
from gascompile.capture.fingerprint.code_origin import key_of, origin_of_module, wrapped_by
from gascompile.capture.record.dependencies import Dependencies, moved_places, own_key
from gascompile.capture.record.library_values import place_key
from gascompile.capture.record.read_names import is_of_library
from gascompile.capture.record.record import is_own
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
    own, reads = [row for row in code if is_own(*row)], known.reading()
    here = {key_of(body) for body, _ in own}  # the files may lie elsewhere now
    watches = watch(
        model,
        functions,
        own,
        replace(reads, ran=frozenset(here.union(reads.ran or ()))),
        versions=versions,
        libraries=[row for row in code if is_of_library(row[0])],
        steady=lambda owner, key: place_key(owner, key) not in moved,
    )
    watches.variables(known.environment)
    watches.files(known.files)
    watches.settings(known.settings)
    return watches.without(frozenset(known.inert))


def unseen(
    model: nn.Module, known: Dependencies, functions: Sequence[Callable[..., Any]] = ()
) -> str | None:
    """Return which code of the program ran and is not found in this process; ``None`` where all is.

    What it reads would not be watched.
    """
    missing = set(known.own or ())
    if missing:
        missing -= {own_key(code) for code, _ in _code_of(known)}
    if missing:
        followed = watched(model, known, functions).functions
        missing -= {own_key(inner) for code in followed for inner in codes_in(code)}
    return next((key.rpartition(":")[0] for key in sorted(missing)), None)


def _code_of(known: Dependencies) -> list[Code]:
    """Return the functions that ran and that are loaded, with their globals."""
    ran, own, codes_there = set(known.ran), set(known.own or ()), []
    files, names = ({key.rpartition(":")[part] for key in ran} for part in (0, 2))
    names |= {key.rpartition(":")[0] for key in own}
    modules: list[tuple[str, Any]] = list(sys.modules.items())
    for name, module in modules:
        if not isinstance(module, types.ModuleType):
            continue
        # The program's code may lie in no file, or in another one than before.
        is_own_module = bool(own) and not origin_of_module(module).versioned
        if is_own_module or vars(module).get("__file__") in files:
            codes = (code for code in _codes(name, module) if code.co_qualname in names)
            codes_there += [
                (code, vars(module))
                for code in codes
                if key_of(code) in ran or (is_own_module and own_key(code) in own)
            ]
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
        passed: dict[int, Any] = {}  # some objects answer whatever they are asked, without end
        while id(inner) not in passed and (wrapped := wrapped_by(inner)) is not None:
            passed[id(inner)] = inner
            inner = wrapped
        if issubclass(type(inner), types.FunctionType):
            yield from codes_in(inner.__code__)


def _module_of(value: object) -> object:
    """Return the name of the module that made a value, past what its class does when it is asked: some warn."""
    try:
        return object.__getattribute__(value, "__module__")
    except AttributeError:
        return None
