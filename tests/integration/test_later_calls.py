"""Calls after the first: what a model's own Python changes or reads anew is eager's in each call, or refused."""

from __future__ import annotations

import contextvars
import copy
import queue
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import regex
import torch
from torch import nn

import gascompile
from gascompile.core.errors import CaptureError
from tests.scale import SCALE
from tests.training.runs import MACHINE

Extra = Callable[["Net", torch.Tensor], Any]


class Net(nn.Module):
    """A layer, and what ``extra`` makes of its result with these values."""

    shared = 0

    def __init__(self, extra: Extra) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("mean", torch.ones(8))
        self.register_buffer("last", None)
        self.raw, self.take = bytearray(1), [1.0, 2.0, 3.0].pop
        self.extra = extra
        self.calls, self.flag, self.layerdrop = 0, False, 0.5
        self.made: Any = None
        self.kept: dict[Any, Any] = {}
        self.values = [1.0, 2.0, 3.0]
        self.space = SimpleNamespace(calls=0)
        self.numbers = iter([1.0, 2.0, 3.0, 4.0])
        self.generator = random.Random(0)
        self.pattern = regex.compile("a", regex.ASCII | regex.VERSION1)
        self.frozen = _Frozen()

    def forward(self, x: torch.Tensor) -> Any:
        return self.extra(self, self.layer(x))


def _counts(net: Net, y: torch.Tensor) -> Any:
    net.calls += 1
    return y * net.calls


def _counts_in_class(net: Net, y: torch.Tensor) -> Any:
    type(net).shared += 1
    return y * net.shared


def _counts_deep(net: Net, y: torch.Tensor) -> Any:
    net.space.calls += 1
    return y * net.space.calls


def _alternates(net: Net, y: torch.Tensor) -> Any:
    net.flag = not net.flag
    return y if net.flag else -y


def _rotates(net: Net, y: torch.Tensor) -> Any:
    net.values.append(net.values.pop(0))
    return y * net.values[0]


def _differs_at_the_third(net: Net, y: torch.Tensor) -> Any:
    net.calls = min(net.calls + 1, 3)
    return y if net.calls < 3 else -y


def _adds_the_last(net: Net, y: torch.Tensor) -> Any:
    found = y if net.made is None else y + net.made
    net.made = y
    return found


def _keeps_what_inputs_give(net: Net, y: torch.Tensor) -> Any:
    if net.made is None:
        net.made = y.mean()
    return y * net.made


def _keeps_a_state(net: Net, y: torch.Tensor) -> Any:
    net.get_buffer("mean").add_(1)
    if net.made is None:
        net.made = net.get_buffer("mean") * 2
    return y * net.made


def _writes_to_what_it_keeps(net: Net, y: torch.Tensor) -> Any:
    if net.made is None:
        net.made = torch.zeros(8)
    net.made.add_(1)
    return y * net.made


def _advances(net: Net, y: torch.Tensor) -> Any:
    return y * next(net.numbers)


def _draws(_: Net, y: torch.Tensor) -> Any:
    return y * random.random()


def _draws_from_its_own(net: Net, y: torch.Tensor) -> Any:
    return y * net.generator.random()


def _draws_an_array(_: Net, y: torch.Tensor) -> Any:
    return y * float(numpy.random.rand(2)[0])  # noqa: NPY002 - what programs do


def _keeps_what_it_draws(net: Net, y: torch.Tensor) -> Any:
    if net.made is None:
        net.made = random.random()
    return y * net.made


class Registry:
    calls = 0


_queue: queue.Queue[int] = queue.Queue()
_context: contextvars.ContextVar[int] = contextvars.ContextVar("_context", default=0)


def _takes_turns(_: Net, y: torch.Tensor) -> Any:
    _queue.put(1)
    return y * _queue.qsize()


def _counts_in_context(_: Net, y: torch.Tensor) -> Any:
    _context.set(_context.get() + 1)
    return y * _context.get()


def _counts_elsewhere(_: Net, y: torch.Tensor) -> Any:
    Registry.calls += 1
    return y * Registry.calls


def _counts_in_default(net: Net, y: torch.Tensor, seen: list[int] = []) -> Any:  # noqa: B006
    del net
    seen.append(1)
    return y * len(seen)


def _counts_in_bytes(net: Net, y: torch.Tensor) -> Any:
    net.raw[0] += 1
    return y * net.raw[0]


def _counts_from_nothing(net: Net, y: torch.Tensor) -> Any:
    vars(net)["new"] = getattr(net, "new", 0) + 1
    return y * vars(net)["new"]


def _swaps_layers(net: Net, y: torch.Tensor) -> Any:
    net.layer, net.other = net.other, net.layer
    return net.other(y)


def _sets_a_buffer(net: Net, y: torch.Tensor) -> Any:
    last: Any = net.last
    found = y if last is None else y + last
    net.last = y
    return found


def _takes_from(net: Net, y: torch.Tensor) -> Any:
    return y * net.take()


def _seeds(_: Net, y: torch.Tensor) -> Any:
    torch.manual_seed(3)
    return y * torch.rand(8)


def _draws_apart(_: Net, y: torch.Tensor) -> Any:
    with torch.random.fork_rng(devices=()):
        noise = torch.rand(8)
    return y * noise


def _draws_again(_: Net, y: torch.Tensor) -> Any:
    torch.default_generator.set_state(torch.get_rng_state())
    return y * torch.rand(8)


REFUSED = [
    _seeds, _draws_apart, _draws_again,
    _takes_turns, _counts_in_context, _counts_elsewhere, _counts_in_default, _counts_in_bytes, _counts_from_nothing,
    _swaps_layers, _sets_a_buffer, _takes_from,
    _counts, _counts_in_class, _counts_deep, _alternates, _rotates, _differs_at_the_third, _adds_the_last,
    _keeps_what_inputs_give, _keeps_a_state, _writes_to_what_it_keeps, _advances, _draws, _draws_from_its_own,
    _draws_an_array, _keeps_what_it_draws,
]  # fmt: skip


def _sets_once(net: Net, y: torch.Tensor) -> Any:
    if net.made is None:
        net.made = 3.0
    return y * net.made


def _memorises(net: Net, y: torch.Tensor) -> Any:
    if y.shape[0] not in net.kept:
        net.kept[y.shape[0]] = float(y.shape[0])
    return y * net.kept[y.shape[0]]


_memory: dict[int, float] = {}


def _memorises_globally(_: Net, y: torch.Tensor) -> Any:
    return y * _memory.setdefault(y.shape[0], y.shape[0] / 2)


def _keeps_a_table(net: Net, y: torch.Tensor) -> Any:
    if net.made is None:
        net.made = torch.full((8, 8), 2.0)
        net.made.triu_(1)
    return y @ net.made


def _keeps_what_weights_give(net: Net, y: torch.Tensor) -> Any:
    if net.made is None:
        net.made = net.layer.weight.sum(0)
    return y * net.made


def _sets_once_and_counts(net: Net, y: torch.Tensor) -> Any:
    net.calls += 1
    return _sets_once(net, y)


def _saturates(net: Net, y: torch.Tensor) -> Any:
    net.calls = max(net.calls, 2)
    return y * net.calls


def _drops_layers_in_training(net: Net, y: torch.Tensor) -> Any:
    for _ in range(3):
        probability = random.uniform(0, 1) + numpy.random.uniform(0, 1)  # noqa: NPY002
        if net.training and probability < net.layerdrop:
            continue
        y = net.layer(y)
    return y


def _could_advance(net: Net, y: torch.Tensor) -> Any:
    return y * next(net.numbers) * net.generator.random() if net.training else y


def _reads_a_pattern(net: Net, y: torch.Tensor) -> Any:
    """Flags are a field that no code can set, and another number at each look."""
    return _sets_once(net, y) if net.pattern.flags & regex.ASCII else y


@dataclass(frozen=True, slots=True)
class _Frozen:
    factor: Any = None


def _sets_once_in_a_frozen_one(net: Net, y: torch.Tensor) -> Any:
    if net.frozen.factor is None:
        object.__setattr__(net.frozen, "factor", 3.0)
    return y * net.frozen.factor


def _chooses_a_table_in_place(net: Net, y: torch.Tensor) -> Any:
    """As rotary embeddings for long texts do: a table that is made once, another one, and a buffer for either."""
    if net.made is None:
        net.made = torch.full((8,), 2.0)
    net.made = net.made.to(y.device)
    mean: Any = net.mean
    mean.copy_(torch.where(y.sum() > 0, net.made, net.layer.bias))
    return y * mean


LET_GO = [
    _chooses_a_table_in_place, _reads_a_pattern, _sets_once_in_a_frozen_one,
    _sets_once, _memorises, _memorises_globally, _keeps_a_table, _keeps_what_weights_give,
    _sets_once_and_counts, _saturates, _drops_layers_in_training, _could_advance,
]  # fmt: skip


def _net(extra: Extra) -> Net:
    Net.shared = 0
    torch.manual_seed(1)
    return Net(extra).eval()


@pytest.mark.parametrize("extra", REFUSED if SCALE > 1 else REFUSED[::3])
def test_what_differs_from_call_to_call_is_refused(extra: Extra, tmp_path: Path) -> None:
    net, x = _net(extra), torch.randn(2, 8)
    with (
        gascompile.compile(net, None, machine=MACHINE, cache_dir=tmp_path, fuse="off") as compiled,
        pytest.raises(CaptureError, match=r"at every call.*What to do"),
    ):
        compiled(x)
    assert (net.calls, net.made, net.values, Net.shared) == (0, None, [1.0, 2.0, 3.0], 0)


@pytest.mark.parametrize("extra", LET_GO if SCALE > 1 else LET_GO[::2])
def test_what_settles_or_does_not_matter_is_eager_in_each_call(
    extra: Extra, tmp_path: Path
) -> None:
    net = _net(extra)
    plain = copy.deepcopy(net)
    with gascompile.compile(net, None, machine=MACHINE, cache_dir=tmp_path, fuse="off") as compiled:
        for num_rows in (2, 2, 3, 2, 3):
            x = torch.randn(num_rows, 8)
            found = compiled(x)
            assert not _memory
            with torch.no_grad():
                torch.testing.assert_close(found, plain(x))
            _memory.clear()


class _Fills(nn.Module):
    """Sets a number at its first call, and writes to what it is given and gives back."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.made: float | None = None

    def forward(self, x: torch.Tensor, kept: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.made is None:
            self.made = 3.0
        kept.index_copy_(0, torch.tensor([1]), self.layer(x) * self.made)
        return kept.sum(0), kept


def test_what_a_call_is_given_and_gives_back_is_no_value_of_another(tmp_path: Path) -> None:
    net = _Fills().eval()
    plain = copy.deepcopy(net)
    with gascompile.compile(net, None, machine=MACHINE, cache_dir=tmp_path, fuse="off") as compiled:
        given = [torch.randn(3, 8)]
        given.append(given[0].clone())
        for _ in range(3):
            x = torch.randn(1, 8)
            found = compiled(x, given[0])
            with torch.no_grad():
                wanted = plain(x, given[1])
            torch.testing.assert_close(found, wanted)
            assert found[1] is given[0]
            torch.testing.assert_close(given[0], given[1])


def _keeps_the_first_size(net: Net, y: torch.Tensor) -> Any:
    if net.made is None:
        net.made = float(y.shape[0])
    return y * net.made


def _sets_for_another(net: Net, y: torch.Tensor) -> Any:
    if y.shape[0] == 3:
        net.calls = 5
    return y * (net.calls + 1)


def _counts_for_another(net: Net, y: torch.Tensor) -> Any:
    net.calls += 1
    return y * net.calls if y.shape[0] == 3 else y


@pytest.mark.parametrize("extra", [_keeps_the_first_size, _sets_for_another, _counts_for_another])
def test_what_a_call_leaves_for_those_of_another_shape_is_refused(
    extra: Extra, tmp_path: Path
) -> None:
    net, two = _net(extra), torch.randn(2, 8)
    plain = copy.deepcopy(net)
    with gascompile.compile(net, None, machine=MACHINE, cache_dir=tmp_path, fuse="off") as compiled:
        with torch.no_grad():
            torch.testing.assert_close(compiled(two), plain(two))
        with pytest.raises(CaptureError, match="at every call"):
            compiled(torch.randn(3, 8))
        with torch.no_grad():
            torch.testing.assert_close(compiled(two), plain(two))
