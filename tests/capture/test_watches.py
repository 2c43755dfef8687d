"""What a capture is compared by."""

from __future__ import annotations

import linecache
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from gascompile.capture.record.record import _EVERYTHING
from gascompile.capture.record.watches import watch


class Answering:
    """Whatever is asked of it, it is another one of its kind; counts how often."""

    num_asked = 0

    def __getattr__(self, name: str) -> Answering:
        Answering.num_asked += 1
        return Answering()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x


ANSWERING: Any = Answering()


def test_an_object_that_has_every_attribute_is_looked_at_once() -> None:
    def call(x: torch.Tensor) -> Any:
        return ANSWERING(x)

    functions: list[Callable[..., Any]] = [call]
    code = [(call.__code__, call.__globals__)]
    watch(nn.Linear(2, 2), functions, code, _EVERYTHING, versions=True)
    assert Answering.num_asked < 10


def test_lines_that_messages_quote_are_no_part_of_a_capture() -> None:
    code = (linecache.getlines.__code__, vars(linecache))
    assert linecache.getlines(__file__), "or there would be no lines"
    found = watch(nn.Linear(2, 2), (), [code], _EVERYTHING, versions=True)
    names = [name for *_, name in found.places()]
    assert "linecache.cache" in names
    assert not [name for name in names if name.startswith("linecache.cache[")]
    linecache.getlines(nn.__file__)
    assert found.changed() is None


class Register(OrderedDict[str, int]):
    """A table that names what it would import, too."""

    def __iter__(self) -> Iterator[str]:
        return iter([*OrderedDict.keys(self), "unasked"])

    def __getitem__(self, key: str) -> int:
        return 3 if key == "unasked" else super().__getitem__(key)


REGISTER = Register(held=2)


def test_tables_are_watched_by_what_they_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    def call(x: torch.Tensor) -> Any:
        return x * REGISTER["held"]

    assert "unasked" in list(REGISTER)
    code = [(call.__code__, call.__globals__)]
    found = watch(nn.Linear(2, 2), [call], code, _EVERYTHING, versions=True)
    assert found.changed() is None
    monkeypatch.setitem(REGISTER, "held", 4)
    assert "held" in str(found.changed())
