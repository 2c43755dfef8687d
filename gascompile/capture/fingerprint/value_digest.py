"""Value digest: one hash of Python values of any kind, by value, the same in every process.

A closed set of kinds is known whole: numbers, texts, containers, tensors, functions, classes, and objects
whose state is all in Python or that say how they are copied. Whatever else is met is *opaque*: the digest
names it in ``opaque``, and what has such a digest is never taken for unchanged.
"""

from __future__ import annotations

import array
import contextlib
import contextvars
import enum
import functools
import hashlib
import logging
import pathlib
import pickle
import re
import threading
import types
import typing
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import numpy
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from gascompile.capture.fingerprint.code_digest import CodeDigest
from gascompile.capture.fingerprint.library_order import hooks_of_others, in_one_order
from gascompile.capture.fingerprint.object_fields import hides_state, state_of
from gascompile.core.content import content_of
from gascompile.core.machinery import Machinery

_ATOMS = (bool, int, float, complex, str, bytes, bytearray)
_EXACT = {type(None), type(Ellipsis), type(NotImplemented), *_ATOMS}
_NAMED = (
    torch.dtype, torch.device, torch.layout, torch.memory_format, range, numpy.dtype, torch._ops.OpOverloadPacket,
    torch._ops.HigherOrderOperator,
)  # fmt: skip
_TYPES = (types.GenericAlias, types.UnionType, typing.TypeVar, typing._Final)
_BY_OWNER = (
    types.WrapperDescriptorType, types.MethodDescriptorType, types.GetSetDescriptorType,
    types.MemberDescriptorType, types.ClassMethodDescriptorType,
)  # fmt: skip
_LOCKS = (type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Event)
_WEAK = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet)
_REDUCE_ERRORS = (
    TypeError, AttributeError, ValueError, RuntimeError, NotImplementedError, pickle.PickleError,
)  # fmt: skip


class ValueDigest(CodeDigest):
    """Feeds values to one hash; identity counts for what can be changed, order for what has one."""

    def __init__(
        self, registered: Iterable[int] = (), own: Mapping[int, str] | None = None
    ) -> None:
        """Start an empty digest.

        Args:
            registered: ids of modules that are hashed elsewhere.
            own: for a step, names of the model's tensors by id: none counts by its values then.
        """
        super().__init__()
        self._registered = frozenset(registered)
        self.own = own
        self.met: list[torch.Tensor] = []  # beside the model's, in the order of feeding
        self._state = hashlib.blake2b(digest_size=20)
        self._seen: dict[int, tuple[int, object]] = {}
        self._around: tuple[dict[int, tuple[int, object]], ...] = ()
        """What was seen before the element of a set that this digest is of."""
        self._num_around = 0
        self._storages: dict[int, int] = {}
        self._path: list[str] = []
        self._todo: deque[tuple[Callable[[Any], None], Any, tuple[str, ...]]] = deque()
        self.opaque: list[str] = []
        """Names of what cannot be compared, and of what kind it is."""

    def add(self, *parts: object) -> None:
        """Feed plain values whose ``repr`` says all."""
        self._state.update(repr(parts).encode("utf-8", "surrogatepass"))

    def digest(self) -> str:
        """Return the digest of all that was fed and of the code that it reaches."""
        while self._todo:
            feed, value, path = self._todo.popleft()
            self._path = list(path)
            feed(value)
        return self._state.hexdigest()

    def unknown(self, what: str) -> None:
        """Note that something cannot be compared."""
        self.opaque.append(f"{'.'.join(self._path) or 'a value'} is {what}")

    def value(self, value: Any, name: str = "") -> None:
        """Feed a value under the name by which a person knows it."""
        kind: Any = type(value)
        if kind in _EXACT:
            self.add(type(value).__name__, value)
            return
        known = self._known(id(value))
        if known is not None:
            self.add("again", known[0])
            return
        if not isinstance(value, (tuple, frozenset)):
            self._seen[id(value)] = (self._num_around + len(self._seen), value)
        self._path.append(name)
        try:
            _feeder(kind)(self, value)
        except RecursionError:
            self.unknown("nested too deep")
        self._path.pop()

    def _known(self, number: int) -> tuple[int, object] | None:
        known = self._seen.get(number)
        if known is None:
            for seen in self._around:
                if known := seen.get(number):
                    break
        return known

    def later(self, feed: Callable[[Any], None], value: Any) -> None:
        """Feed code after the values, so that long chains of it nest no calls."""
        self._todo.append((feed, value, tuple(self._path)))

    def _items(self, value: Iterable[Any]) -> None:
        items = list(value)
        self.add(type(value).__name__, len(items), isinstance(value, deque) and value.maxlen)
        for number, item in enumerate(items):
            self.value(item, f"[{number}]")
        self._rest(value, (list, tuple, deque, torch.Size))

    def _mapping(self, value: Any) -> None:
        self.add(type(value).__name__, len(value))
        for key, item in list(dict.items(value) if isinstance(value, dict) else value.items()):
            self.value(key, "a key")
            self.value(in_one_order(key, item), f"[{key!r:.40}]")
        self.value(isinstance(value, defaultdict) and value.default_factory, "default_factory")
        if not isinstance(value, types.MappingProxyType):
            self._rest(value, (dict, OrderedDict, defaultdict))

    def _unordered(self, value: Iterable[Any]) -> None:
        digests = []
        for item in value:
            if type(item) in _EXACT:
                digests.append(f"{type(item).__name__} {item!r}")
                continue
            part = ValueDigest(self._registered, self.own)
            part._around = (self._seen, *self._around)
            part._num_around = self._num_around + len(self._seen)
            part._path = [*self._path, "an element"]
            part.value(item)
            digests.append(part.digest())
            self.opaque += part.opaque
            self.reached |= part.reached
        self.add(type(value).__name__, sorted(digests))
        self._rest(value, (set, frozenset, *_WEAK))

    def _weak(self, value: Any) -> None:
        self._unordered(value if isinstance(value, weakref.WeakSet) else list(value.items()))

    def _rest(self, value: Any, plain: tuple[type, ...]) -> None:
        """Feed what a class of the program adds to a kind that is known."""
        if type(value) not in plain:
            self.value(type(value), "its class")
            self._fields(value)

    def _atom(self, value: Any) -> None:
        base = next(base for base in _ATOMS if isinstance(value, base))
        self.add(base.__name__, base.__repr__(value))
        self._rest(value, _ATOMS)

    def _member(self, value: enum.Enum) -> None:
        self.add("member", getattr(value, "_name_", None))
        self.value(value._value_, "value")
        self._rest(value, ())

    def _named(self, value: Any) -> None:
        self.add(type(value).__name__, str(value))

    def _type(self, value: Any) -> None:
        # By its parts: the text of one may have addresses in it.
        parts = {
            part: getattr(value, part, None) for part in ("__origin__", "__args__", "__metadata__")
        }
        self.add(type(value).__name__, getattr(value, "__name__", None))
        if parts["__args__"] is None:
            self._named(value)
        for part, held in parts.items():
            self.value(held, part)

    def _by_owner(self, value: Any) -> None:
        owner = value.__objclass__
        self.add("of", owner.__module__, owner.__qualname__, value.__name__)

    def _raw(self, value: Any) -> None:
        if isinstance(value, numpy.ndarray) and value.dtype.hasobject:
            self.add("objects", value.shape)
            self._items(value.ravel().tolist())
            return
        kind = str(getattr(value, "dtype", "")) or getattr(value, "typecode", "")
        self.add(type(value).__name__, kind, getattr(value, "shape", None))
        self.add(getattr(value, "strides", None), getattr(value, "format", None))
        self.add(value.tobytes())
        if isinstance(value, (numpy.ndarray, array.array)):
            self._rest(value, (numpy.ndarray, array.array))

    def _tensor(self, value: torch.Tensor) -> None:
        plain = (torch.Tensor, nn.Parameter, nn.Buffer)
        if self.own is not None and id(value) in self.own:
            self.add("of the model", self.own[id(value)])
            return
        stride = value.stride() if value.layout is torch.strided else str(value.layout)
        self.add("tensor", str(value.dtype), tuple(value.shape), stride, str(value.device))
        self.add(str(value.layout), value.requires_grad, type(value).__qualname__)
        if hasattr(value, "__tensor_flatten__"):
            names, context = value.__tensor_flatten__()
            self.value((context, [getattr(value, name) for name in names]), "inner tensors")
            return
        if type(value) not in plain:
            self.value(type(value), "its class")
        if vars(value):
            self._fields(value)
        if self.own is not None and type(value) not in plain:
            self.unknown(f"a {type(value).__qualname__}")
        self.met.append(value)
        if self.own is not None or value.is_meta or not value.numel():
            return
        with torch.no_grad(), torch.utils._python_dispatch._disable_current_modes():
            self._content(value.detach())

    def _content(self, value: torch.Tensor) -> None:
        if value.layout is not torch.strided:
            value = value.to_dense()
        if value.is_quantized:
            value = value.dequantize()
        first = self._storages.setdefault(value.untyped_storage().data_ptr(), len(self._storages))
        self.add("memory", first, value.storage_offset(), value.stride())
        self._state.update(content_of(value))

    def _generator(self, value: torch.Generator) -> None:
        self.add("generator", str(value.device), value.get_state().numpy().tobytes())

    def _slice(self, value: slice) -> None:
        self._items([value.start, value.stop, value.step])

    def _module(self, value: nn.Module) -> None:
        self.value(type(value), "its class")
        if id(value) not in self._registered:
            # It is in a plain list or a global: its tensors become constants of the graph.
            self._fields(value)

    def _partial(self, value: functools.partial[Any]) -> None:
        self.add("partial")
        for part in (value.func, value.args, value.keywords):
            self.value(part, "partial")
        self._rest(value, () if vars(value) else (functools.partial,))

    def _graph(self, value: fx.Graph) -> None:
        self.add("graph")
        for node in value.nodes:
            self.add(node.op, node.name, str(node.args), str(node.kwargs))
            self.value(node.target, f"target of {node.name}")

    def _pattern(self, value: re.Pattern[Any]) -> None:
        self.add("pattern", value.pattern, value.flags)

    def _op(self, value: torch._ops.OpOverload) -> None:
        self.add("op", str(value))

    def _weak_reference(self, value: weakref.ref[Any]) -> None:
        self.add("weak")
        self.value(value(), "referent")

    def _variable(self, value: contextvars.ContextVar[Any]) -> None:
        self.add("context", value.name)
        with contextlib.suppress(LookupError):  # it has no value, and no default
            self.value(value.get(), value.name)

    def _logger(self, value: logging.Logger) -> None:
        self.add("logger", value.name, value.getEffectiveLevel(), value.disabled)

    def _inert(self, value: Any) -> None:
        self.add("inert", type(value).__qualname__)
        if isinstance(value, threading.Event):
            self.add(value.is_set())

    def _path_of(self, value: pathlib.PurePath) -> None:
        self.add(type(value).__name__, str(value))
        if type(value).__module__.partition(".")[0] != "pathlib":
            self.value(type(value), "its class")

    def _cell(self, value: types.CellType) -> None:
        try:
            content = value.cell_contents
        except ValueError:  # not bound yet
            self.add("empty cell")
        else:
            self.value(content)

    def _exception(self, value: BaseException) -> None:
        self.value(value.args, "args")
        self.value(type(value), "its class")
        self._fields(value)

    def _object(self, value: Any) -> None:
        self.add("object")
        self.value(type(value), "its class")
        kind: Any = type(value)
        if not hides_state(kind):
            self._fields(value)
            return
        try:
            reduced = value.__reduce_ex__(4)
        except _REDUCE_ERRORS:
            reduced = None
        if isinstance(reduced, str):
            self.add("named", reduced)
        elif isinstance(reduced, tuple):
            for part in reduced:
                self.value(list(part) if hasattr(type(part), "__next__") else part, "state")
        else:
            self.unknown(f"a {type(value).__module__}.{type(value).__qualname__}")

    def _fields(self, value: Any) -> None:
        has_hooks = issubclass(type(value), (nn.Module, torch.Tensor, torch.optim.Optimizer))
        for name, item in state_of(value).items():
            self.add("field", name)
            hooks = has_hooks and "_hooks" in name and isinstance(item, dict)
            self.value(hooks_of_others(item) if hooks else in_one_order(name, item), name)


_KINDS: tuple[tuple[Any, Callable[[Any, Any], None]], ...] = (
    (nn.Module, ValueDigest._module),
    ((*_NAMED, FakeTensor), ValueDigest._named),
    (_TYPES, ValueDigest._type),
    (torch.Tensor, ValueDigest._tensor),
    (enum.Enum, ValueDigest._member),
    (_ATOMS, ValueDigest._atom),
    ((dict, types.MappingProxyType), ValueDigest._mapping),
    ((list, tuple, deque), ValueDigest._items),
    ((set, frozenset), ValueDigest._unordered),
    ((numpy.ndarray, numpy.generic, array.array, memoryview), ValueDigest._raw),
    (slice, ValueDigest._slice),
    (types.FunctionType, CodeDigest.function),
    (types.MethodType, CodeDigest.method),
    (types.BuiltinFunctionType, CodeDigest.builtin),
    (type, CodeDigest.class_),
    (types.ModuleType, CodeDigest.module),
    (types.CodeType, CodeDigest.code),
    ((property, staticmethod, classmethod), CodeDigest.wrapper),
    (functools._lru_cache_wrapper, CodeDigest.cached),
    (functools.partial, ValueDigest._partial),
    (_BY_OWNER, ValueDigest._by_owner),
    (torch._ops.OpOverload, ValueDigest._op),
    (torch.Generator, ValueDigest._generator),
    (fx.Graph, ValueDigest._graph),
    (weakref.ref, ValueDigest._weak_reference),
    (_WEAK, ValueDigest._weak),
    (contextvars.ContextVar, ValueDigest._variable),
    (types.CellType, ValueDigest._cell),
    (re.Pattern, ValueDigest._pattern),
    (logging.Logger, ValueDigest._logger),
    ((*_LOCKS, logging.Handler, FakeTensorMode), ValueDigest._inert),
    (Machinery, lambda of, value: of.unknown(f"a {type(value).__qualname__}")),
    (pathlib.PurePath, ValueDigest._path_of),
    (BaseException, ValueDigest._exception),
    (threading.local, lambda of, value: of._rest(value, ())),
)


@cache
def _feeder(kind: Any) -> Callable[[ValueDigest, Any], None]:
    """Return what feeds values of a type; the first kind that fits."""
    return next((feed for kinds, feed in _KINDS if issubclass(kind, kinds)), ValueDigest._object)
