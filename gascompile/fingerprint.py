"""Fingerprints: digests of everything a plan is made from, so that a stale plan is never reused.

A module is hashed by what tracing it could see: the code of its classes and of what they call, its
plain attributes, the names, shapes, strides and dtypes of its tensors. No field is listed by hand; what
cannot be hashed by value makes the fingerprint unique, so that it never matches.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import sys
import types
import uuid
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy
import torch
from torch import nn

from gascompile.code_fingerprint import (
    class_parts,
    code_parts,
    is_builtin,
    is_installed,
    is_library_function,
    library_parts,
    named_globals,
    replaced_functions,
    unwrapped,
)

_NOT_STATE = {
    # Set by torch's own machinery; hooks are hashed by the functions in them.
    "_parameters", "_buffers", "_modules", "_version", "_compiled_call_impl",
    # Python's hash of a transformers configuration: another one in each process.
    "_original_object_hash",
}  # fmt: skip


def module_fingerprint(model: nn.Module) -> str:
    """Return a digest of the module's code, structure, plain attributes and tensor shapes."""
    hasher = _Hasher(model)
    names: dict[int, str] = {}
    storages: dict[int, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        hasher.add("module", path, module.training)
        hasher.value(type(module))
        for kind, tensors in (("p", module._parameters), ("b", module._buffers)):
            for name, tensor in tensors.items():
                if tensor is not None:
                    here = f"{path}.{name}"
                    hasher.add(
                        kind,
                        name,
                        names.setdefault(id(tensor), here),
                        _storage_name(tensor, here, storages),
                        str(tensor.dtype),
                        tuple(tensor.shape),
                        tensor.stride() if tensor.layout is torch.strided else str(tensor.layout),
                        str(tensor.device.type),
                    )
        hasher.add("non-persistent", sorted(module._non_persistent_buffers_set))
        for name, value in sorted(vars(module).items()):
            if name not in _NOT_STATE:
                hasher.add("attribute", name)
                hasher.value(value)
    return hasher.digest()


def _storage_name(tensor: torch.Tensor, name: str, storages: dict[int, str]) -> str:
    """Return the first name of a tensor in the same memory."""
    if tensor.layout is not torch.strided or tensor.device.type == "meta" or not tensor.numel():
        return name
    return storages.setdefault(tensor.untyped_storage().data_ptr(), name)


def versions() -> dict[str, str]:
    """Return the versions that a captured program depends on."""
    from gascompile import __version__

    return {"gascompile": __version__, "torch": str(torch.__version__)}


class _Hasher:
    """Feeds values of any kind to one hash, by value and without following cycles twice."""

    def __init__(self, model: nn.Module) -> None:
        self._registered = {id(module) for module in model.modules()}
        self._state = hashlib.blake2b(digest_size=20)
        self._seen: dict[int, tuple[int, object]] = {}
        self._in_code = 0

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
            self.add("again", self._seen[id(value)][0])
        else:
            self._seen[id(value)] = (len(self._seen), value)
            self._compound(value)

    def _tensor(self, value: torch.Tensor) -> None:
        self.add("tensor", str(value.dtype), tuple(value.shape), str(value.device))
        if value.device.type == "cpu" and not value.is_sparse and value.numel():
            raw = value.detach().contiguous().reshape(-1).view(torch.uint8)
            self._state.update(raw.numpy().data)

    def _compound(self, value: Any) -> None:
        value = unwrapped(value)
        if isinstance(value, nn.Module):
            self._module(value)
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
            self.value(value.__self__)
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, (types.BuiltinFunctionType, types.ModuleType)):
            self.add("named", getattr(value, "__module__", ""), value.__name__)
        else:
            self._object(value)

    def _module(self, module: nn.Module) -> None:
        self.value(type(module))
        if id(module) not in self._registered:
            # It is in a plain list or a global: its tensors become constants of the graph.
            for name, item in sorted(vars(module).items()):
                self.add("field", name)
                self.value(item)

    def _object(self, value: Any) -> None:
        cls = type(value)
        if isinstance(value, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            self.add("op", str(value))
        elif isinstance(value, (numpy.ndarray, numpy.generic)):
            self.add("array", str(value.dtype), value.shape, value.tobytes())
        elif self._in_code and is_builtin(cls.__module__):
            # A global such as a logger or a lock: the code that uses it decides what it means.
            self.add("global", cls.__module__, cls.__qualname__)
        elif hasattr(value, "__dict__") or dataclasses.is_dataclass(value):
            self.add("object")
            self.value(cls)
            for name, item in sorted(_fields(value).items()):
                if name not in _NOT_STATE:
                    self.add("field", name)
                    self.value(item)
        else:
            self.add("opaque", uuid.uuid4().hex)

    def _class(self, cls: type) -> None:
        self.add("class", cls.__module__, cls.__qualname__)
        for base in cls.__mro__:
            if is_builtin(base.__module__):
                continue
            module = sys.modules.get(base.__module__)
            if is_installed(getattr(module, "__file__", None) or ""):
                self.add("library", *library_parts(base))
                parts = replaced_functions(base)
            else:
                self.add("base", base.__module__, base.__qualname__)
                parts = class_parts(base)
            self._in_code += 1
            for name, item in parts:
                self.add("member", name)
                self.value(item)
            self._in_code -= 1

    def _function(self, value: types.FunctionType) -> None:
        self.add("function", value.__module__, value.__qualname__)
        if is_library_function(value):
            if not is_builtin(value.__module__):
                self.add(*library_parts(value))
            self._state_of(value)
            return
        self.add(*code_parts(value.__code__))
        self._state_of(value)
        self._in_code += 1
        for name, item in named_globals(value):
            self.add("global", name)
            self.value(item)
        self._in_code -= 1

    def _state_of(self, function: types.FunctionType) -> None:
        self.value(function.__defaults__)
        self.value(function.__kwdefaults__)
        for cell in function.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:  # not bound yet
                self.add("empty cell")
                continue
            self.value(content)


def _fields(value: Any) -> dict[str, Any]:
    if hasattr(value, "__dict__"):
        return dict(vars(value))
    return {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
