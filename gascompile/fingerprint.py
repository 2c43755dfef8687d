"""Fingerprints: digests of everything a plan is made from, so that a stale plan is never reused.

A module is hashed by what tracing it could see: the source of its classes, its plain attributes, the
names, shapes and dtypes of its tensors. No field is listed by hand; what cannot be hashed by value
makes the fingerprint unique, so that it never matches.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import inspect
import os
import types
import uuid
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

_NOT_STATE = {
    # Set by torch's own machinery; hooks are hashed by the functions in them.
    "_parameters", "_buffers", "_modules", "_version", "_compiled_call_impl",
    # Python's hash of a transformers configuration: another one in each process.
    "_original_object_hash",
}  # fmt: skip


def module_fingerprint(model: nn.Module) -> str:
    """Return a digest of the module's code, structure, plain attributes and tensor shapes."""
    hasher = _Hasher()
    names: dict[int, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        hasher.add("module", path, _class_digest(type(module)), module.training)
        for kind, tensors in (("p", module._parameters), ("b", module._buffers)):
            for name, tensor in tensors.items():
                if tensor is not None:
                    first = names.setdefault(id(tensor), f"{path}.{name}")
                    hasher.add(
                        kind,
                        name,
                        first,
                        str(tensor.dtype),
                        tuple(tensor.shape),
                        str(tensor.device.type),
                    )
        hasher.add("non-persistent", sorted(module._non_persistent_buffers_set))
        for name, value in sorted(vars(module).items()):
            if name not in _NOT_STATE:
                hasher.add("attribute", name)
                hasher.value(value)
    return hasher.digest()


def versions() -> dict[str, str]:
    """Return the versions that a captured program depends on."""
    from gascompile import __version__

    return {"gascompile": __version__, "torch": str(torch.__version__)}


@cache
def _file_digest(path: str, mtime_ns: int) -> str:
    del mtime_ns  # part of the key, so that an edited file is read again
    return hashlib.blake2b(Path(path).read_bytes(), digest_size=16).hexdigest()


def _class_digest(cls: type) -> str:
    """Return a digest of the source files of a class and its bases (torch's own by version)."""
    parts = []
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] in ("torch", "builtins", "typing", "abc"):
            continue
        parts.append(f"{base.__module__}.{base.__qualname__}:{_source_digest(base)}")
    return "|".join(parts)


def _source_digest(item: Any) -> str:
    try:
        path = inspect.getsourcefile(item)
        return _file_digest(path, os.stat(path).st_mtime_ns) if path else uuid.uuid4().hex
    except (TypeError, OSError):
        # A class typed at a prompt has no source to compare: never reuse a plan for it.
        return uuid.uuid4().hex


class _Hasher:
    """Feeds values of any kind to one hash, by value and without following cycles twice."""

    def __init__(self) -> None:
        self._state = hashlib.blake2b(digest_size=20)
        self._seen: dict[int, object] = {}

    def add(self, *parts: object) -> None:
        self._state.update(repr(parts).encode())

    def digest(self) -> str:
        return self._state.hexdigest()

    def value(self, value: Any) -> None:
        if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
            self.add(type(value).__name__, value)
        elif isinstance(
            value, (torch.dtype, torch.device, torch.layout, torch.Size, enum.Enum, range)
        ):
            self.add(type(value).__name__, str(value))
        elif isinstance(value, torch.Tensor):
            self._tensor(value)
        elif id(value) in self._seen:
            self.add("again", list(self._seen).index(id(value)))
        else:
            self._seen[id(value)] = value
            self._compound(value)

    def _tensor(self, value: torch.Tensor) -> None:
        self.add("tensor", str(value.dtype), tuple(value.shape), str(value.device))
        if value.device.type == "cpu" and not value.is_sparse and value.numel():
            raw = value.detach().contiguous().reshape(-1).view(torch.uint8)
            self._state.update(raw.numpy().data)

    def _compound(self, value: Any) -> None:
        if isinstance(value, nn.Module):
            self.add("submodule", type(value).__qualname__)
        elif isinstance(value, Mapping):
            self.add("mapping", type(value).__name__, len(value))
            for key, item in value.items():
                self.value(key)
                self.value(item)
        elif isinstance(value, (set, frozenset)):
            self.add("set", sorted(map(repr, value)))
        elif isinstance(value, (list, tuple)):
            self.add(type(value).__name__, len(value))
            for item in value:
                self.value(item)
        elif isinstance(value, partial):
            self.value((value.func, value.args, value.keywords))
        elif isinstance(value, types.MethodType):
            self.value(value.__func__)
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, (type, types.BuiltinFunctionType, types.ModuleType)):
            self.add("named", getattr(value, "__module__", ""), value.__name__)
        elif dataclasses.is_dataclass(value) or hasattr(value, "__dict__"):
            self.add("object", _class_digest(type(value)))
            for name, item in sorted(vars(value).items()):
                if name not in _NOT_STATE:
                    self.add("field", name)
                    self.value(item)
        else:
            self.add("opaque", uuid.uuid4().hex)

    def _function(self, value: types.FunctionType) -> None:
        self.add("function", value.__module__, value.__qualname__, value.__code__.co_code.hex())
        self.value(
            [const for const in value.__code__.co_consts if not isinstance(const, types.CodeType)]
        )
        self.value(value.__defaults__)
        for cell in value.__closure__ or ():
            self.value(cell.cell_contents)
