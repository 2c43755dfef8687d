"""Dependencies: what one capture read beyond its model, kept beside the plan and compared before the next use.

The model's digest covers what can be seen from it; this covers what only shows while the code runs: code
that no name leads to, modules imported on the way, environment variables, files, and what library code
found under the names that it uses. Comparing runs no code of the program and imports nothing.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import sys
import types
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar

import torch

from gascompile.capture.fingerprint.code_fingerprint import code_digest, module_digest
from gascompile.capture.fingerprint.code_names import absolute_name, names_of
from gascompile.capture.fingerprint.code_origin import (
    Origin,
    origin_of_module,
    origin_of_name,
    place_of,
    wrapped_by,
)
from gascompile.capture.fingerprint.replaced import is_library_code
from gascompile.capture.fingerprint.value_digest import ValueDigest
from gascompile.capture.record.asked_settings import SETTINGS
from gascompile.capture.record.function_tables import table_of
from gascompile.capture.record.library_values import (
    asked,
    followed,
    is_plain_value,
    place_key,
    plain_places,
)
from gascompile.capture.record.recorder import Running, variable
from gascompile.capture.record.watched import Reads
from gascompile.capture.record.watches import Code

_PLAIN = (int, float, complex, str, bytes)
_NONE = ""
_ARITHMETIC = {"sympy", "mpmath"}
"""By which torch reckons with sizes: they import as they go, and no model reads of them."""
_VERSIONED = {Origin.INSTALLED, Origin.TORCH}


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependencies:
    """Digests by the name of what they are of; an empty digest stands for what was not there."""

    FORMAT: ClassVar[str] = "gascompile.dependencies/2"

    environment: Mapping[str, str]
    files: Mapping[str, str]
    imported: Mapping[str, str]
    """Modules of the program that the capture imported first -> their source."""
    modules: Mapping[str, str]
    """Modules of the program that were imported by a computed name -> all that is in them."""
    functions: Mapping[str, str]
    """Functions ``module:name`` that ran and that the model's digest does not cover."""
    libraries: Mapping[str, str]
    """Modules of libraries -> what their code found under the names that it uses."""
    library_names: Mapping[str, tuple[str, ...]]
    moved: tuple[str, ...] = ()
    """Plain values in libraries, ``module:name``, that the capture itself changed."""
    loaded: tuple[str, ...] = ()
    """Those of ``libraries`` that the capture imported first: where one is not imported yet, it comes as it came."""
    reads: tuple[str, ...] | None
    """Attributes that were read; ``None`` for all."""
    ran: tuple[str, ...]
    own: tuple[str, ...] | None = None
    """The program's code that ran and was there before, by ``own_key``; ``None`` where an earlier version kept none."""
    inert: tuple[str, ...] = ()
    """Values that the capture changes itself, and that are proven not to matter."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Settings of torch that it asked for."""

    def broken(self) -> str | None:
        """Return what is not as it was, or ``None``."""
        if self.own is None:
            return "it is not known which code of the program ran"
        for key, was in self.environment.items():
            if _text_digest(variable(key)) != was:
                return f"the environment variable {key} has another value"
        for name, was in self.settings.items():
            if name not in SETTINGS or repr(SETTINGS[name]()) != was:
                return f"{name} has another answer"
        for path, was in self.files.items():
            if _file_digest(path) != was:
                return f"the file {path} has changed"
        for name, was in self.imported.items():
            if name in sys.modules:
                return f"the module {name} is imported already"
            if _file_digest(name_and_path(was)[1]) != name_and_path(was)[0]:
                return f"the source of {name} has changed"
        for name, was in self.modules.items():
            if _module_values(name) != was:
                return f"the module {name} has changed or is not imported yet"
        for name, was in self.functions.items():
            if _function_digest(name) != was:
                return f"{name} has changed or is not imported yet"
        for name, was in self.libraries.items():
            if name in self.loaded and name not in sys.modules:
                continue
            names = self.library_names.get(name, ())
            if _library_digest(name, names, self.reading(), self.moved) != was:
                return f"something in {name} was replaced"
        return None

    def reading(self) -> Reads:
        """Return which values count while the plan is in use."""
        names = None if self.reads is None else frozenset(self.reads)
        return Reads(names=names, ran=frozenset(self.ran))


def dependencies(
    running: Running, reads: Reads, own: Iterable[Code], reached: frozenset[str]
) -> tuple[Dependencies, list[str]]:
    """Return what a capture depended on, and why another one may differ all the same.

    Args:
        running: what ran.
        reads: which values the code reads.
        own: the program's code among what ran.
        reached: functions that the model's digest covers, by ``place_of``.
    """
    reasons: list[str] = []
    imported, modules = _modules(running)
    functions: dict[str, str] = {}
    there = [(body, space) for body, space in own if space.get("__name__") not in imported]
    for body, space in there:
        if place_of(body) in reached:
            continue
        name = f"{space.get('__name__')}:{body.co_qualname}"
        if _function_code(name) is not body:
            reasons.append(f"{body.co_qualname} ran, to which no name leads from the model")
            continue
        functions[name] = _function_digest(name)
        if not functions[name]:
            reasons.append(f"{name} uses what cannot be compared")
    reasons += [
        f"the module {name} holds what cannot be compared" for name in modules if not modules[name]
    ]
    used = _library_names(running)
    moved = sorted(
        {name for place, name in _places(used, reads) if not running.first_seen.is_steady(*place)}
    )
    known = Dependencies(
        environment={k: _text_digest(v) for k, v in sorted(running.environment.items())},
        files={path: _file_digest(path) for path in sorted(running.files)},
        imported=imported,
        modules=modules,
        functions=functions,
        libraries={
            name: _library_digest(name, names, reads, moved) for name, names in used.items()
        },
        moved=tuple(moved),
        library_names=used,
        loaded=tuple(sorted(running.imported & used.keys())),
        reads=None if reads.names is None else tuple(sorted(reads.names)),
        ran=tuple(sorted(reads.ran or ())),
        own=tuple(sorted({own_key(body) for body, _ in there})),
        settings={name: repr(SETTINGS[name]()) for name in sorted(running.settings)},
    )
    return known, reasons


def own_key(code: types.CodeType) -> str:
    """Return what names the program's code in every process, wherever its file lies."""
    return f"{code.co_qualname}:{code_digest(code)}"


def _modules(running: Running) -> tuple[dict[str, str], dict[str, str]]:
    """Return the program's modules that were imported on the way, and those imported by a computed name."""
    imported, modules = {}, {}
    for name in sorted(running.modules):
        module = sys.modules.get(name)
        if module is None or origin_of_module(module).versioned:
            continue
        if name in running.imported:
            path = str(getattr(module, "__file__", None) or "")
            imported[name] = f"{_file_digest(path)} {path}"
        else:
            modules[name] = _module_values(name)
    return imported, modules


def name_and_path(entry: str) -> tuple[str, str]:
    """Return the digest and the path of a source file."""
    digest, _, path = entry.partition(" ")
    return digest, path


def _module_values(name: str) -> str:
    module = sys.modules.get(name)
    if module is None:
        return _NONE
    digest = ValueDigest()
    digest.value(module, name)
    text = digest.digest()
    return _NONE if digest.opaque else text


def _function(name: str) -> Any:
    """Return what a module holds under a qualified name, through the classes on the way."""
    module, _, qualified = name.partition(":")
    at_name: Any = sys.modules.get(module)
    for part in qualified.split("."):
        space = vars(at_name) if isinstance(at_name, types.ModuleType | type) else {}
        at_name = space.get(part)
    return at_name


def _function_code(name: str) -> types.CodeType | None:
    function = _function(name)
    function = getattr(function, "__func__", function)
    function = getattr(function, "fget", function)
    seen: dict[int, Any] = {}
    while id(function) not in seen and (wrapped := wrapped_by(function)) is not None:
        seen[id(function)] = function
        function = wrapped
    return getattr(function, "__code__", None)


def _function_digest(name: str) -> str:
    digest = ValueDigest()
    digest.value(_function(name), name)
    text = digest.digest()
    return _NONE if digest.opaque else text


def _library_names(running: Running) -> dict[str, tuple[str, ...]]:
    """Return the globals that library code used which ran, by module."""
    used: dict[str, set[str]] = {}
    for body, space in running.code.values():
        name = space.get("__name__")
        module = sys.modules.get(name) if isinstance(name, str) else None
        if module is None or vars(module) is not space or not isinstance(name, str):
            continue
        if origin_of_module(module) in _VERSIONED:
            used.setdefault(name, set())
            names = names_of(body)
            for chain in names.chains:
                if chain[0] in space:
                    holder, rest = _holder(name, chain, running.imported)
                    used.setdefault(holder, set()).update([".".join(rest)] if rest else ())
            for taken in names.imports:
                source = absolute_name(taken, space)
                is_arithmetic = source.partition(".")[0] in _ARITHMETIC
                if (
                    taken.names
                    and not is_arithmetic
                    and origin_of_module(sys.modules.get(source)) in _VERSIONED
                ):
                    used.setdefault(source, set()).update(taken.names)
    return {name: tuple(sorted(names)) for name, names in sorted(used.items())}


def _holder(
    name: str, chain: Sequence[str], imported: Collection[str]
) -> tuple[str, Sequence[str]]:
    """Return the module, and the name in it, that a dotted name is looked for in.

    That is where it begins, or the last module on its way that the capture imported first: in another process that
    one is not there yet.
    """
    place, space = (name, chain), vars(sys.modules[name])
    for i, key in enumerate(chain):
        value = space.get(key)
        if not isinstance(value, types.ModuleType):
            break
        if value.__name__ in imported and origin_of_module(value) in _VERSIONED:
            place = (value.__name__, chain[i + 1 :])
        space = vars(value)
    return place


def _library_digest(name: str, names: Iterable[str], reads: Reads, moved: Collection[str]) -> str:
    module = sys.modules.get(name)
    if module is None:
        return _NONE
    parts: list[object] = [name]
    space = vars(module)
    if origin_of_module(module) is Origin.INSTALLED:
        parts.append(module_digest(name))
        parts += [
            (place, repr(asked(owner, key)))
            for (owner, key), place in sorted(_places({name: names}, reads), key=itemgetter(1))
            if place not in moved
        ]
    parts += [
        (key, _identity(_followed(space, key))) for key in names if f"{name}:{key}" not in moved
    ]
    return _digest(repr(parts))


def _places(
    used: Mapping[str, Iterable[str]], reads: Reads
) -> Iterator[tuple[tuple[Any, Any], str]]:
    """Yield the numbers, words and flags that are, or are in, what libraries' code finds under its names."""
    for name, names in used.items():
        module = sys.modules.get(name)
        if module is None or origin_of_module(module) is not Origin.INSTALLED:
            continue
        for chain in names:
            owner, key, value = followed(vars(module), chain.split("."))
            if is_plain_value(value) and key in owner:
                yield (owner, key), f"{name}:{chain}"
            for held, inner, place in plain_places(value, f"{name}:{chain}", reads.has):
                yield (held, inner), place


def moved_places(known: Dependencies) -> set[tuple[int, object]]:
    """Return where the values are that the capture itself changed, by identity."""
    places = _places(known.library_names, known.reading())
    return {place_key(*place) for place, name in places if name in known.moved}


def _followed(space: Mapping[str, Any], chain: str) -> object:
    """Return what a dotted name leads to, as far as it goes through modules."""
    value: object = None
    for key in chain.split("."):
        value = space.get(key)
        # The registry of ops fills up with what is imported; nothing in it can be put in another's place.
        if not isinstance(value, types.ModuleType) or value is torch.ops:
            break
        space = vars(value)
    return value


def _identity(value: object) -> object:
    """Return what tells a function or a number from the one that a library comes with, and from any other one."""
    if isinstance(value, types.FunctionType):
        if not is_library_code(value):
            return _all_of(value)
        return value.__module__, value.__qualname__, value.__code__.co_firstlineno
    if isinstance(value, type | types.BuiltinFunctionType):
        is_own = isinstance(value, type) and origin_of_name(value.__module__) is Origin.USER
        return _all_of(value) if is_own else (value.__module__, value.__qualname__)
    if isinstance(value, partial) or origin_of_name(type(value).__module__) is Origin.USER:
        return _all_of(value)
    if isinstance(value, Mapping):
        table, keys = table_of(value)
        return type(value).__name__, sorted((repr(key), _identity(table[key])) for key in keys)
    return (
        value if isinstance(value, _PLAIN) and not isinstance(value, bool) else type(value).__name__
    )


def _all_of(value: object) -> str:
    """Return the digest of a program's own value; another one each time where it holds what cannot be compared."""
    digest = ValueDigest()
    digest.value(value)
    text = digest.digest()
    return secrets.token_hex() if digest.opaque else text


def _digest(text: str | bytes) -> str:
    raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    return hashlib.blake2b(raw, digest_size=16).hexdigest()


def _text_digest(text: str | None) -> str:
    return _NONE if text is None else _digest(text)


def _file_digest(path: str) -> str:
    """Return the digest of a regular file; none for what is not there."""
    try:
        return _digest(Path(path).read_bytes()) if os.path.isfile(path) else _NONE
    except OSError:
        return _NONE
