"""``torch.compile(model, backend="gascompile")``: graphs of Dynamo's within one budget."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gascompile.api.runner import Runner
from gascompile.api.shared_budget import SharedBudget
from gascompile.core.errors import CompiledModelError
from gascompile.integrations import dynamo

WIDTH = 128


class Broken(nn.Module):
    """Two graphs: Dynamo ends one where Python prints."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [rows, width]."""
        x = torch.relu(self.norm(self.first(x)))
        torch._dynamo.graph_break()
        return torch.as_tensor(self.second(x) + x)


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def model() -> Broken:
    torch.manual_seed(0)
    return Broken().eval()


@pytest.fixture
def build(model: Broken, tmp_path: Path) -> Callable[..., Any]:
    def compile_it(budget: str = "1MiB", **options: Any) -> Any:
        given = {"budget": budget, "machine": "cpu-nvme", "cache_dir": tmp_path, **options}
        return torch.compile(model, backend=dynamo.backend, options=given)

    return compile_it


def rows(number: int) -> torch.Tensor:
    return torch.randn(number, WIDTH, generator=torch.Generator().manual_seed(number))


def test_it_is_registered() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    points = tomllib.loads(text)["project"]["entry-points"]["torch_dynamo_backends"]
    assert EntryPoint("gascompile", points["gascompile"], "").load() is dynamo.backend


def test_graphs_take_turns_with_one_budget(
    model: Broken, build: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Runner] = []
    open_at_once: list[int] = []
    add = SharedBudget.add
    call = Runner.call

    def added(self: SharedBudget, runner: Runner) -> None:
        seen.append(runner)
        add(self, runner)

    def called(self: Runner, args: Any, kwargs: Any) -> Any:
        found = call(self, args, kwargs)
        open_at_once.append(sum(r.session is not None and r.session.is_open for r in seen))
        return found

    monkeypatch.setattr(SharedBudget, "add", added)
    monkeypatch.setattr(Runner, "call", called)
    # Each graph has 64 KiB of weights and some: both do not fit.
    compiled = build("120KiB")
    with torch.no_grad():
        for number in (3, 3, 5, 7):
            assert torch.equal(compiled(rows(number)), model(rows(number)))
    assert len(seen) >= 2
    assert set(open_at_once) == {1}
    assert all(r.current().bundle.plan.peak_bytes["cpu"] <= 120 << 10 for r in seen)
    # Sizes that Dynamo makes symbols of are ranges of a plan: one for 3, one for 5, one for a range.
    assert max(len(r.units) for r in seen) <= 3


def test_parameters_and_buffers_are_the_model_s(model: Broken, build: Callable[..., Any]) -> None:
    compiled = build()
    with torch.no_grad():
        compiled(rows(4))
        model.first.weight.mul_(2)
        assert torch.equal(compiled(rows(4)), model(rows(4)))
        model.first.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        assert torch.equal(compiled(rows(4)), model(rows(4)))
        twin = Broken()
        twin.load_state_dict(model.state_dict())
        assert torch.equal(compiled.train()(rows(4)), twin.train()(rows(4)))
        torch.testing.assert_close(model.norm.running_mean, twin.norm.running_mean)


class Scaled(nn.Module):
    """A number among the arguments, which decides a dtype, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, scale: float, n: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return [rows, width] and numbers."""
        return nn.functional.elu(self.layer(x) * scale, alpha=scale), n * scale


def test_numbers_change_between_calls(tmp_path: Path) -> None:
    model = Scaled().eval()
    options: dict[str, Any] = {"budget": "1MiB", "machine": "cpu-nvme", "cache_dir": tmp_path}
    compiled = torch.compile(model, backend=dynamo.backend, options=options)
    with torch.no_grad():
        for scale in (1.0, 0.5, 0.1, 0.5, 3.0):
            wanted = model(rows(3), scale, torch.arange(4))
            for found, want in zip(compiled(rows(3), scale, torch.arange(4)), wanted, strict=True):
                assert found.dtype == want.dtype
                assert torch.equal(found, want)


def test_gradients_are_refused(model: Broken, build: Callable[..., Any]) -> None:
    compiled = build()
    with pytest.raises(CompiledModelError, match=r"torch\.no_grad"):
        compiled(rows(2))
    model.requires_grad_(False)
    assert torch.equal(compiled(rows(2)), model(rows(2)))
    with pytest.raises(CompiledModelError, match="compile_step"):
        compiled(rows(2).requires_grad_())


def test_unknown_options_are_refused(build: Callable[..., Any]) -> None:
    with (
        torch.no_grad(),
        pytest.raises(Exception, match=r"unknown option 'bugdet'.*budget, cache_dir") as error,
    ):
        build(bugdet=1)(rows(2))
    assert isinstance(error.value.__cause__ or error.value.inner_exception, ValueError)  # type: ignore[attr-defined]
