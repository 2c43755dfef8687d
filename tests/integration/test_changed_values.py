"""Values of Python's that change between two calls of a compiled model: eager's results, whatever they are."""

from __future__ import annotations

import copy
import cProfile
import gc
import logging
import os
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gascompile
from gascompile.api.guards import Values, require_apart
from gascompile.capture.record.record import CaptureRecord
from gascompile.capture.record.watched import Reads
from gascompile.capture.record.watches import watch
from gascompile.core.errors import CompiledModelError, PlanMismatchError

_logger = logging.getLogger(__name__)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale, self.calls = nn.Linear(8, 8), 1.0, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        _logger.debug("call %d", self.calls)
        scaled: torch.Tensor = self.linear(x) * self.scale
        return scaled


@pytest.mark.parametrize("gives_examples", [True, False])
def test_a_changed_value_gets_its_plan_in_the_place_of_the_old_one(
    tmp_path: Path, gives_examples: bool
) -> None:
    model, x = Scaled().eval(), torch.randn(2, 8)
    with gascompile.compile(
        model, None, (x,) if gives_examples else None, cache_dir=tmp_path, fuse="off"
    ) as compiled:
        for scale in (1.0, 2.0, 2.0, 0.5):
            model.scale = scale
            torch.testing.assert_close(compiled(x), model(x))
        assert len(compiled._gascompile.units) == 1


class MadeOnDemand(dict[str, Any]):
    """As libraries keep activations: asked for one, it makes it."""

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key)()


def test_dictionaries_that_make_what_is_asked_for_have_not_changed() -> None:
    model, made = nn.Module(), MadeOnDemand(relu=nn.ReLU)
    vars(model)["made"] = made
    watches = watch(model, (), (), Reads(names=None, ran=None), versions=False)
    assert watches.changed() is None
    made["relu"] = nn.GELU
    assert "made['relu']" in (watches.changed() or "")


@pytest.mark.parametrize(
    ("held", "change"),
    [
        (deque([1, 2]), lambda held: held.rotate()),
        (deque([1, 2], 2), lambda held: held.append(1)),
        ({1, 2}, lambda held: (held.remove(1), held.add(3))),
        ({1, 2}, lambda held: (held.remove(1), held.add(True))),
        ([1, 2], lambda held: held.reverse()),
        ({"a": 1, "b": 2}, lambda held: held.update(a=2, b=1)),
    ],
)
def test_containers_of_the_same_length_have_changed(
    held: Any, change: Callable[[Any], object]
) -> None:
    model = nn.Module()
    vars(model)["held"] = held
    watches = watch(model, (), (), Reads(names=None, ran=None), versions=False)
    assert watches.changed() is None
    change(held)
    assert "held" in (watches.changed() or "")


@pytest.fixture
def _timed_collections() -> Iterator[None]:
    import time

    def timed(phase: str, info: dict[str, int]) -> None:
        time.perf_counter()

    gc.callbacks.append(timed)
    yield
    gc.callbacks.remove(timed)


class Collects(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gc.collect()
        return x + 1


@pytest.mark.usefixtures("_timed_collections")
def test_what_is_told_of_collections_is_no_part_of_a_capture() -> None:
    from gascompile.capture.export import capture

    record = capture(Collects(), (torch.ones(2),), {}).record
    assert isinstance(record, CaptureRecord)
    assert "clock" not in (record.why or "")


def test_a_capture_under_a_profiler_gives_it_back(tmp_path: Path) -> None:
    profiler, x = cProfile.Profile(), torch.ones(2, 8)
    profiler.enable()
    with gascompile.compile(Scaled().eval(), None, (x,), cache_dir=tmp_path, fuse="off") as model:
        profiler.clear()
        model(x)
        profiler.disable()
    assert profiler.getstats(), "calls are counted again"


class Normed(nn.Module):
    """Whose statistics are written where ``learns``, and else lie in a file."""

    mean: torch.Tensor
    var: torch.Tensor
    shift: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("var", torch.ones(8))
        self.register_buffer("shift", None)

    def forward(self, x: torch.Tensor, learns: bool) -> torch.Tensor:
        x = nn.functional.batch_norm(self.linear(x), self.mean, self.var, training=learns)
        x = x if self.shift is None else x + self.shift
        return x * 2 if hasattr(self, "doubled") else x


def set_data(net: Normed) -> None:
    net.linear.weight.data = torch.full((8, 8), 0.5)


CHANGES: list[Callable[[Normed], object]] = [
    lambda net: net.get_buffer("mean").add_(2),
    lambda net: setattr(net, "mean", torch.full((8,), 3.0)),
    lambda net: setattr(net, "shift", torch.ones(8, dtype=torch.float64)),
    set_data,
    lambda net: setattr(net, "doubled", True),
    lambda net: setattr(net.linear, "forward", torch.relu),
]


@pytest.mark.parametrize("is_given", [False, True])
def test_buffers_and_what_modules_get_later_are_those_of_now(
    tmp_path: Path, *, is_given: bool
) -> None:
    net, twin, x = Normed(), Normed(), torch.randn(4, 8)
    twin.load_state_dict(net.state_dict())
    examples = (x, False) if is_given else None
    with (
        torch.no_grad(),
        gascompile.compile(
            net, example_inputs=examples, cache_dir=tmp_path, fuse="off"
        ) as compiled,
    ):
        for learns in (False,) if is_given else (False, True, False):
            torch.testing.assert_close(compiled(x, learns), twin(x, learns))
            torch.testing.assert_close(net.mean, twin.mean)
        for change in CHANGES:
            change(net)
            change(twin)
            torch.testing.assert_close(compiled(x, False), twin(x, False))


def test_what_a_device_has_written_is_read_by_other_plans(tmp_path: Path) -> None:
    net, twin, x = Normed(), Normed(), torch.randn(4, 8)
    twin.load_state_dict(net.state_dict())
    with (
        torch.no_grad(),
        gascompile.compile(net, cache_dir=tmp_path, fuse="off", machine="emulated") as compiled,
    ):
        for learns in (False, True, True, False, True, False):
            torch.testing.assert_close(compiled(x, learns), twin(x, learns))
    torch.testing.assert_close(net.mean, twin.mean)


@pytest.mark.parametrize("machine", [None, "emulated"])
def test_what_was_written_before_a_mode_or_memory_changes_counts(
    tmp_path: Path, machine: str | None
) -> None:
    net, x = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).train(), torch.randn(4, 8)
    twin = copy.deepcopy(net)
    changes: list[Callable[[Any], object]] = [
        nn.Module.eval,
        nn.Module.train,
        lambda net: setattr(net[1].running_mean, "data", torch.ones(8)),
        nn.Module.eval,
    ]
    with (
        torch.no_grad(),
        gascompile.compile(net, None, (x,), cache_dir=tmp_path, machine=machine) as compiled,
    ):
        for change in changes:
            for _ in range(2):
                torch.testing.assert_close(compiled(x), twin(x))
            change(net)
            change(twin)
        torch.testing.assert_close(compiled(x), twin(x))
        for name, value in compiled.state_dict().items():
            torch.testing.assert_close(value, twin.state_dict()[name])


def test_a_bundle_is_of_the_model_of_now(tmp_path: Path) -> None:
    net: Any = nn.Sequential(nn.Linear(8, 8), nn.LeakyReLU(0.1))
    x = torch.randn(4, 8)
    changes: list[Callable[[], object]] = [
        lambda: net[0].weight.mul_(2),
        lambda: setattr(net[1], "negative_slope", 0.5),
    ]
    with (
        torch.no_grad(),
        gascompile.compile(net, None, (x,), cache_dir=tmp_path / "cache") as compiled,
    ):
        for change in changes:
            change()
            with pytest.raises(PlanMismatchError, match="save then"):
                compiled.save(tmp_path / "bundle")
            expected = compiled(x)
            compiled.save(tmp_path / "bundle")
            with gascompile.load(tmp_path / "bundle", allow_code=True) as loaded:
                assert torch.equal(loaded(x), expected)


class Clears(nn.Module):
    """A layer that is given memory to write to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
        room.zero_()
        found: torch.Tensor = self.linear(x)
        return found


def test_memory_of_weights_is_not_taken_as_an_input_that_is_written_to(tmp_path: Path) -> None:
    net, x = Clears(), torch.randn(2, 4)
    with torch.no_grad(), gascompile.compile(net, cache_dir=tmp_path, fuse="off") as compiled:
        room, before = torch.ones(2, 4), net.linear.weight.clone()
        assert torch.equal(compiled(x, room), net(x, torch.ones(2, 4))) and not room.any()
        with pytest.raises(CompiledModelError, match=r"memory of the model's own 'linear\.weight'"):
            compiled(x, net.linear.weight[:2])
        assert torch.equal(net.linear.weight, before)


def test_memory_that_a_model_has_given_back_may_be_written_to() -> None:
    net = Clears()
    values, weight = Values.of(net, "_parameters"), net.linear.weight
    given = {"room": weight.detach()[:1]}
    with pytest.raises(CompiledModelError, match="linear"):
        require_apart((values, None), given)
    net.to("meta")
    del weight
    require_apart((values, None), given)


class Asks(nn.Module):
    def forward(self, given: dict[str, torch.Tensor]) -> torch.Tensor:
        return given.pop("x") * float(os.environ["GASCOMPILE_TEST_FACTOR"])


def test_environment_variables_are_those_of_now_and_changed_arguments_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    x = torch.ones(2)
    with gascompile.compile(Asks(), cache_dir=tmp_path, fuse="off") as compiled:
        for factor in ("2", "2", "3"):
            monkeypatch.setenv("GASCOMPILE_TEST_FACTOR", factor)
            assert torch.equal(compiled({"x": x}), x * float(factor))
    assert caplog.text.count("changes a list or dict that it is given") == 2
