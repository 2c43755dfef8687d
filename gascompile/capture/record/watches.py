"""Watches: the plain Python values that captured code read, compared with those of today in microseconds.

A trace bakes in numbers, flags and functions. They are found by walking from the model and from the code that ran,
through exactly the names that this code reads.
"""

from __future__ import annotations

import builtins
import contextvars
import linecache
import sys
import types
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sized
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from gascompile.capture.fingerprint.code_names import Import, Names, absolute_name, names_of
from gascompile.capture.fingerprint.code_origin import (
    Origin,
    origin_of_code,
    origin_of_module,
    origin_of_name,
    own_bases,
    wrapped_by,
)
from gascompile.capture.record.containers import GETTERS, INERT, is_held, names_asked
from gascompile.capture.record.contents import ARRAYS
from gascompile.capture.record.function_tables import names_and_tables, table_of
from gascompile.capture.record.library_values import Steady, is_plain_value, plain_places
from gascompile.capture.record.likeness import GONE, is_scalar
from gascompile.capture.record.op_names import backward_places, look_up_op, look_up_overloads
from gascompile.capture.record.opaque import is_source
from gascompile.capture.record.stand_ins import ASKED, Current, held_by, slot_of, stored_items
from gascompile.capture.record.watched import HOOKS, Reads, Watches, attribute_of
from gascompile.core.tensor_attributes import attributes_of

Code = tuple[types.CodeType, dict[str, Any]]

_TENSORS = {"_parameters", "_buffers"}
_MIRRORS = {"_flat_weights", "_flat_weight_refs"}  # recurrent layers make them in every trace
_MANY_ENTRIES = 4096  # a larger table is compared by what was read of it alone
# Hooks that each call of any module runs.
_OF_ALL_MODULES = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks")
_OWN_MODULE = {("globals",), ("sys", "modules")}  # code mostly asks them for its own module
_CHANGED_BY_METHODS = (list, dict, set, deque, bytearray)


def watch(
    model: nn.Module,
    functions: Collection[Any],
    code: Collection[Code],
    reads: Reads,
    *,
    versions: bool,
    libraries: Collection[Code] = (),
    steady: Steady = lambda owner, key: True,
) -> Watches:
    """Return the values that ``reads`` names, as they are now.

    Args:
        model: its modules' attributes count, its parameters and buffers do not.
        functions: what else is called, as a loss.
        code: what ran, with its globals.
        reads: which values count.
        versions: as ``Watches`` takes it.
        libraries: what ran of libraries, of which functions, classes and plain values behind its names count.
        steady: of plain values in libraries, which count.
    """
    walk = _Walk(Watches(versions=versions, reads=reads), reads, model, steady)
    for path, module in model.named_modules():
        walk.module(module, path or type(model).__name__)
    for function in functions:
        walk.value(function, getattr(function, "__qualname__", type(function).__name__))
    for key in _OF_ALL_MODULES:
        walk.value(vars(torch_module)[key], f"torch.nn.modules.module.{key}")
    for body, space in code:
        walk.names(names_of(body), space)
    walk.finish()
    if not all(map(reads.has, walk.asked)):
        told = (model, functions, code, replace(reads, names=walk.asked.union(reads.names or ())))
        return watch(*told, versions=versions, libraries=libraries, steady=steady)
    # After the rest, which looks into what it finds.
    for names, space in names_and_tables(libraries):
        walk.of_library(names, space)
    if reads.ran is not None:
        walk.methods({type(module) for module in model.modules()})
    return walk.watches


class _Walk:
    """Goes from value to value, each once."""

    def __init__(self, watches: Watches, reads: Reads, model: nn.Module, steady: Steady) -> None:
        self.watches, self._steady = watches, steady
        self._reads = reads
        self._seen: dict[int, Any] = {}
        self._registered = {id(module) for module in model.modules()}
        self._placed: set[tuple[int, Any]] = set()
        self._todo: list[tuple[Any, str]] = []
        self._bases: dict[type, tuple[type, ...]] = {}
        self._spaces: dict[int, Any] = {}
        self._missing: set[tuple[int, str]] = set()
        self._plain: dict[int, Any] = {}
        self.asked: frozenset[str] = frozenset()  # by getters, whose names stand in no code

    def module(self, module: nn.Module, name: str) -> None:
        """Watch a module of the model: what it is made of, its hooks, what is read of it."""
        self._entries(module._modules, list(module._modules), f"{name}._modules")
        for key in HOOKS:
            self.watches.size(vars(module)[key], f"{name}.{key}")
        self.fields(module, name)
        for kind in sorted(_TENSORS):
            for key, tensor in vars(module)[kind].items():
                if tensor is not None:
                    self._set_on(tensor, attributes_of(tensor), f"{name}.{key}")

    def finish(self) -> None:
        """Go on until nothing more is reached."""
        while self._todo:
            self._visit(*self._todo.pop())

    def item(self, owner: Any, key: Any, name: str) -> None:
        if (id(owner), key) not in self._placed:
            self._placed.add((id(owner), key))
            self.value(self.watches.item(owner, key, name), name)

    def fields(self, owner: Any, name: str) -> None:
        """Watch the attributes of an object, of its slots and of its classes."""
        space = vars(owner) if hasattr(owner, "__dict__") else {}
        self.watches.space(space, name)
        self.watches.kind(owner, name)
        for key in list(space):
            if isinstance(owner, nn.RNNBase) and key in _MIRRORS:
                continue
            if key not in _TENSORS and (self._reads.has(key) or is_held(owner, key)):
                self.item(space, key, f"{name}.{key}")
        self._classes(owner, type(owner), name)

    def _set_on(self, owner: Any, names: Iterable[str], name: str) -> None:
        """Watch what a program sets on a value that is looked at otherwise."""
        self.watches.space(vars(owner), name)
        for key in filter(self._reads.has, sorted(names)):
            self.item(vars(owner), key, f"{name}.{key}")

    def _set_on_tensor(self, tensor: torch.Tensor, name: str) -> None:
        self.watches.set_on(tensor, name)
        for key in filter(self._reads.has, sorted(attributes_of(tensor))):
            self.item(vars(tensor), key, f"{name}.{key}")

    def _only_space(self, owner: type | types.ModuleType, name: str) -> None:
        """Watch which attributes a class or a module has."""
        if id(owner) not in self._spaces:
            self._spaces[id(owner)] = owner
            self.watches.space(vars(owner), name)

    def _classes(self, owner: Any, kind: type, name: str) -> None:
        for base in self._own_bases(kind):
            self._only_space(base, base.__qualname__)
            for key, value in list(vars(base).items()):
                self._of_class(owner, base, key, value, f"{name}.{key}")
        self._plain_values(kind, f"{kind.__module__}.{kind.__qualname__}")

    def _own_bases(self, kind: type) -> tuple[type, ...]:
        if kind not in self._bases:
            self._bases[kind] = own_bases(kind)
        return self._bases[kind]

    def _of_class(self, owner: Any, base: type, key: str, value: Any, name: str) -> None:
        if isinstance(value, types.FunctionType):
            if self._reads.has(key) or self._reads.calls(value.__code__):
                self.item(vars(base), key, f"{base.__qualname__}.{key}")
        elif not self._reads.has(key) or (key.startswith("__") and key.endswith("__")):
            return
        elif isinstance(value, types.MemberDescriptorType):
            self.value(self.watches.attribute(*slot_of(owner, key, name)), name)
        elif hasattr(type(value), "__get__"):
            self.item(vars(base), key, f"{base.__qualname__}.{key}")
        else:
            # Through the instance, which may get an attribute of this name.
            self.value(self.watches.attribute(owner, key, name), name)

    def value(self, value: Any, name: str) -> None:
        """Look into a value later."""
        if not is_scalar(value) and id(value) not in self._seen:
            self._seen[id(value)] = value
            self._todo.append((value, name))

    def _visit(self, value: Any, name: str) -> None:
        if isinstance(value, (torch.Tensor, *ARRAYS)):
            self.watches.content(value, name)
            if isinstance(value, torch.Tensor):
                self._set_on_tensor(value, name)
        elif isinstance(value, INERT) or value is linecache.cache:
            return
        elif is_source(value):
            self.watches.moving.append(name)
        elif isinstance(value, (dict, types.MappingProxyType)):
            # What is stored: some tables name what they would import, too.
            keys = list(dict.keys(value) if isinstance(value, dict) else value)
            self._entries(value, keys, name)
        elif isinstance(value, (list, tuple, deque)):
            self._entries(value, range(len(value)), name)
        elif isinstance(value, types.FunctionType):
            self._function(value, name)
        elif (parts := held_by(value)) is not None:
            for part in parts:
                self.value(part, name)
        elif isinstance(value, partial):
            self.value((value.func, value.args, value.keywords), name)
            self._set_on(value, vars(value), name)
        elif isinstance(value, types.ModuleType):
            self._module(value)
        elif isinstance(value, type):
            # By one name, whoever reaches it first.
            for kind in (value, type(value)):
                self._classes(value, kind, f"{value.__module__}.{value.__qualname__}")
        elif isinstance(value, GETTERS):
            self.asked |= names_asked(value)
        elif isinstance(value, contextvars.ContextVar):
            entry = f"{name}['value']"
            self.value(self.watches.attribute(Current(value), "value", entry), entry)
        elif isinstance(value, (types.BuiltinMethodType, types.MethodWrapperType)):
            held = value.__self__
            if isinstance(held, _CHANGED_BY_METHODS) or is_source(held):
                self.value(held, name)
        else:
            self._object(value, name)

    def _entries(self, owner: Sized, keys: Iterable[Any], name: str) -> None:
        self.watches.size(owner, name)
        if self._reads.names is None and len(owner) > _MANY_ENTRIES:
            return  # a data set, most likely; what reads it is known only after the capture
        if hasattr(owner, "__dict__"):
            self.fields(owner, name)
        if isinstance(owner, dict):
            owner = stored_items(owner)
        for key in keys:
            self.item(owner, key, f"{name}[{key!r:.40}]")

    def _object(self, value: Any, name: str) -> None:
        if (wrapped := wrapped_by(value)) is not None:
            self.value(wrapped, name)
        if isinstance(value, (set, frozenset)):
            self.watches.size(value, name)
            self.watches.content(value, name)
        elif id(value) not in self._registered:
            look_up_overloads(value)
            self.fields(value, name)
            for space, key in backward_places(value):
                self.item(space, key, f"{name}.{key}")
            if isinstance(value, nn.Module):
                # Nobody else looks at the tensors of a module that is not a part of the model.
                for held in (value._modules, value._parameters, value._buffers):
                    self.value(held, name)

    def _function(self, function: types.FunctionType, name: str) -> None:
        origin = origin_of_code(function)
        if not origin.versioned:
            self._set_on(function, vars(function), name)
        if origin is Origin.OWN or not self._reads.calls(function.__code__):
            return
        for number, cell in enumerate(function.__closure__ or ()):
            if attribute_of(cell, "cell_contents") is not GONE:
                inner = f"{function.__code__.co_freevars[number]} in {name}"
                self.value(self.watches.attribute(cell, "cell_contents", inner), inner)
        if origin.versioned:
            return
        for key in ("__code__", "__defaults__", "__kwdefaults__"):
            self.value(self.watches.attribute(function, key, f"{name}.{key}"), f"{name}.{key}")
        self.watches.functions.append(function.__code__)
        self.names(names_of(function.__code__), function.__globals__)

    def names(self, names: Names, space: dict[str, Any]) -> None:
        """Watch the globals, and what is read of modules among them."""
        if not names.chains.isdisjoint(_OWN_MODULE):
            self._module(sys.modules.get(str(space.get("__name__"))))
        for chain in names.chains:
            owner, label, module = space, str(space.get("__name__")), None
            for key in chain:
                look_up_op(module, key)
                if key not in owner:
                    self._absent(owner, key, f"{label}.{key}", is_global=owner is space)
                    break
                value = owner[key]
                if value is sys.modules:
                    # It fills up with what is imported, which is recorded by itself.
                    break
                self.item(owner, key, f"{label}.{key}")
                if not isinstance(value, types.ModuleType):
                    break
                owner, label, module = vars(value), value.__name__, value
        for taken in names.imports:
            self._import(taken, space)

    def _absent(self, owner: dict[str, Any], key: str, name: str, *, is_global: bool) -> None:
        """Watch that a name is not there, and the builtin that stands for it."""
        if (id(owner), key) in self._missing:
            return
        self._missing.add((id(owner), key))
        self.watches.absent.append((owner, key, name))
        # A trial has some of its own, so that what is compared around a capture leaves them out.
        if is_global and key in vars(builtins) and self._reads.ran is not None:
            self._only(vars(builtins), key, f"builtins.{key}")

    def of_library(self, names: Names, space: dict[str, Any]) -> None:
        """Watch what stands behind globals: functions and classes of a library may be replaced, and values set."""
        for chain in names.chains:
            owner, label = space, str(space.get("__name__"))
            for key in chain:
                value = self._global(owner, key, label)
                if not isinstance(value, types.ModuleType):
                    break
                owner, label = vars(value), value.__name__
        for taken in names.imports:
            if (module := sys.modules.get(absolute_name(taken, space))) is not None:
                for key in taken.names or ():
                    self._global(vars(module), key, module.__name__)

    def _global(self, owner: dict[str, Any], key: str, label: str) -> object:
        """Watch and return what a library's code finds under a name."""
        value = owner.get(key)
        is_plain = key in owner and is_plain_value(value) and self._steady(owner, key)
        if is_plain or callable(value):
            self._only(owner, key, f"{label}.{key}")
        elif isinstance(value, Mapping):
            table, entries = table_of(value)
            for entry in entries:
                self._only(table, entry, f"{label}.{key}[{entry!r:.40}]")
        self._plain_values(value, f"{label}.{key}")
        return value

    def _plain_values(self, value: object, name: str) -> None:
        """Watch the numbers, words and flags in a library's value; not around a capture, which may count or cache."""
        if self._reads.ran is None or isinstance(value, INERT) or id(value) in self._plain:
            return
        self._plain[id(value)] = value
        for owner, key, place in plain_places(value, name, self._reads.has):
            if not self._steady(owner, key):
                continue
            if isinstance(owner, ASKED):
                self.watches.attribute(owner, key, place)
            else:
                self._only(owner, key, place)

    def methods(self, kinds: set[type]) -> None:
        """Watch the methods of the modules' classes that ran."""
        for kind in kinds:
            self._method(kind, "forward")
            for base in kind.__mro__[: kind.__mro__.index(nn.Module)]:
                # What all modules have is replaced by torch's tracers, on whatever thread one is at work.
                self._only_space(base, base.__qualname__)
                if "__call__" in vars(base):
                    self._only(vars(base), "__call__", f"{base.__qualname__}.__call__")
        for base in {base for kind in kinds for base in kind.__mro__}:
            if origin_of_name(base.__module__) is Origin.INSTALLED:
                for key, value in list(vars(base).items()):
                    if isinstance(value, types.FunctionType) and self._reads.calls(value.__code__):
                        self._only(vars(base), key, f"{base.__qualname__}.{key}")

    def _method(self, kind: type, method: str) -> None:
        """Watch which method of a name a class has."""
        if attribute_of(kind, method) is attribute_of(kind, method):
            self.watches.attribute(kind, method, f"{kind.__qualname__}.{method}")
            return
        # Whoever asks is given a new object each time: what is stored stays.
        for base in kind.__mro__:
            if method in vars(base):
                self._only(vars(base), method, f"{base.__qualname__}.{method}")
                return
            self._only_space(base, base.__qualname__)

    def _only(self, owner: Any, key: str, name: str) -> None:
        """Watch what is there, and nothing of what it is made of."""
        if (id(owner), key) not in self._placed:
            self._placed.add((id(owner), key))
            self.watches.item(owner, key, name)

    def _import(self, taken: Import, space: dict[str, Any]) -> None:
        module = sys.modules.get(absolute_name(taken, space))
        if taken.names is None:
            self._module(module)
        for key in taken.names or ():
            if module is not None and key in vars(module):
                self.item(vars(module), key, f"{module.__name__}.{key}")

    def _module(self, module: types.ModuleType | None) -> None:
        """Watch what is read of a module that is handed on, or that code asks for all its globals."""
        if module is not None and origin_of_module(module) is Origin.USER:
            self._only_space(module, module.__name__)
            for key in list(vars(module)):
                if self._reads.has(key) and not key.startswith("__"):
                    self.item(vars(module), key, f"{module.__name__}.{key}")
