"""Calls of a module, brought to one form whatever mix of positional and keyword arguments they use."""

from __future__ import annotations

import copy
import functools
import inspect
import types
from collections import UserDict
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from gascompile.capture.fingerprint.code_origin import origin_of_file
from gascompile.core.call_names import ANY_NAMES
from gascompile.core.errors import UnsupportedOpError

_LEAVES = frozenset({torch.Tensor, bool, int, float, str, type(None)})
"""Types that are no containers, and nobody makes such of them."""

_CLASSES = 64
"""Of models that are looked at once."""

ExampleInputs = tuple[Any, ...] | Mapping[str, Any]


def split_inputs(example_inputs: ExampleInputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and keyword arguments from a tuple or a dict of example inputs."""
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, (tuple, list)):
        return tuple(example_inputs), {}
    raise TypeError(
        f"example_inputs is a tuple of positional or a dict of keyword arguments, not {type(example_inputs).__name__}; "
        "for one tensor x write example_inputs=(x,)"
    )


def normalize_call(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the call with every nameable positional argument as a keyword, in the signature's order.

    ``f(x, mask=m)`` and ``f(mask=m, x=x)`` thereby meet the same plan.
    """
    return bind_call(call_names(model), args, kwargs)


def positional_names(model: nn.Module) -> tuple[str, ...]:
    """Return the names of ``model.forward``'s leading positional-or-keyword parameters."""
    return _leading(inspect.signature(model.forward).parameters.values())


def _leading(parameters: Iterable[inspect.Parameter]) -> tuple[str, ...]:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return tuple(of.name for of in takewhile(lambda of: of.kind is kind, parameters))


def call_names(model: nn.Module) -> tuple[str, ...]:
    """Return what ``bind_call`` takes: the names of positional arguments, and whether others may be given.

    None has a name where code around ``forward`` sees how a call is written.
    """
    return _names_of(model, vars(model).get("forward"))


def _names_of(model: nn.Module, forward: Callable[..., Any] | None) -> tuple[str, ...]:
    """Return the names for calls that end in ``forward``, set on the model, or in its class's."""
    is_own = forward is None
    if forward is None:
        cls, found = type(model), _of_class(type(model))
        forward = found.__get__(model, cls) if hasattr(found, "__get__") else found
    try:
        parameters = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):  # a builtin, which tells no names
        return (ANY_NAMES,)
    takes_any = any(of.kind is inspect.Parameter.VAR_KEYWORD for of in parameters)
    names = _leading(parameters) if is_own and not _shows_calls(model) else ()
    return names + ((ANY_NAMES,) if takes_any else ())


class CallNames:
    """What ``bind_call`` takes for the calls of a model, whose hooks and ``forward`` may come and go."""

    def __init__(self, names: tuple[str, ...], model: nn.Module | None = None) -> None:
        """Take ``names`` as ``call_names`` gave them; without a model they stay."""
        self._names, self._model = names, model
        self._seen = () if model is None else self._what_counts(vars(model).get("forward"))

    def now(self, forward: Callable[..., Any] | None) -> tuple[str, ...]:
        """Return the names, as the model is with ``forward`` set on it, or with its class's."""
        if self._model is None:
            return self._names
        seen = self._what_counts(forward)
        was = self._seen
        if seen[0] is not was[0] or seen[1] is not was[1] or seen[2] is not was[2]:
            self._names, self._seen = _names_of(self._model, forward), seen
        return self._names

    def _what_counts(self, forward: Callable[..., Any] | None) -> tuple[Any, ...]:
        assert self._model is not None, "names of a bundle stay"
        return forward, _of_class(type(self._model)), _shows_calls(self._model)


def _of_class(cls: type[nn.Module]) -> Any:
    """Return the ``forward`` of a class as it stands there, the same object each time."""
    return next(vars(base)["forward"] for base in cls.__mro__ if "forward" in vars(base))


def _shows_calls(model: nn.Module) -> bool:
    """Return whether the program's code sees which arguments of a call have names before ``forward`` has them all."""
    if model._forward_pre_hooks or model._forward_hooks:
        return True
    cls = type(model)
    return _shown_by(cls.__call__, _of_class(cls))


@functools.lru_cache(maxsize=_CLASSES)
def _shown_by(call: Callable[..., Any], forward: Callable[..., Any]) -> bool:
    if call is not nn.Module.__call__ and not _is_of_library(call):
        return True
    if not isinstance(forward, types.FunctionType) or not hasattr(forward, "__wrapped__"):
        return False
    takes_any = forward.__code__.co_flags & inspect.CO_VARARGS
    return bool(takes_any) and not _is_of_library(forward)


def _is_of_library(function: Callable[..., Any]) -> bool:
    """Return whether a function lies in an installed file: such hand on what they are given."""
    code = getattr(function, "__code__", None)
    return code is not None and origin_of_file(code.co_filename).versioned


def named_shapes(model: nn.Module, args: tuple[Any, ...], dynamic_shapes: Any) -> Any:
    """Return dynamic shapes by the names of the arguments they are for, where all arguments were given names."""
    if isinstance(dynamic_shapes, (tuple, list)) and dynamic_shapes and not args:
        return dict(zip(positional_names(model), dynamic_shapes, strict=False))
    return dynamic_shapes or None


def bind_call(
    names: tuple[str, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Name the positional arguments by ``names``; what has no name stays positional.

    The others are in the order of their names, or as they are given where ``names`` ends in ``ANY_NAMES``.
    Mappings that tokenizers and feature extractors return become dicts, sizes of tensors tuples, as in a capture.
    """
    if any(isinstance(value, (UserDict, torch.Size)) for value in (*args, *kwargs.values())):
        args = tuple(_plainly(value) for value in args)
        kwargs = {name: _plainly(value) for name, value in kwargs.items()}
    in_order = names[-1:] == (ANY_NAMES,)
    if in_order:
        names = names[:-1]
    if len(args) > len(names):
        return args, dict(kwargs)
    bound = dict(zip(names, args, strict=False))
    if not kwargs:
        return (), bound
    twice = bound.keys() & kwargs.keys()
    if twice:
        raise TypeError(f"the argument '{min(twice)}' is given by position and by name")
    merged = {**bound, **kwargs}
    order = {name: i for i, name in enumerate(names)}
    return (), dict(
        sorted(
            merged.items(),
            key=lambda item: (order.get(item[0], len(order)), "" if in_order else item[0]),
        )
    )


def _plainly(value: Any) -> Any:
    if isinstance(value, torch.Size):
        return tuple(value)
    return dict(value) if isinstance(value, UserDict) else value


def flatten_call(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Any], pytree.TreeSpec]:
    """Return the leaves of a call and its structure; of named leaves alone the structure is made once.

    Raises:
        UnsupportedOpError: a container of a library cannot be taken apart.
    """
    known = _quickly_flat(kwargs) if not args else None
    if known is not None:
        return known
    try:
        return pytree.tree_flatten((args, kwargs))
    except Exception as error:  # a library's own code, which raises what it likes
        raise UnsupportedOpError(
            f"the arguments cannot be taken apart ({type(error).__name__}: {error}); give tensors, or containers "
            "whose parts are tensors; for a cache of this kind pass use_cache=False"
        ) from error


def key_types(spec: pytree.TreeSpec) -> tuple[str, ...]:
    """Return the types of the keys in a structure that are no plain text: 1, 1.0 and True are equal ones."""
    found = [type(key).__qualname__ for key in _flat_keys(spec.context) if type(key) is not str]
    for child in spec.children():
        found += key_types(child)
    return tuple(found)


def _flat_keys(context: Any) -> list[Any]:
    if not isinstance(context, (list, tuple)):
        return []
    return [key for part in context for key in (_flat_keys(part) or [part])]


Parts = Callable[[Any], tuple[list[Any], Hashable]]
_flat: dict[type, Parts] = {}
_specs: dict[Hashable, pytree.TreeSpec] = {}
_MOST_SPECS = 256  # kinds of calls that are remembered; then all are forgotten


def register_flat(kind: type, parts: Parts) -> None:
    """Have values of ``kind``, a container that torch knows, taken apart quickly.

    Args:
        kind: the very class of the values.
        parts: returns the leaves of one, in the order in which torch lists them, and what tells its structure from that
            of others: where it is equal, so are the structures.
    """
    _flat[kind] = parts


def _quickly_flat(kwargs: dict[str, Any]) -> tuple[list[Any], pytree.TreeSpec] | None:
    """Return the leaves and the structure of named leaves and known containers; ``None`` where there are others.

    The structure of the same names is the same object each time, which is quickly compared.
    """
    leaves: list[Any] = []
    key: list[Hashable] = []
    for name, value in kwargs.items():
        kind = type(value)
        key.append(name)
        if kind in _LEAVES:
            leaves.append(value)
        elif kind in _flat:
            inner, told = _flat[kind](value)
            leaves += inner
            key.append((kind, told))
        else:
            return None
    spec = _specs.get(known := tuple(key))
    if spec is None:
        if len(_specs) >= _MOST_SPECS:
            _specs.clear()
        spec = _specs[known] = pytree.tree_structure(((), kwargs))
    return leaves, spec


def copies(leaves: Iterable[Any]) -> list[Any]:
    """Return the leaves of a call with tensors copied: laid out, and sharing memory with each other, as they are."""
    detached: dict[int, torch.Tensor] = {}
    plain = [
        detached.setdefault(id(leaf), leaf.detach()) if isinstance(leaf, torch.Tensor) else leaf
        for leaf in leaves
    ]
    memo: dict[int, Any] = {}
    return [copy.deepcopy(leaf, memo) if isinstance(leaf, torch.Tensor) else leaf for leaf in plain]


@dataclass(frozen=True, slots=True)
class RangedCall:
    """What a plan for a range of sizes is made from."""

    kwargs: dict[str, Any]
    """A call in the range, the same one whichever call needs the plan."""
    dynamic_shapes: dict[str, Any] | None
    """As ``torch.export`` takes them; ``None`` for one size alone."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call, as it is looked up and planned."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: list[Any]
    spec: pytree.TreeSpec
    taken_bytes: int
    """Of the budget, what the caller has for what it passes."""

    @staticmethod
    def of(
        names: tuple[str, ...],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        taken_bytes: int = 0,
    ) -> Call:
        """Return a call with its positional arguments under their names."""
        bound = bind_call(names, args, kwargs)
        return Call(*bound, *flatten_call(*bound), taken_bytes)
