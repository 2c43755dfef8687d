"""Batches: which objects may hold tensors of a batch, and what else may stand in one.

Tensors are found by torch's pytrees. Classes that torch does not know, such as dataclasses and the mappings that
tokenizers return, are registered when they are met, with what they have beside their fields. What is no tensor is
told apart by what ``told`` says of it, and nothing may stand there that has more to it.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections import UserDict
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from gascompile.capture.batch_classes import PLAIN, Untold, attributes_beside, is_said, told
from gascompile.core.errors import CaptureError

_PLAIN = {torch.Tensor, type(None), *PLAIN}
"""Classes of most leaves."""
_REGISTERED: set[type] = set()
"""Classes that this module has made known to torch, with all that they have."""
_VALUES = (
    type(None), *PLAIN, range, slice, enum.Enum, torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip


def admit(batch: Any) -> None:
    """Let torch know the classes that a batch is made of.

    Most are made of Python's own containers, which it knows.

    Raises:
        CaptureError: names an object that is neither a tensor, nor a plain value, nor made of such.
    """
    known = plain_structure(batch, []) is not None
    while not known:
        known = True
        for leaf in pytree.tree_leaves(batch, is_leaf=_looked_at):
            if isinstance(leaf, torch.Tensor):
                continue
            if not isinstance(leaf, _VALUES):
                _register(leaf)
                known = False
                break
            told(leaf)


def _looked_at(node: Any) -> bool:
    """Refuse a container of which pytrees would lose something; for them it is one all the same."""
    kind = type(node)
    if kind in _PLAIN or kind is tuple or kind is list:
        return False
    if isinstance(node, dict | UserDict):
        _require_keys(node)
    if kind in _REGISTERED:
        return False
    is_mapping = isinstance(node, dict) and kind is not dict and kind in pytree.SUPPORTED_NODES
    if is_mapping or pytree.is_namedtuple_instance(node):
        _require_no_more(node)
    return False


def _require_keys(node: dict[Any, Any] | UserDict[Any, Any]) -> None:
    for key in node:
        if not _is_told_key(key):
            raise CaptureError(
                f"the batch holds a dict with a key of {type(key).__module__}.{type(key).__qualname__}, of which it is "
                "not known what a step depends on; use plain texts or numbers as keys"
            )


def _is_told_key(key: Any) -> bool:
    """Return whether what is printed of a key says all, but for members of enumerations and classes."""
    kind = type(key)
    if is_said(key) or isinstance(key, enum.Enum | type) or kind.__module__ == "numpy":
        return True
    if isinstance(key, tuple | frozenset):
        return not attributes_beside(key) and all(map(_is_told_key, key))
    return False


def _require_no_more(node: Any) -> None:
    """Refuse attributes that a container would lose, as those of a class derived from a named tuple."""
    beside = attributes_beside(node)
    if not beside:
        return
    kind = type(node)
    children, structure = pytree.tree_flatten(node, is_leaf=lambda inner: inner is not node)
    again = attributes_beside(pytree.tree_unflatten(children, structure))
    for name, value in beside.items():
        is_found = isinstance(getattr(kind, name, None), functools.cached_property)
        same = name in again and (again[name] is value or (is_said(value) and again[name] == value))
        if not (same or is_found):
            raise CaptureError(
                f"the batch holds a {kind.__module__}.{kind.__qualname__} with an attribute '{name}' beside its "
                "entries, which torch's pytrees leave out; pass it as an entry, or in a dataclass"
            )


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], batch: Any) -> Any:
    """Return the batch with its tensors changed; one that is given twice is changed once, and stays one."""
    changed: dict[int, torch.Tensor] = {}

    def once(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in changed:
            changed[id(tensor)] = change(tensor)
        return changed[id(tensor)]

    return pytree.tree_map_only(torch.Tensor, once, batch)


def plain_structure(batch: Any, leaves: list[Any]) -> Hashable:
    """Return how a batch of tensors and values in Python's own tuples, lists and dicts is made, and add its leaves.

    It takes a fraction of what torch's pytrees take for it, and has the same leaves in the same order. Of all other
    batches it is ``None``.
    """
    kind: type = type(batch)
    if kind in _PLAIN:
        leaves.append(batch)
        return kind is torch.Tensor
    if kind is tuple or kind is list:
        parts, keys = batch, ()
    elif kind is dict and all(type(key) is str for key in batch):
        parts, keys = batch.values(), tuple(batch)
    else:
        return None
    inner = [plain_structure(part, leaves) for part in parts]
    return None if None in inner else (kind, keys, *inner)


def leaves_of(batch: Any) -> list[Any]:
    """Return the leaves of a batch, in the order of torch's pytrees."""
    leaves: list[Any] = []
    if plain_structure(batch, leaves) is None:
        leaves = pytree.tree_leaves(batch)
    return leaves


def _register(leaf: Any) -> None:
    kind = type(leaf)
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        _register_dataclass(kind)
    elif isinstance(leaf, UserDict):
        _register_mapping(kind)
    elif kind.__module__.partition(".")[0] == "numpy" and hasattr(leaf, "dtype"):
        raise CaptureError(
            f"the batch holds a numpy {kind.__name__} of {leaf.dtype}; pass torch.from_numpy(array), or "
            "torch.tensor(value)"
        )
    else:
        raise CaptureError(
            f"the batch holds a {kind.__module__}.{kind.__qualname__}, of which it is not known what a step depends "
            "on; pass tensors and plain values, in tuples, lists, dicts or dataclasses"
        )
    _REGISTERED.add(kind)


def _register_dataclass(kind: Any) -> None:
    fields = tuple(field.name for field in dataclasses.fields(kind))

    def flatten(value: Any) -> tuple[list[Any], tuple[str, ...]]:
        names = tuple(dict.fromkeys((*fields, *attributes_beside(value))))
        return [getattr(value, name) for name in names], names

    def unflatten(values: Any, names: tuple[str, ...]) -> Any:
        batch = object.__new__(kind)
        for name, value in zip(names, values, strict=True):
            object.__setattr__(batch, name, value)
        return batch

    pytree.register_pytree_node(kind, flatten, unflatten)


def _register_mapping(kind: Any) -> None:
    def flatten(value: Any) -> tuple[list[Any], Any]:
        beside = {k: v for k, v in attributes_beside(value).items() if k != "data"}
        tensors = {k: v for k, v in beside.items() if isinstance(v, torch.Tensor)}
        said = tuple((k, v) for k, v in beside.items() if is_said(v))
        untold = tuple(
            (k, v.__class__) for k, v in beside.items() if k not in tensors and not is_said(v)
        )
        context = tuple(value.data), tuple(tensors), said, untold
        return [*value.data.values(), *tensors.values()], context

    def unflatten(values: Any, context: Any) -> Any:
        keys, tensors, said, untold = context
        values = list(values)
        batch = object.__new__(kind)
        object.__setattr__(batch, "data", dict(zip(keys, values, strict=False)))
        beside = {**dict(zip(tensors, values[len(keys) :], strict=True)), **dict(said)}
        for name, value in (*beside.items(), *((name, Untold(name, of)) for name, of in untold)):
            object.__setattr__(batch, name, value)
        return batch

    pytree.register_pytree_node(kind, flatten, unflatten)
