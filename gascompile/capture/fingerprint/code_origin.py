"""Where code comes from: Python, torch, an installed library, this package, or the program's author.

Decided by the place of the source file and never by a name, as a program may have a module ``queue`` of its
own. What is installed is versioned; all the rest may change between two runs.
"""

from __future__ import annotations

import enum
import importlib.machinery
import inspect
import os
import sys
import sysconfig
import types
from functools import cache
from pathlib import Path
from typing import Any

import torch

_INSTALLED = ("/site-packages/", "/dist-packages/")
_TORCH = str(Path(torch.__file__).parent) + "/"
_COMPILED = tuple(importlib.machinery.EXTENSION_SUFFIXES)
_OWN = ("gascompile", "cost_models", "passes", "runtime")


class Origin(enum.Enum):
    """Who wrote a piece of code, by where it lies."""

    PYTHON = "Python"
    TORCH = "torch"
    INSTALLED = "an installed library"
    OWN = "GASCompile"
    MADE = "made at run time"
    USER = "the program"

    @property
    def versioned(self) -> bool:
        """Whether a version or a file's digest stands for all of it."""
        return self is not Origin.USER and self is not Origin.MADE


@cache
def origin_of_file(path: str) -> Origin:
    """Return where the code of a source file comes from; ``<...>`` are texts that are in no file."""
    if path.startswith("<frozen "):
        return Origin.PYTHON
    if path.startswith("<"):
        return Origin.MADE
    if path.startswith(_TORCH):
        return Origin.TORCH
    if any(folder in f"/{path}" for folder in _INSTALLED):
        return Origin.INSTALLED
    if path.startswith(_python_folders()):
        return Origin.PYTHON
    return Origin.OWN if path.startswith(_own_folders()) else Origin.USER


def origin_of_module(module: types.ModuleType | None) -> Origin:
    """Return where a module comes from; one without a file is Python's if it is built in, else the user's."""
    if module is None:
        return Origin.USER
    path = getattr(module, "__file__", None)
    name = vars(module).get("__name__")
    if isinstance(path, str) and (path.startswith("<") or os.path.isabs(path)):
        origin = origin_of_file(path)
        # A program that is read from standard input says that it is in the file <stdin>.
        return Origin.USER if origin is Origin.MADE else origin
    if name in sys.builtin_module_names or _is_frozen(module):
        return Origin.PYTHON
    if isinstance(name, str) and name.partition(".")[0] == "torch":
        return Origin.TORCH  # torch.ops, torch._C._nn and others lie in no file
    parent = sys.modules.get(name.rpartition(".")[0]) if isinstance(name, str) else None
    if str(getattr(parent, "__file__", "")).endswith(_COMPILED):
        return origin_of_module(parent)  # pyexpat.errors and others that an extension makes
    return _origin_of_folders(module)


def origin_of_name(name: str | None) -> Origin:
    """Return where the loaded module of this name comes from."""
    return origin_of_module(sys.modules.get(name or "builtins"))


def origin_of_code(function: types.FunctionType) -> Origin:
    """Return where a function comes from: what was made at run time belongs to the module that made it."""
    origin = origin_of_file(function.__code__.co_filename)
    if origin is not Origin.MADE:
        return origin
    name = function.__globals__.get("__name__")
    module = sys.modules.get(name) if isinstance(name, str) else None
    return origin_of_module(module) if module is not None else Origin.MADE


def key_of(code: types.CodeType) -> str:
    """Return what names a function in every process: its file and its qualified name."""
    return f"{code.co_filename}:{code.co_qualname}"


def place_of(code: types.CodeType) -> str:
    """Return what tells a function from all others of this process."""
    return f"{key_of(code)}:{code.co_firstlineno}"


def wrapped_by(value: Any) -> Any:
    """Return the function that a wrapper stands for; ``None`` where ``value`` is none.

    Some objects answer with a new one of their kind, whatever is asked of them: only what is there counts.
    """
    # Most are functions, which keep it where it can be looked up at once.
    if type(value) is types.FunctionType:
        return vars(value).get("__wrapped__")
    if not callable(value) or inspect.getattr_static(value, "__wrapped__", None) is None:
        return None
    return value.__wrapped__


def own_bases(kind: type) -> tuple[type, ...]:
    """Return the classes of the program that a class is made from, itself among them."""
    return tuple(
        base
        for base in kind.__mro__
        if not (origin_of_name(base.__module__).versioned or issubclass(base, enum.Enum))
    )


def _is_frozen(module: types.ModuleType) -> bool:
    return getattr(vars(module).get("__spec__"), "origin", None) in {"frozen", "built-in"}


def _origin_of_folders(module: types.ModuleType) -> Origin:
    """Return the origin of a namespace package; one that mixes origins is the user's."""
    folders = [str(folder) for folder in vars(module).get("__path__", ())]
    origins = {origin_of_file(f"{folder}/__init__.py") for folder in folders}
    return origins.pop() if len(origins) == 1 else Origin.USER


@cache
def _python_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    folders = {paths["stdlib"], paths["platstdlib"], str(Path(types.__file__).parent)}
    return tuple(f"{folder}/" for folder in folders)


@cache
def _own_folders() -> tuple[str, ...]:
    package = Path(__file__).parents[2]
    # In a checkout the layers lie beside the package, in an installation within it.
    return tuple(f"{folder}/" for folder in (package, *(package.parent / n for n in _OWN[1:])))
