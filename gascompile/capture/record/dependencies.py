"""Dependencies: what one capture read beyond its model, kept beside the plan and compared before the next use.

The model's digest covers what can be seen from it; this covers what only shows while the code runs: code
that no name leads to, modules imported on the way, environment variables, files, and what library code
found under the names that it uses. Comparing runs no code of the program and imports nothing.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from gascompile.capture.fingerprint.code_fingerprint import code_digest
from gascompile.capture.fingerprint.code_origin import (
    origin_of_module,
    place_of,
    wrapped_by,
)
from gascompile.capture.fingerprint.value_digest import ValueDigest
from gascompile.capture.record.asked_settings import SETTINGS
from gascompile.capture.record.library_digests import (
    NOT_THERE,
    digest_of,
    is_set_or_not_yet,
    library_digest,
    library_names,
    plain_in,
    set_first,
)
from gascompile.capture.record.library_values import (
    place_key,
)
from gascompile.capture.record.recorder import Running, variable
from gascompile.capture.record.watched import Reads
from gascompile.capture.record.watches import Code

_NONE = NOT_THERE


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
    set_first: Mapping[str, str] = field(default_factory=dict)
    """What the capture itself put where ``None`` was, ``module:name``, as libraries do at first use -> what it is."""
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
        reads, left_out = self.reading(), {*self.moved, *self.set_first}
        for name, was in self.libraries.items():
            if name in self.loaded and name not in sys.modules:
                continue
            names = self.library_names.get(name, ())
            if library_digest(name, names, reads, left_out) != was:
                return f"something in {name} was replaced"
        for place, was_set in self.set_first.items():
            if not is_set_or_not_yet(place, was_set, reads):
                return f"{place} was replaced"
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
    used, first = library_names(running), running.first_seen
    made = set_first(used, reads, first)
    moved = sorted({name for place, name in plain_in(used, reads) if not first.is_steady(*place)})
    known = Dependencies(
        environment={k: _text_digest(v) for k, v in sorted(running.environment.items())},
        files={path: _file_digest(path) for path in sorted(running.files)},
        imported=imported,
        modules=modules,
        functions=functions,
        libraries={
            name: library_digest(name, names, reads, {*moved, *made})
            for name, names in used.items()
        },
        moved=tuple(moved),
        library_names=used,
        set_first=made,
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


def moved_places(known: Dependencies) -> set[tuple[int, object]]:
    """Return where the values are that the capture itself changed, by identity."""
    places = plain_in(known.library_names, known.reading())
    return {place_key(*place) for place, name in places if name in known.moved}


def _text_digest(text: str | None) -> str:
    return _NONE if text is None else digest_of(text)


def _file_digest(path: str) -> str:
    """Return the digest of a regular file; none for what is not there."""
    try:
        return digest_of(Path(path).read_bytes()) if os.path.isfile(path) else _NONE
    except OSError:
        return _NONE
