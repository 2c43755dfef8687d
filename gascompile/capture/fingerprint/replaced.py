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
    kind, known = types.FunctionType, _versioned_files
    for name, module in sorted(sys.modules.items()):
        if isinstance(module, types.ModuleType):
            for value in vars(module).values():
                if type(value) is kind and value.__code__.co_filename not in known:
                    found += _in_module(name, module)
                    break
    return found


def _in_module(name: str, module: types.ModuleType) -> list[tuple[str, types.FunctionType]]:
    space = vars(module)
    paths = {v.__code__.co_filename for v in space.values() if type(v) is types.FunctionType}
    _versioned_files.update(path for path in paths if origin_of_file(path).versioned)
    if paths <= _versioned_files:
        return []
    if origin_of_module(module) in {Origin.OWN, Origin.USER} or name == "__main__":
        return []
    return list(_foreign(name, space))


def _foreign(place: str, space: Mapping[str, Any]) -> Iterator[tuple[str, types.FunctionType]]:
    for name, value in sorted(space.items()):
        if type(value) is types.FunctionType and not origin_of_code(value).versioned:
            yield f"{place}.{name}", value
