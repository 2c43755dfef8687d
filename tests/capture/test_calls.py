"""Calls are taken apart as pytrees are, whichever way is shorter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from gascompile.capture.calls import bind_call, flatten_call

X, Y = torch.ones(2), torch.zeros(3)


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"a": X, "b": Y},
        {"b": X, "a": Y},
        {"a": X, "b": None, "c": True, "d": 2, "e": 0.5, "f": "text"},
        {"a": nn.Parameter(X)},
        {"a": [X, Y], "b": Y},
        {"a": {"x": X}},
        {"a": torch.Size((1, 2))},
    ],
)
@pytest.mark.parametrize("args", [(), (X,), ([X],)])
def test_leaves_and_structure_are_those_of_the_pytree(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    wanted, structure = pytree.tree_flatten((args, kwargs))
    for _ in range(2):
        leaves, found = flatten_call(args, dict(kwargs))
        assert found == structure
        assert len(leaves) == len(wanted)
        assert all(a is b for a, b in zip(leaves, wanted, strict=True))


def test_a_call_is_one_however_it_is_written() -> None:
    names = ("a", "b")
    wanted = ((), {"a": X, "b": Y})
    for args, kwargs in (((X, Y), {}), ((X,), {"b": Y}), ((), {"b": Y, "a": X})):
        found = bind_call(names, args, kwargs)
        assert found == wanted
        assert list(found[1]) == ["a", "b"]
