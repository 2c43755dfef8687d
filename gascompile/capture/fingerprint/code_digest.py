"""Code digest: the half of the value digest that follows code, to all that a function or a class can reach.

Code of the program counts by its bytecode, constants, defaults, closures, attributes, and by the values of
the globals that it names. Code of installed libraries counts by version and source file, and by what of it
was replaced. A module of the program that is handed on as a value counts whole.
"""

from __future__ import annotations

import abc
import builtins
import functools
import os
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import torch

from gascompile.capture.fingerprint.code_fingerprint import code_parts, library_parts
from gascompile.capture.fingerprint.code_names import (
    Chain,
    Import,
    absolute_name,
    codes_in,
    names_of,
)
from gascompile.capture.fingerprint.code_origin import (
    Origin,
    origin_of_code,
    origin_of_module,
    origin_of_name,
    place_of,
)

_NOT_CODE = {
    "__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__dataclass_fields__",
    "__abstractmethods__", "_abc_impl", "__annotate_func__", "__annotations_cache__",
    "__firstlineno__", "__static_attributes__", "__type_params__", "__parameters__",
    "_autograd_function_id", "__slotnames__",
}  # fmt: skip
_OF_MODULES = {
    "__builtins__", "__cached__", "__doc__", "__file__", "__loader__", "__name__", "__package__",
    "__path__", "__spec__", "__annotations__", "__warningregistry__",
}  # fmt: skip
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_DATA = (*_PLAIN, list, tuple, dict, set, frozenset, torch.Tensor, numpy.ndarray)
_MADE_AT_FIRST = "__dynamo_disable"
"""Where torch keeps what it makes of a function of its own when that is called first."""
_NOT_FOLLOWED = torch._compile._disable_dynamo(lambda: None).__code__
"""Of what ``torch._disable_dynamo`` makes of functions."""
_DISPATCH_CACHES = {"dispatch_cache", "cache_token"}
_HEAP_TYPE = 1 << 9
"""Flag of classes that a ``class`` statement or ``type()`` made, ``Py_TPFLAGS_HEAPTYPE``."""
_UNFOLLOWED = {
    "__subclasses__": "asked for the subclasses of a class, of which any module may make more",
    **dict.fromkeys(("__annotations__", "get_type_hints"), "asked for annotations"),
}
"""What is no part of a digest, as few read it."""
_FRAMES = {"_getframe", "currentframe", "stack", "get_objects", "get_referrers"}


class CodeDigest:
    """Follows code; what it is fed to is the business of the subclass."""

    def __init__(self) -> None:
        self.reached: set[str] = set()
        """Functions whose code was fed, as ``place_of`` names them."""
        self._spaces: set[int] = set()

    def add(self, *parts: object) -> None:
        """Feed plain values."""
        raise NotImplementedError

    def value(self, value: Any, name: str = "") -> None:
        """Feed any value."""
        raise NotImplementedError

    def later(self, feed: Callable[[Any], None], value: Any) -> None:
        """Feed a value after the others."""
        raise NotImplementedError

    def unknown(self, what: str) -> None:
        """Note that something cannot be compared."""
        raise NotImplementedError

    def function(self, function: types.FunctionType) -> None:
        """Feed a function."""
        if function.__code__ is _NOT_FOLLOWED:
            # What torch's compiler is not to follow computes the same; some are decorated as that is imported.
            held = (function.__closure__ or ())[function.__code__.co_freevars.index("fn")]
            self.value(held.cell_contents, function.__name__)
            return
        self.add("function", function.__module__, function.__qualname__)
        self.later(self._body, function)

    def _body(self, function: types.FunctionType) -> None:
        self.add("body")
        origin = origin_of_code(function)
        self._state_of(function)
        if origin is Origin.MADE:
            self.code(function.__code__)
        elif origin.versioned:
            # It may have been given the code of another one.
            self.add(function.__code__.co_qualname, function.__code__.co_firstlineno)
            if origin is Origin.INSTALLED:
                self.add(*library_parts(function))
            if not _is_named(function):
                self.code(function.__code__)
        else:
            self.code(function.__code__)
            self.names(function.__code__, function.__globals__)

    def code(self, code: types.CodeType) -> None:
        """Feed bytecode and constants."""
        self.add(*code_parts(code))
        self.reached.update(map(place_of, codes_in(code)))

    def _state_of(self, function: types.FunctionType) -> None:
        self.value(function.__defaults__, "__defaults__")
        self.value(function.__kwdefaults__, "__kwdefaults__")
        dispatches = function.__code__.co_filename == functools.__file__
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            if not (dispatches and name in _DISPATCH_CACHES):
                self.value(cell, name)
        for name, value in sorted(vars(function).items()):
            if not (name == _MADE_AT_FIRST and _are_of_torch(function, value)):
                self.add("attribute", name)
                self.value(value, name)

    def names(self, code: types.CodeType, space: Mapping[str, Any]) -> None:
        """Feed the values of all that code names among its globals and in modules."""
        named = names_of(code)
        words = named.attributes.union(*named.chains)
        for word in sorted(_UNFOLLOWED.keys() & words):
            self.unknown(_UNFOLLOWED[word])
        for chain in sorted(named.chains):
            self._chain(chain, space)
        for taken in sorted(named.imports, key=repr):
            self._import(taken, space)

    def _chain(self, chain: Chain, space: Mapping[str, Any]) -> None:
        if chain[0] not in space:
            if chain[0] == "globals":
                self.value(sys.modules.get(str(space.get("__name__"))), "globals()")
            self._builtin(chain[0], space)
            return
        owner, versioned = space, False
        for key in chain:
            if key not in owner:
                self.add("absent", chain)
                self.value(owner.get("__getattr__"), "__getattr__")
                return
            value = owner[key]
            if not isinstance(value, types.ModuleType):
                break
            owner, versioned = vars(value), origin_of_module(value).versioned
        self.add("global", chain)
        if value is sys.modules:
            self.unknown(f"{'.'.join(chain)}, which may be any module")
        elif value is os.environ:
            self.add("environment")  # what is read of it is recorded
        elif versioned and _reaches_anything(value):
            self.unknown(f"{'.'.join(chain)}, which may reach anything")
        elif versioned and not _is_data(value):
            self._of_library(value)
        else:
            self.value(value, ".".join(chain))

    def _builtin(self, name: str, space: Mapping[str, Any]) -> None:
        """Feed a name that Python itself has, where somebody has put something there."""
        held = space.get("__builtins__", builtins)
        found = (held if isinstance(held, Mapping) else vars(held)).get(name)
        if found is not None and getattr(type(found), "__module__", None) != "_sitebuiltins":
            is_python = getattr(found, "__module__", None) in {"builtins", "io", "_io"}
            if not is_python and name not in {"__debug__", "Ellipsis", "NotImplemented"}:
                self.add("builtin", name)
                self.value(found, name)

    def _of_library(self, value: Any) -> None:
        """Feed something that a library holds in a global: its version says the rest."""
        kind = type(value)
        is_own = not origin_of_name(kind.__module__).versioned or _is_of_main(kind)
        if is_own or isinstance(value, types.FunctionType | type | types.BuiltinFunctionType):
            self.value(value)
        else:
            self.add("of a library", kind.__module__, kind.__qualname__)

    def _import(self, taken: Import, space: Mapping[str, Any]) -> None:
        name = absolute_name(taken, space)
        module = sys.modules.get(name)
        self.add("import", name, taken.names)
        if module is None:
            self.add("not loaded")  # the capture records its source when it is imported
            return
        if taken.names is None:
            self.value(module, name)
        for key in taken.names or ():
            inner = vars(module).get(key, sys.modules.get(f"{name}.{key}"))
            if origin_of_module(module).versioned and not _is_data(inner):
                self._of_library(inner)
            else:
                self.value(inner, f"{name}.{key}")

    def method(self, value: types.MethodType) -> None:
        """Feed a bound method."""
        self.add("method")
        self.value(value.__func__, value.__func__.__name__)
        self.value(value.__self__, "__self__")

    def builtin(self, value: types.BuiltinFunctionType) -> None:
        """Feed a function made in C."""
        self.add("builtin", value.__module__, value.__qualname__)
        if not isinstance(value.__self__, types.ModuleType | type | None):
            self.value(value.__self__, "__self__")

    def wrapper(self, value: Any) -> None:
        """Feed a property, a static method or a class method."""
        self.add(type(value).__qualname__)
        if isinstance(value, property):
            for part in (value.fget, value.fset, value.fdel):
                self.value(part)
        else:
            self.value(value.__func__)

    def cached(self, value: functools._lru_cache_wrapper[Any]) -> None:
        """Feed a function whose results are kept; kept ones may come from other globals than today's."""
        self.add("cached", sorted(value.cache_parameters().items()))
        inner = value.__wrapped__
        self.value(inner, getattr(inner, "__name__", ""))
        own = isinstance(inner, types.FunctionType) and not origin_of_code(inner).versioned
        if own and value.cache_info().currsize:
            self.unknown("a cache that holds results from before")

    def module(self, module: types.ModuleType) -> None:
        """Feed a module; one of the program as a whole."""
        self.add("module", module.__name__)
        kind = type(module)
        if kind is not types.ModuleType and not origin_of_name(kind.__module__).versioned:
            self.value(kind, "its class")
        if not origin_of_module(module).versioned:
            self.later(self._whole, module)

    def _whole(self, module: types.ModuleType) -> None:
        for name, value in sorted(vars(module).items()):
            if name not in _OF_MODULES and not name.startswith("@"):
                self.add("member", name)
                self.value(value, name)

    def class_(self, cls: type) -> None:
        """Feed a class and those that it is made from."""
        self.add("class", cls.__module__, cls.__qualname__)
        self.later(self._members, cls)

    def _members(self, cls: type) -> None:
        self.add("members", [f"{base.__module__}.{base.__qualname__}" for base in cls.__mro__])
        self.add("bases", [base.__qualname__ for base in cls.__bases__])
        if type(cls) is not type:
            self.value(type(cls), "its metaclass")
        for base in cls.__mro__:
            versioned = origin_of_name(base.__module__).versioned and not _is_of_main(base)
            if versioned and (_is_named(base) or not base.__flags__ & _HEAP_TYPE):
                self._library_class(base)
            else:
                self._own_class(base)

    def _own_class(self, cls: type) -> None:
        for name, value in sorted(vars(cls).items()):
            if name not in _NOT_CODE:
                self.add("member", name)
                self.value(value, f"{cls.__qualname__}.{name}")
        for name, field in vars(cls).get("__dataclass_fields__", {}).items():
            if field.metadata:
                self.add("metadata", name)
                self.value(field.metadata, name)
        if "_abc_impl" in vars(cls):
            registered = (reference() for reference in abc._get_dump(cls)[0])  # type: ignore[attr-defined]  # what register() was told
            self.add(
                "registered", sorted(f"{c.__module__}.{c.__qualname__}" for c in registered if c)
            )

    def _library_class(self, cls: type) -> None:
        origin = origin_of_name(cls.__module__)
        if origin is Origin.INSTALLED:
            self.add("library", *library_parts(cls))
        for name, value in vars(cls).items():
            if isinstance(value, types.FunctionType):
                self._of_other_origin(name, value, cls.__qualname__)
            elif isinstance(value, _PLAIN) and name not in _NOT_CODE:
                self.add("plain", name, value)
        module = sys.modules.get(cls.__module__)
        if module is not None and id(module) not in self._spaces:
            self._spaces.add(id(module))
            for name, value in sorted(vars(module).items()):
                # By its type: what stands in for a deprecated name warns when it is asked anything.
                if issubclass(type(value), types.FunctionType):
                    self._of_other_origin(name, value, None)

    def _of_other_origin(self, name: str, function: types.FunctionType, owner: str | None) -> None:
        """Feed a function that replaces what a library has under this name."""
        if not origin_of_code(function).versioned:
            self.add("replaced", name)
            self.value(function, name)
        elif owner is not None and function.__qualname__ != f"{owner}.{name}":
            self.add("other", name)
            self.value(function, name)


def _is_named(value: types.FunctionType | type) -> bool:
    """Return whether a library's function or class is what its name in the library says; many share ``<lambda>``."""
    at_name: Any = sys.modules.get(value.__module__)
    for key in value.__qualname__.split("."):
        at_name = getattr(at_name, "__dict__", {}).get(key)
    return at_name is value


def _are_of_torch(*values: object) -> bool:
    """Return whether all are functions of torch's."""
    return all(
        isinstance(v, types.FunctionType) and origin_of_code(v) is Origin.TORCH for v in values
    )


def _is_data(value: Any) -> bool:
    return isinstance(value, _DATA)


def _reaches_anything(value: object) -> bool:
    module, name = getattr(value, "__module__", None), getattr(value, "__name__", None)
    return module in {"sys", "inspect", "gc", "ctypes"} and name in _FRAMES


def _is_of_main(cls: type) -> bool:
    return cls.__module__ == "__main__"
