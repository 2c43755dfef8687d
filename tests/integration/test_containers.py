"""Containers of Python's own library that a model reads: what is put into them later is seen, as eager sees it."""

from __future__ import annotations

import argparse
import collections
import configparser
import copy
import ctypes
import dataclasses
import io
import multiprocessing
import operator
import os
import queue
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gascompile
from tests.training.runs import MACHINE

NAME = "OF_A_CONTAINER"


class Own(collections.UserDict[str, float]):
    """A class of the program's, with a method."""

    def rate(self) -> float:
        return self["v"] * 1


@dataclasses.dataclass
class Fields:
    v: float = 1.0


class Meta(type):
    v = 1.0


class OfMeta(metaclass=Meta):
    pass


class Referent:
    v = 1.0


USER_DICT = collections.UserDict(v=1.0)
OWN = Own(v=1.0)
USER_LIST = collections.UserList([1.0])
USER_STRING = collections.UserString("1.0")
CHAIN: collections.ChainMap[str, float] = collections.ChainMap({}, {"v": 1.0})
CONFIG = configparser.ConfigParser()
CONFIG["s"] = {"v": "1.0"}
SHARED = multiprocessing.Value("d", 1.0, lock=False)
LOCKED = multiprocessing.Value("d", 1.0)
NUMBER = ctypes.c_double(1.0)
NUMBERS: Any = (ctypes.c_double * 2)(1.0, 2.0)
VIEW: Any = memoryview(bytearray([1, 2]))
FILE = io.BytesIO(b"1.0")
FIELDS = Fields()
SPACE = argparse.Namespace(v=1.0)
GET, ENTRY = operator.attrgetter("v"), operator.itemgetter("v")
REFERENT = Referent()
WEAK_VALUES = weakref.WeakValueDictionary(a=REFERENT)
WEAK_KEYS = weakref.WeakKeyDictionary({REFERENT: 1.0})
UNDER: dict[str, float] = {"v": 1.0}
PROXY = types.MappingProxyType(UNDER)
QUEUE: queue.Queue[float] = queue.Queue()
QUEUE.put(1.0)


def _write(value: float) -> None:
    FILE.seek(0)
    FILE.write(str(value).encode())


CASES: dict[str, tuple[Callable[[], float], Callable[[float], object]]] = {
    "UserDict": (lambda: USER_DICT["v"], lambda v: USER_DICT.update(v=v)),
    "UserDict.get": (lambda: USER_DICT.get("v", 0.0), lambda v: USER_DICT.update(v=v)),
    "in a UserDict": (
        lambda: 2.0 if "w" in USER_DICT else 1.0,
        lambda v: USER_DICT.update(w=v) if v > 2 else USER_DICT.pop("w", None),
    ),
    "over a UserDict": (lambda: sum(USER_DICT.values()), lambda v: USER_DICT.update(v=v)),
    "len of a UserList": (lambda: len(USER_LIST), USER_LIST.append),
    "UserDict of its own": (OWN.rate, lambda v: OWN.update(v=v)),
    "UserList": (lambda: USER_LIST[0], lambda v: operator.setitem(USER_LIST, 0, v)),
    "UserString": (lambda: float(USER_STRING), lambda v: setattr(USER_STRING, "data", str(v))),
    "ChainMap": (lambda: CHAIN["v"], lambda v: operator.setitem(CHAIN, "v", v)),
    "ConfigParser": (lambda: float(CONFIG["s"]["v"]), lambda v: CONFIG.set("s", "v", str(v))),
    "multiprocessing.Value": (lambda: SHARED.value, lambda v: setattr(SHARED, "value", v)),
    "multiprocessing.Value with a lock": (
        lambda: LOCKED.value,
        lambda v: setattr(LOCKED, "value", v),
    ),
    "ctypes": (lambda: NUMBER.value, lambda v: setattr(NUMBER, "value", v)),
    "array of ctypes": (lambda: NUMBERS[0], lambda v: operator.setitem(NUMBERS, 0, v)),
    "memoryview": (lambda: float(VIEW[0]), lambda v: operator.setitem(VIEW, 0, int(v))),
    "BytesIO": (lambda: float(FILE.getvalue()), _write),
    "asdict": (lambda: dataclasses.asdict(FIELDS)["v"], lambda v: setattr(FIELDS, "v", v)),
    "attrgetter": (lambda: GET(SPACE), lambda v: setattr(SPACE, "v", v)),
    "itemgetter": (lambda: ENTRY(UNDER), lambda v: UNDER.update(v=v)),
    "metaclass": (lambda: OfMeta.v, lambda v: setattr(Meta, "v", v)),
    "WeakValueDictionary": (lambda: WEAK_VALUES["a"].v, lambda v: setattr(REFERENT, "v", v)),
    "WeakKeyDictionary": (
        lambda: WEAK_KEYS[REFERENT],
        lambda v: operator.setitem(WEAK_KEYS, REFERENT, v),
    ),
    "MappingProxyType": (lambda: PROXY["v"], lambda v: UNDER.update(v=v)),
    "environb": (
        lambda: float(os.environb.get(NAME.encode(), b"1")),
        lambda v: operator.setitem(os.environ, NAME, str(v)),
    ),
    "Queue": (lambda: QUEUE.queue[0], lambda v: operator.setitem(QUEUE.queue, 0, v)),
}


class Reading(nn.Module):
    """Multiplies by what it reads."""

    def __init__(self, read: Callable[[], float]) -> None:
        super().__init__()
        self.layer, self.read = nn.Linear(8, 3), read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x) * self.read()
        return out


def mean(model: nn.Module, batch: Any) -> torch.Tensor:
    out: torch.Tensor = model(batch[0])
    return out.square().mean()


@pytest.fixture(autouse=True)
def put_back() -> Any:
    yield
    os.environ.pop(NAME, None)
    for _, write in CASES.values():
        write(1.0)
    USER_LIST[1:] = []


@pytest.mark.parametrize("name", CASES)
def test_plans_see_what_is_put_into_containers(name: str, tmp_path: Path) -> None:
    read, write = CASES[name]
    model, x = Reading(read).eval(), torch.randn(4, 8)
    with torch.no_grad():
        compiled = gascompile.compile(model, "64MiB", machine=MACHINE, cache_dir=tmp_path)
        for value in (1.0, 5.0, 3.0):
            write(value)
            torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.parametrize("name", ["UserDict", "ChainMap", "ctypes", "asdict", "attrgetter"])
def test_steps_see_what_is_put_into_containers(name: str, tmp_path: Path) -> None:
    read, write = CASES[name]
    model, batch = Reading(read), (torch.randn(4, 8),)
    eager, optimizer = copy.deepcopy(model), torch.optim.SGD(model.parameters(), lr=0.0)
    with gascompile.compile_step(
        model, mean, optimizer, "64MiB", batch, machine=MACHINE, cache_dir=tmp_path
    ) as step:
        for value in (1.0, 5.0, 3.0):
            write(value)
            torch.testing.assert_close(step(batch), mean(eager, batch).detach())
