"""The structure of a call or of its result in a saved program: which types it may name, and how.

Torch's own reader imports what a text names (the factory of a ``defaultdict``, an enum) and recurses as deep as
the text says. Here a text is checked before torch reads it: a closed list of containers, output types of an
installed transformers, and types that this process has registered itself; nothing is imported for its name alone.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeGuard

import torch
from torch.utils import _pytree as pytree

from gascompile.core import serial
from gascompile.core.errors import FormatError

MAX_LEAVES = 1 << 16
"""Of one call or one result."""

_MAX_CHARACTERS = 1 << 24  # of a structure of arguments, which is parsed whole
_TRANSFORMERS = re.compile(
    r"transformers\.(modeling_outputs|models\.([a-z0-9_]{1,80})\.modeling_\2)\.[A-Za-z0-9_]{1,120}"
)
_CACHES = frozenset(
    {"transformers.cache_utils.DynamicCache", "transformers.cache_utils.EncoderDecoderCache"}
)
_NODE_KEYS = {"type", "context", "children_spec"}


def check_call_type(text: Any, *, where: str) -> int:
    """Return the number of leaves of a structure that ``torch.utils._pytree`` has written as text.

    Args:
        text: the JSON of a ``TreeSpec``.
        where: what messages call it.

    Raises:
        FormatError: it is none, or names a type or a factory that a file may not name.
    """
    if not isinstance(text, str) or len(text) > _MAX_CHARACTERS:
        raise FormatError(f"{where}: the structure of a call is a text; save the program again")
    data = serial.parse_json(text, where=where)
    if not isinstance(data, list) or len(data) != 2 or data[0] != 1 or data[0] is True:
        raise FormatError(f"{where}: this reader knows structures of version 1; save it again")
    num_leaves = 0
    waiting = [data[1]]
    while waiting:
        node = waiting.pop()
        if not isinstance(node, dict) or set(node) != _NODE_KEYS:
            raise FormatError(f"{where}: a part of the structure is no node; save it again")
        children = node["children_spec"]
        if not isinstance(children, list):
            raise FormatError(f"{where}: a node's children are no list; save it again")
        if node["type"] is None:
            if node["context"] is not None or children:
                raise FormatError(f"{where}: a leaf has parts; save it again")
            num_leaves += 1
            if num_leaves > MAX_LEAVES:
                raise FormatError(
                    f"{where}: it has more than {MAX_LEAVES} leaves; save less at once"
                )
        else:
            _check_type(node["type"], node["context"], len(children), where)
            waiting += children
    return num_leaves


def is_transformers(name: str) -> bool:
    """Return whether a type's name is that of an output or a cache of transformers."""
    return name in _CACHES or _TRANSFORMERS.fullmatch(name) is not None


def transformers_modules(text: str) -> list[str]:
    """Return the modules of transformers that define types of a structure, which was checked."""
    names = re.findall(r'"type": ?"(transformers\.[A-Za-z0-9_.]+)"', text)
    return sorted({name.rpartition(".")[0] for name in names if is_transformers(name)})


def check_registered(text: str) -> None:
    """Refuse types of a checked structure whose parts are not those that the type has in this process.

    Raises:
        FormatError: names the type.
    """
    waiting = [json.loads(text)[1]]
    while waiting:
        node = waiting.pop()
        waiting += node["children_spec"]
        name, context = node["type"], node["context"]
        if name == "collections.namedtuple":
            fields = getattr(pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE.get(context), "_fields", None)
            fits = fields is not None and len(fields) == len(node["children_spec"])
        elif name is not None and name not in _CACHES and is_transformers(name):
            known = pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE.get(name)
            fields = (
                {field.name for field in dataclasses.fields(known)} if _is_output(known) else ()
            )
            fits = set(json.loads(context)) <= set(fields)
        else:
            continue
        if not fits:
            raise FormatError(
                f"the program takes or returns {ascii(name)[:120]} with other parts than it has here; use the version "
                "of the library that it was captured with"
            )


def has_size(spec: pytree.TreeSpec) -> bool:
    """Return whether a structure holds a ``torch.Size``."""
    return spec.type is torch.Size or any(map(has_size, spec.children()))


def unflatten(leaves: Sequence[Any], spec: pytree.TreeSpec, *, sizes: bool = True) -> Any:
    """Return a result in its structure, with sizes as ``torch.Size``, of which torch makes tuples.

    Args:
        leaves: of the result.
        spec: its structure.
        sizes: False where it is known that the structure ``has_size`` not.

    Raises:
        FormatError: a type of it does not take the parts that a file says it has.
    """
    try:
        if sizes and len(leaves) == spec.num_leaves and has_size(spec):
            return _with_sizes(iter(leaves), spec)
        return pytree.tree_unflatten(leaves, spec)
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise FormatError(
            f"the results do not make what the program returns ({type(error).__name__}: {error}); save it again with "
            "the library that defines the type"
        ) from error


def _with_sizes(leaves: Iterator[Any], spec: pytree.TreeSpec) -> Any:
    if spec.is_leaf():
        return next(leaves)
    children = [_with_sizes(leaves, child) for child in spec.children()]
    if spec.type is torch.Size:
        return torch.Size(children)
    return pytree.SUPPORTED_NODES[spec.type].unflatten_fn(children, spec.context)


def _is_output(known: type | None) -> TypeGuard[type]:
    return known is not None and dataclasses.is_dataclass(known) and issubclass(known, OrderedDict)


def _check_type(name: Any, context: Any, num_children: int, where: str) -> None:
    if not isinstance(name, str):
        raise FormatError(f"{where}: a type's name is a text; save it again")
    if is_transformers(name) and name not in _CACHES:
        fits = _is_keys(context, num_children, names_only=True)
    elif name in _CONTEXTS:
        fits = _CONTEXTS[name](context, num_children)
    elif name.startswith(("torch.", "builtins.", "collections.", "transformers.")):
        raise FormatError(
            f"{where}: {ascii(name)[:120]} is no type of inputs or outputs that is known"
        )
    else:
        # A type that this process has registered or that is refused when it is looked up: see load_treespec.
        fits = isinstance(context, str) and "__enum__" not in context
    if not fits and name == "collections.defaultdict" and isinstance(context, dict):
        factory = f"{context.get('default_factory_module')}.{context.get('default_factory_name')}"
        raise FormatError(
            f"{where}: a defaultdict makes what it lacks by {ascii(factory)[:200]}, which no plan can name; pass a "
            "dict, or a defaultdict of list, dict, int or another type of Python's own"
        )
    if not fits:
        raise FormatError(
            f"{where}: the context of {ascii(name)[:120]} does not fit its {num_children} parts; save it again"
        )


def _is_nothing(context: Any, num_children: int) -> bool:
    del num_children
    return bool(context == "null")


def _loaded(context: Any) -> Any:
    if not isinstance(context, str):
        return None
    return serial.parse_json(context, where="the context of a type")


def _is_keys(context: Any, num_children: int, *, names_only: bool = False) -> bool:
    keys = _loaded(context)
    if not isinstance(keys, list) or len(keys) != num_children:
        return False
    kinds = (str,) if names_only else (str, int, float, bool, type(None))
    if not all(isinstance(key, kinds) for key in keys):
        return False
    return len(set(keys)) == len(keys) and (not names_only or all(k.isidentifier() for k in keys))


def _is_length(context: Any, num_children: int) -> bool:
    limit = _loaded(context)
    return context == "null" or (type(limit) is int and num_children <= limit < 1 << 31)


_FACTORIES = ("list", "dict", "set", "tuple", "int", "float", "str", "bool")


def _is_default(context: Any, num_children: int) -> bool:
    data = context
    if not isinstance(data, dict) or data.get("default_factory_module") != "builtins":
        return False
    keys = json.dumps(data.get("dict_context"))
    return data.get("default_factory_name") in _FACTORIES and _is_keys(keys, num_children)


def _is_tuple_class(context: Any, num_children: int) -> bool:
    """A class that this process has registered; torch looks it up and imports nothing."""
    del num_children
    return isinstance(context, str) and len(context) <= 400


def _is_cache(context: Any, num_children: int) -> bool:
    data = _loaded(context)
    if not isinstance(data, list) or len(data) not in {2, 3} or num_children != 2:
        return False
    windows, seen = data[1], data[2] if len(data) > 2 else []
    return bool(
        data[0] == ["key_cache", "value_cache"]
        and isinstance(windows, list)
        and len(windows) <= MAX_LEAVES
        and all(w is None or _is_count(w) for w in windows)
        and isinstance(seen, list)
        and len(seen) in {0, len(windows)}
        and all(of is None or _is_seen(of) for of in seen)
    )


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 31


def _is_seen(value: Any) -> bool:
    """Return whether a value is a number of tokens, and whether all of them are kept."""
    return (
        isinstance(value, list)
        and len(value) == 2
        and _is_count(value[0])
        and isinstance(value[1], bool)
    )


_CONTEXTS: dict[str, Callable[[Any, int], bool]] = {
    "builtins.tuple": _is_nothing,
    "builtins.list": _is_nothing,
    "builtins.dict": _is_keys,
    "collections.OrderedDict": _is_keys,
    "torch.Size": _is_nothing,
    "collections.deque": _is_length,
    "collections.defaultdict": _is_default,
    "collections.namedtuple": _is_tuple_class,
    "transformers.cache_utils.DynamicCache": _is_cache,
    "transformers.cache_utils.EncoderDecoderCache": _is_nothing,
}
