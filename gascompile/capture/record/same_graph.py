"""Same graph: a digest of all that a traced graph computes, for two traces to be compared exactly."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from gascompile.core.content import content_of


def graph_digest(graph_module: fx.GraphModule, constants: Mapping[str, object]) -> str:
    """Return a digest of ops, order, arguments, constants' bytes and the shapes of all values.

    Args:
        graph_module: with its own constants.
        constants: those that are inputs of it, as ``torch.export`` lifts them.
    """
    digest = hashlib.blake2b(digest_size=16)
    _add(digest, graph_module)
    for name, value in sorted(constants.items()):
        digest.update(repr(name).encode())
        _add_constant(digest, value)
    return digest.hexdigest()


def _add(digest: Any, graph_module: fx.GraphModule) -> None:
    number = {node: f"%{n}" for n, node in enumerate(graph_module.graph.nodes)}
    for node in graph_module.graph.nodes:
        target: Any = node.target
        if node.op == "get_attr":
            target = None
            _add_constant(digest, operator.attrgetter(str(node.target))(graph_module))
        elif callable(target):
            target = f"{getattr(target, '__module__', '')}.{target}"
        values = _named((node.args, dict(node.kwargs)), number)
        shapes = pytree.tree_map(_outline, node.meta.get("val"))
        digest.update(repr((node.op, target, values, shapes)).encode())


def _named(values: Any, number: Mapping[fx.Node, str]) -> Any:
    named: Any = lambda node: _Name(number[node])  # noqa: E731 - typed for values that graphs hold
    return fx.map_arg(values, named)


class _Name:
    """A node in the arguments of another; a string there is another thing."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _outline(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return str(value.dtype), str(list(value.shape)), str(list(value.stride()))
    return str(value)


def _add_constant(digest: Any, value: object) -> None:
    if isinstance(value, fx.GraphModule):
        _add(digest, value)
    elif isinstance(value, torch.Tensor):
        digest.update(repr(_outline(value)).encode())
        if not isinstance(value, FakeTensor) and value.device.type != "meta":
            digest.update(content_of(value))
    else:
        digest.update(repr(value).encode())
