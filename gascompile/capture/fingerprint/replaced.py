"""Replaced functions: what a program has put in the place of functions of torch or of installed libraries."""

from __future__ import annotations

import dis
import inspect
import os
import sys
import types
from collections.abc import Iterator, Mapping
from operator import itemgetter
from types import FunctionType
from typing import Any

import torch
from torch._C._dynamo.guards import dict_version

from gascompile.capture.fingerprint.audit import heard, listen
from gascompile.capture.fingerprint.code_origin import (
    Origin,
    origin_of_code,
    origin_of_file,
    origin_of_module,
)


class _LibrariesOwn:
    """Modules that held functions of libraries alone when they were last looked at."""

    def __init__(self) -> None:
        self.versions: dict[str, int] = {}
        """Of their globals: one changes with whatever is set or taken away, and no two dictionaries have the same."""
        self.files: set[str] = set()
        """That the code of libraries lies in."""
        self.num_rewritten = 0
        """How many functions had been given other code, where they lie, by then."""
        self._has_looked = False

    def forget_rewritten(self) -> None:
        """Forget all where a function may have been given other code since."""
        if self._has_looked and (not listen() or heard.num_rewritten != self.num_rewritten):
            self.num_rewritten = heard.num_rewritten
            self.versions.clear()

    def has_looked(self) -> None:
        """Listen from the first look at all functions on: looking takes twice as long for who is heard."""
        if not self._has_looked:
            self._has_looked = True
            listen()
            self.num_rewritten = heard.num_rewritten


_libraries_own = _LibrariesOwn()
_OF_PROGRAM = frozenset({Origin.OWN, Origin.USER})
_PASSING_ON = {
    "RESUME", "COPY_FREE_VARS", "PUSH_NULL", "LOAD_DEREF", "LOAD_FAST", "LOAD_FAST_BORROW", "PRECALL", "CALL",
    "RETURN_VALUE",
}  # fmt: skip
"""All that a function does which calls another one and returns what that returns."""


def replaced_functions() -> list[tuple[str, FunctionType]]:
    """Return the place and the function of every global of a library that the program has set."""
    _libraries_own.forget_rewritten()
    functions = list(_foreign("torch.Tensor", vars(torch.Tensor)))
    modules: list[tuple[str, Any]] = [*sys.modules.items()]  # a program puts what it likes there
    known = _libraries_own.versions.get
    # [Empirical] Of 5,500 modules with 50,000 functions this takes 3 ms, where few have changed.
    changed = [
        (name, module)
        for name, module in modules
        if isinstance(module, types.ModuleType) and dict_version(vars(module)) != known(name)
    ]
    for name, module in sorted(changed, key=itemgetter(0)):
        if not _holds_others(name, module) or _lies_in_program(module):
            continue
        if name != "__main__" and origin_of_module(module) not in _OF_PROGRAM:
            functions += _foreign(name, vars(module))
    _libraries_own.has_looked()
    return functions


def _holds_others(name: str, module: types.ModuleType) -> bool:
    """Return whether a module holds a function whose file does not say that it is a library's."""
    space = vars(module)
    version = dict_version(space)
    paths = {v.__code__.co_filename for v in space.values() if type(v) is FunctionType}
    if not paths <= _libraries_own.files:
        if not all(origin_of_file(path).versioned for path in paths):
            return True
        _libraries_own.files |= paths
    _libraries_own.versions[name] = version
    return False


def _lies_in_program(module: types.ModuleType) -> bool:
    """Return whether a module's file says that it is the program's: most of those that hold others are."""
    path = vars(module).get("__file__")
    return isinstance(path, str) and os.path.isabs(path) and origin_of_file(path) in _OF_PROGRAM


def _foreign(place: str, space: Mapping[str, Any]) -> Iterator[tuple[str, FunctionType]]:
    for name, value in sorted(space.items()):
        if type(value) is FunctionType and not is_library_code(value):
            yield f"{place}.{name}", value


def is_library_code(function: FunctionType) -> bool:
    """Return whether a version stands for what a function does, and for what it holds where that was made for it.

    A decorator may make, of text, a function that has the signature of another one and calls that. Which libraries
    were imported is no part of a program, so these are not taken for the program's.
    """
    if origin_of_code(function).versioned:
        return True
    inner = _passed_on_to(function)
    return (
        inner is not None and "<locals>" in inner.__qualname__ and _is_made_of_library_code(inner)
    )


def _is_made_of_library_code(function: FunctionType) -> bool:
    if not origin_of_code(function).versioned and _passed_on_to(function) is None:
        return False
    held = [cell.cell_contents for cell in function.__closure__ or ()]
    return all(_is_made_of_library_code(f) for f in held if isinstance(f, FunctionType))


def _passed_on_to(function: FunctionType) -> FunctionType | None:
    """Return the function that gets all arguments as they are; ``None`` where anything else is done."""
    code = function.__code__
    steps = list(dis.get_instructions(code))
    flags = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
    names = [step.argval for step in steps if step.opname.startswith("LOAD_FAST")]
    counts = [step.arg for step in steps if step.opname == "CALL"]
    is_plain = not (code.co_kwonlyargcount or code.co_flags & flags or function.__defaults__)
    if (
        {step.opname for step in steps} <= _PASSING_ON
        and is_plain
        and names == list(code.co_varnames) == list(code.co_varnames[: code.co_argcount])
        and counts == [len(names)]
        and len(code.co_freevars) == 1
    ):
        assert function.__closure__ is not None
        inner = function.__closure__[0].cell_contents
        return inner if isinstance(inner, FunctionType) else None
    return None
