"""Filled caches: what functions under ``functools.lru_cache`` keep that were called in a capture.

Tensors that they made are the trace's, without values: whoever calls them later would get these.
"""

from __future__ import annotations

import functools
import gc
import inspect
import types
from collections.abc import Collection, Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from gascompile.capture.fingerprint.code_origin import origin_of_file
from gascompile.capture.record.watches import Code

_DEEPEST = 5
"""Containers in containers are looked into so far; the rows of a cache are two deep."""
_LEAVES = (int, float, str, bytes, bool, type, types.FunctionType, types.ModuleType, nn.Module)


def empty_filled_caches(code: Collection[Code], model: nn.Module) -> None:
    """Empty caches of functions with one of ``code`` that hold tensors of a trace.

    Looked for by the functions' names, among all that the program's own files name, and in the modules of ``model``.
    """
    known = {id(body) for body, _ in code}
    for cache in {id(cache): cache for cache in _caches(code, model)}.values():
        body = getattr(inspect.unwrap(cache), "__code__", None)
        if id(body) in known and _holds(cache, _DEEPEST):
            cache.cache_clear()


def _caches(code: Collection[Code], model: nn.Module) -> Iterator[Any]:
    spaces = {
        id(space): space for body, space in code if not origin_of_file(body.co_filename).versioned
    }
    values: list[Iterable[object]] = [list(space.values()) for space in spaces.values()]
    values += [list(vars(module).values()) for module in model.modules()]
    values.append(_named(space, body.co_qualname) for body, space in code)
    for value in chain.from_iterable(values):
        of_class = list(vars(value).values()) if issubclass(type(value), type) else ()
        for each in (value, *map(_function, of_class)):
            if type(each) is functools._lru_cache_wrapper:
                yield each


def _function(value: Any) -> object:
    return value.__func__ if isinstance(value, (staticmethod, classmethod)) else value


def _named(space: dict[str, Any], name: str) -> object:
    """Return what a qualified name is there; ``None`` for what is within a function."""
    first, *rest = name.split(".")
    found = space.get(first)
    for part in rest:
        found = _function(vars(found).get(part)) if isinstance(found, type) else None
    return found


def _holds(value: object, depth: int) -> bool:
    if isinstance(value, (FakeTensor, FunctionalTensor)):
        return True
    if depth == 0 or isinstance(value, (_LEAVES, torch.Tensor)):
        return False
    return any(_holds(part, depth - 1) for part in gc.get_referents(value))
