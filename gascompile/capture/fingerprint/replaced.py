"""Replaced functions: what a program has put in the place of functions of torch or of installed libraries."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from gascompile.capture.fingerprint.code_origin import (
    Origin,
    origin_of_code,
    origin_of_file,
    origin_of_module,
)

_versioned_files: set[str] = set()
"""Files whose functions need no second look."""


def replaced_functions() -> list[tuple[str, types.FunctionType]]:
    """Return the place and the function of every global of a library that the program has set."""
    found = list(_foreign("torch.Tensor", vars(torch.Tensor)))
    modules: list[tuple[str, Any]] = sorted(
        sys.modules.items()
    )  # a program puts what it likes there
    for name, module in modules:
        if isinstance(module, types.ModuleType) and _holds_others(vars(module)):
            of_program = origin_of_module(module) in {Origin.OWN, Origin.USER}
            if not of_program and name != "__main__":
                found += _foreign(name, vars(module))
    return found


def _holds_others(space: Mapping[str, Any]) -> bool:
    """Return whether a module holds a function whose file does not say that it is a library's."""
    kind, known = types.FunctionType, _versioned_files
    paths = {value.__code__.co_filename for value in space.values() if type(value) is kind}
    if paths <= known:
        return False
    known.update(path for path in paths if origin_of_file(path).versioned)
    return not paths <= known


def _foreign(place: str, space: Mapping[str, Any]) -> Iterator[tuple[str, types.FunctionType]]:
    for name, value in sorted(space.items()):
        if type(value) is types.FunctionType and not origin_of_code(value).versioned:
            yield f"{place}.{name}", value
