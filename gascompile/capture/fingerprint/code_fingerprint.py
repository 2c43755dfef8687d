"""Which code of a program's author a module can reach, in an order that is the same in every process.

A function is followed through its constants, defaults, closure and the globals that its bytecode names,
and a class through its attributes, so that an edited helper, another global constant or a patched
method shows. Installed libraries count by the version and the source file; of them only what was
replaced by code from elsewhere is followed.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import sys
import types
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any


def library_parts(item: Any) -> tuple[str, ...]:
    """Return what identifies a class or function of an installed library."""
    module: str = item.__module__
    return (module, item.__qualname__, _version(module.partition(".")[0]), module_digest(module))


def code_parts(code: types.CodeType) -> Iterator[object]:
    """Yield the bytecode, the names and the constants of a function and of those inside it."""
    yield code.co_code.hex(), code.co_names, code.co_varnames, code.co_freevars
    yield code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
    yield getattr(code, "co_exceptiontable", b"").hex()
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from code_parts(constant)
        else:
            yield _constant(constant)


def code_digest(code: types.CodeType) -> str:
    """Return what tells code from all that does or names anything else."""
    return hashlib.blake2b(repr(list(code_parts(code))).encode(), digest_size=8).hexdigest()


def _constant(constant: object) -> object:
    """Return a constant in an order that is the same in every process."""
    if isinstance(constant, frozenset):
        return sorted(repr(_constant(item)) for item in constant)
    return tuple(map(_constant, constant)) if isinstance(constant, tuple) else constant


@cache
def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def module_digest(module: str) -> str:
    """Return the digest of a loaded module's source file; empty where it has none."""
    path = getattr(sys.modules.get(module), "__file__", None)
    try:
        return _file_digest(path, os.stat(path).st_mtime_ns) if path else ""
    except OSError:
        return ""


@cache
def _file_digest(path: str, mtime_ns: int) -> str:
    del mtime_ns  # part of the key, so that an edited file is read again
    return hashlib.blake2b(Path(path).read_bytes(), digest_size=16).hexdigest()
