"""What a model does beside computing: let go where no value of it can matter, refused or captured anew elsewhere."""

from __future__ import annotations

import logging
import math
import operator
import time
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import torch
from torch import nn

import gascompile
from gascompile.capture.export import capture
from gascompile.capture.record.opaque import OpaqueList, OpaqueNumber, UsedError, Uses
from gascompile.capture.record.record import CaptureRecord
from gascompile.core.errors import CaptureError
from gascompile.training.capture.joint import capture_joint
from tests.training.runs import MACHINE

_LOG = logging.getLogger(__name__)
_calls = 0
_seen: dict[str, Any] = {"calls": 0, "times": []}


class Net(nn.Module):
    """Does something beside its layer."""

    per_class = default = 0

    def __init__(self, extra: Callable[[Net, torch.Tensor], torch.Tensor | None]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.steps, self.beta, self.time_s = 0, 0.25, 0.0
        self.log: list[Any] = []
        self.extra = extra

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        found = self.extra(self, y)
        return y if found is None else found


def _counts(net: Net, _: torch.Tensor) -> None:
    net.steps += 1


def _counts_on(net: Net, _: torch.Tensor) -> None:
    net.steps = 2 * net.steps + 1
    net.beta = net.steps / 4 - 0.5


def _appends(net: Net, y: torch.Tensor) -> None:
    net.log.append(net.steps)
    net.log += [y.dim(), "text"]
    net.steps += 1


def _counts_from_its_class(net: Net, _: torch.Tensor) -> None:
    net.default += 1


def _says(net: Net, _: torch.Tensor) -> None:
    net.steps += 1
    print("step", net.steps)
    _LOG.info("step %d of %s", net.steps, net.log)


def _times(net: Net, _: torch.Tensor) -> None:
    begun_s, precise_s = time.time(), perf_counter()
    net.time_s += time.time() - begun_s
    net.log.append(perf_counter() - precise_s)


def _counts_globally(net: Net, _: torch.Tensor) -> None:
    global _calls  # noqa: PLW0603 - what programs do
    _calls += 1
    _seen["calls"] += 1
    _seen["times"].append(_seen["calls"] * 2.5)
    Net.per_class += 1


def _compares(net: Net, y: torch.Tensor) -> torch.Tensor:
    net.steps += 1
    return y * 0.5 if net.steps > 100 else y


def _compares_entry(_: Net, y: torch.Tensor) -> torch.Tensor:
    _seen["calls"] += 1
    return y * 0.5 if _seen["calls"] > 100 else y


def _compares_global(_: Net, y: torch.Tensor) -> torch.Tensor:
    global _calls  # noqa: PLW0603 - what programs do
    _calls += 1
    return y * 0.5 if _calls == 100 else y


def _compares_by_type(net: Net, y: torch.Tensor) -> torch.Tensor:
    net.steps += 1
    return y * 0.5 if type(net.steps) is int and net.steps > 100 else y


def _multiplies(net: Net, y: torch.Tensor) -> torch.Tensor:
    net.steps += 1
    return y * net.steps


def _multiplies_from_its_class(net: Net, y: torch.Tensor) -> torch.Tensor:
    net.default += 1
    return y * net.default


def _slices(net: Net, y: torch.Tensor) -> torch.Tensor:
    net.steps += 1
    return y[: net.steps]


def _hides(net: Net, y: torch.Tensor) -> torch.Tensor:
    net.steps += 1
    try:
        return y * min(net.steps, 1)
    except BaseException:  # noqa: BLE001 - what must not hide a use
        return y


def _names(net: Net, y: torch.Tensor) -> torch.Tensor:
    net.steps += 1
    return y * {"100": 0.5}.get(f"{net.steps}", 1.0)


def _measures_log(net: Net, y: torch.Tensor) -> torch.Tensor:
    net.log.append(1)
    return y * (1 if len(net.log) < 100 else 2)


def _hurries(net: Net, y: torch.Tensor) -> torch.Tensor:
    return y if time.time() < net.beta + 1e12 else y * 2


def _anneals(net: Net, y: torch.Tensor) -> torch.Tensor:
    net.beta *= 0.5
    return y * net.beta


HARMLESS = [
    _counts, _counts_on, _counts_from_its_class, _appends, _says, _times, _counts_globally,
]  # fmt: skip
HARMFUL = [
    _compares, _compares_entry, _compares_global, _compares_by_type, _multiplies, _slices, _hides, _names,
    _measures_log, _hurries, _anneals, _multiplies_from_its_class,
]  # fmt: skip


def _loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(batch).square().mean()
    return found


def _state(net: Net) -> list[object]:
    own = [net.steps, net.time_s, [*net.log], vars(net).get("default")]
    return [*own, _calls, repr(_seen), Net.per_class, Net.default, type(Net.default)]


@pytest.mark.parametrize("extra", HARMLESS)
def test_what_cannot_matter_is_let_go_and_undone(
    extra: Callable[[Net, torch.Tensor], None], caplog: pytest.LogCaptureFixture
) -> None:
    net, x = Net(extra), torch.randn(3, 4)
    extra(net, x)
    before = _state(net)
    with caplog.at_level("WARNING", logger="gascompile"):
        step, call = capture_joint(net, _loss, x).record, capture(net, (x,), {}).record
    assert _state(net) == before
    assert caplog.text.count("does not matter") == 2
    for record in (step, call):
        assert isinstance(record, CaptureRecord)
        assert record.is_reproducible
        extra(net, x)
        assert record.changed() is None


def test_what_an_instance_has_of_its_class_stays_there() -> None:
    net, x = Net(_counts_from_its_class), torch.randn(3, 4)
    before = _state(net)
    for _ in range(2):
        capture(net, (x,), {})
        capture_joint(net, _loss, x)
        assert _state(net) == before


@pytest.mark.parametrize("extra", HARMFUL)
def test_a_step_refuses_what_may_matter(
    extra: Callable[[Net, torch.Tensor], torch.Tensor],
) -> None:
    with pytest.raises(CaptureError, match=r"this counts: .*pass it in the batch"):
        capture_joint(Net(extra), _loss, torch.randn(3, 4))
    assert type(Net.default) is int
    assert Net.default == 0


@pytest.mark.parametrize("extra", [_compares, _multiplies, _hurries])
def test_a_call_refuses_what_may_matter(
    extra: Callable[[Net, torch.Tensor], torch.Tensor],
) -> None:
    with pytest.raises(CaptureError, match=r"this counts: .*pass what changes as an input"):
        capture(Net(extra), (torch.randn(3, 4),), {})


def test_reasons_are_said_once_and_name_the_line() -> None:
    net = Net(_compares)
    with pytest.raises(CaptureError) as caught:
        capture_joint(net, _loss, torch.randn(3, 4))
    text = str(caught.value)
    assert text.count("Net.steps was") == 1
    line = _compares.__code__.co_firstlineno + 2
    assert f"Net.steps is compared at {__file__}:{line}" in text


def test_steps_and_calls_of_a_model_that_counts_are_eager_ones(tmp_path: Path) -> None:
    torch.manual_seed(1)
    net, x = Net(_times), torch.randn(3, 4)
    expected = net(x)
    plain = Net(_times)
    plain.load_state_dict(net.state_dict())
    found = gascompile.compile(net.eval(), "1MiB", machine=MACHINE, cache_dir=tmp_path)(x)
    torch.testing.assert_close(found, expected)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (net, plain)]
    with gascompile.compile_step(
        net.train(), _loss, optimizers[0], "64MiB", machine=MACHINE, cache_dir=tmp_path
    ) as step:
        for _ in range(3):
            optimizers[1].zero_grad()
            loss = _loss(plain, x)
            loss.backward()
            optimizers[1].step()
            torch.testing.assert_close(step(x), loss.detach())


_STORED = {"__add__", "__sub__", "__mul__", "__neg__", "__pos__", "__abs__"}
_SHARED = {
    "__class__", "__doc__", "__init__", "__new__", "__getattribute__", "__setattr__", "__delattr__", "__dir__",
    "__init_subclass__", "__subclasshook__", "__sizeof__", "__getnewargs__", "__getformat__", "__class_getitem__",
    "__getstate__", "__setformat__", "__iadd__",
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "real"), [(OpaqueNumber, int), (OpaqueNumber, float), (OpaqueList, list)]
)
def test_every_way_to_look_at_a_stand_in_is_a_use(kind: type, real: type) -> None:
    uses = Uses()
    value: Any = kind(real, "value", uses)
    assert isinstance(value, real)
    special = {n for n in dir(real) if n.startswith("__")} - _SHARED - _STORED
    special -= {f"__r{n[2:]}" for n in _STORED} | {"__truediv__", "__floordiv__", "__mod__"}
    for name in sorted(special - ({"__rmul__"} if real is list else set())):
        assert name in vars(kind), name
    asks: tuple[Callable[[Any], object], ...] = (
        bool, hash, str, repr, int, float, len, list, operator.index, operator.invert, math.floor,
        lambda v: v == 1, lambda v: v < 1,
        lambda v: f"{v}", lambda v: [1, 2][v], lambda v: 1 / v, lambda v: v**2,
        lambda v: torch.ones(2) * v, lambda v: v * torch.ones(2), range,
        torch.tensor, "{:d}".format, lambda v: v[0], lambda v: divmod(v, 2),
    )  # fmt: skip
    for ask in asks:
        with pytest.raises((UsedError, TypeError, ValueError)):
            ask(value)
