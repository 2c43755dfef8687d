"""Which code of a program's author a module can reach, in an order that is the same in every process.

A function is followed through its constants, defaults, closure and the globals that its bytecode names,
and a class through its attributes, so that an edited helper, another global constant or a patched
method shows. Installed libraries count by the version and the source file; of them only what was
replaced by code from elsewhere is followed.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import sys
import types
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

_INSTALLED = ("site-packages", "dist-packages")
_NOT_CODE = {
    "__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__dataclass_fields__",
    "__abstractmethods__", "_abc_impl", "__annotate_func__", "__annotations_cache__",
    "__firstlineno__", "__static_attributes__", "__type_params__",
}  # fmt: skip


@cache
def is_builtin(module: str | None) -> bool:
    """Return whether a module belongs to torch or Python, whose versions a plan's fingerprint names."""
    top = (module or "builtins").partition(".")[0]
    return top == "torch" or (top in sys.stdlib_module_names and top != "__main__")


def is_installed(path: str) -> bool:
    """Return whether a source file belongs to an installed library."""
    return any(part in _INSTALLED for part in Path(path).parts)


def library_parts(item: Any) -> tuple[str, ...]:
    """Return what identifies a class or function of an installed library."""
    module: str = item.__module__
    return (module, item.__qualname__, _version(module.partition(".")[0]), _source_digest(module))


def class_parts(cls: type) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a class that code or data can hide in, by name."""
    for name, value in sorted(vars(cls).items()):
        if name not in _NOT_CODE:
            yield name, unwrapped(value)


def replaced_functions(cls: type) -> Iterator[tuple[str, types.FunctionType]]:
    """Yield the functions from elsewhere in a library's class and in the module that defines it."""
    module = sys.modules.get(cls.__module__)
    for owner in (cls, module):
        for name, value in sorted(vars(owner).items()) if owner else ():
            function = unwrapped(value)
            if isinstance(function, types.FunctionType) and not is_library_function(function):
                yield name, function


def is_library_function(function: types.FunctionType) -> bool:
    """Return whether a function's code is torch's, Python's or an installed library's."""
    return is_builtin(function.__globals__.get("__name__")) or is_installed(
        function.__code__.co_filename
    )


def unwrapped(value: Any) -> Any:
    """Return the function in a method, property or cache wrapper; anything else as it is."""
    if isinstance(value, (staticmethod, classmethod)):
        return value.__func__
    if isinstance(value, property):
        return (value.fget, value.fset)
    if isinstance(value, functools.cached_property):
        return value.func
    if isinstance(value, functools._lru_cache_wrapper):
        return value.__wrapped__
    return value


def code_parts(code: types.CodeType) -> Iterator[object]:
    """Yield the bytecode, the names and the constants of a function and of those inside it."""
    yield code.co_code.hex(), code.co_names, code.co_varnames, code.co_freevars
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from code_parts(constant)
        elif isinstance(constant, frozenset):
            yield sorted(map(repr, constant))
        else:
            yield constant


def named_globals(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the globals that a function's bytecode names, and what it names in modules among them."""
    names = sorted(_all_names(function.__code__))
    for name in names:
        if name not in function.__globals__:
            continue
        value = function.__globals__[name]
        yield name, value
        if isinstance(value, types.ModuleType):
            for inner in names:
                if inner in vars(value):
                    yield f"{name}.{inner}", vars(value)[inner]


def _all_names(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _all_names(constant)
    return names


@cache
def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _source_digest(module: str) -> str:
    path = getattr(sys.modules.get(module), "__file__", None)
    try:
        return _file_digest(path, os.stat(path).st_mtime_ns) if path else ""
    except OSError:
        return ""


@cache
def _file_digest(path: str, mtime_ns: int) -> str:
    del mtime_ns  # part of the key, so that an edited file is read again
    return hashlib.blake2b(Path(path).read_bytes(), digest_size=16).hexdigest()
