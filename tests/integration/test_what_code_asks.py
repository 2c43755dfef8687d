"""What a model's code sees of a call beside shapes: facts of inputs, order of keywords, effects that nobody reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gascompile
from gascompile.core.errors import CaptureError, PlanMismatchError

Branch = Callable[[torch.Tensor], bool]


class Branching(nn.Module):
    """Doubles where ``branch`` says so of the input."""

    def __init__(self, branch: Branch) -> None:
        super().__init__()
        self.linear, self.branch = nn.Linear(8, 8), branch

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        doubled: torch.Tensor = self.linear(x) * (2 if self.branch(x) else 1)
        return doubled


@pytest.mark.parametrize("branch", [lambda x: x.requires_grad, lambda x: x.storage_offset() > 0])
@torch.no_grad()
def test_what_an_input_is_asked_for_is_part_of_its_plan(branch: Branch, tmp_path: Path) -> None:
    model = Branching(branch)
    inputs = [torch.randn(2, 8), torch.randn(3, 8)[1:], torch.randn(2, 8).requires_grad_()]
    with gascompile.compile(model, cache_dir=tmp_path, fuse="off") as compiled:
        for x in (*inputs, *inputs):
            assert torch.equal(compiled(x), model(x))
        assert len(compiled._gascompile.units) == 2
        compiled.save(tmp_path / "bundle")
    with gascompile.load(tmp_path / "bundle", cache_dir=tmp_path) as loaded:
        fits = branch(inputs[-1])
        for x in inputs:
            if branch(x) == fits:
                assert torch.equal(loaded(x), model(x))
            else:
                with pytest.raises(PlanMismatchError, match="which the model asks for"):
                    loaded(x)


@pytest.mark.parametrize(
    ("branch", "asked"),
    [
        (lambda x: x._base is None, "_base"),
        (lambda x: x.untyped_storage().nbytes() > 64, "untyped_storage"),
        (lambda x: isinstance(x, nn.Parameter), "nn.Parameter"),
    ],
)
@torch.no_grad()
def test_objects_of_inputs_are_refused_where_a_capture_has_others(
    branch: Branch, asked: str, tmp_path: Path
) -> None:
    model, x = Branching(branch), torch.randn(2, 8)
    with gascompile.compile(model, cache_dir=tmp_path, fuse="off") as compiled:
        assert torch.equal(compiled(x), model(x))
        other = nn.Parameter(x) if asked == "nn.Parameter" else torch.randn(3, 8)[1:]
        with pytest.raises(CaptureError, match=f"asks .* {asked}"):
            compiled(other)
        assert torch.equal(compiled(x), model(x))


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(
        self, x: torch.Tensor, *, bias: float = 0.0, **others: torch.Tensor
    ) -> torch.Tensor:
        return torch.cat([self.linear(x) + bias, *others.values()])


@torch.no_grad()
def test_keywords_that_a_model_takes_by_two_stars_keep_their_order(tmp_path: Path) -> None:
    model, x = Keywords(), torch.randn(2, 8)
    z, a = torch.randn(2, 8), torch.randn(2, 8)
    with gascompile.compile(model, cache_dir=tmp_path, fuse="off") as compiled:
        assert torch.equal(compiled(x, z=z, a=a), model(x, z=z, a=a))
        assert torch.equal(compiled(x, a=a, z=z), model(x, a=a, z=z))
        compiled.save(tmp_path / "bundle")
    with gascompile.load(tmp_path / "bundle", cache_dir=tmp_path) as loaded:
        assert torch.equal(loaded(a=a, z=z, x=x), model(x, a=a, z=z))
        with pytest.raises(PlanMismatchError, match="structure"):
            loaded(x, z=z, a=a)


@torch.library.custom_op("gascompile_tests::noisy", mutates_args=())
def noisy(x: torch.Tensor) -> torch.Tensor:
    """Draw random numbers, which its schema does not say."""
    return x + torch.randn_like(x)


@noisy.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Unread(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.norm(x)
        noisy(x)
        torch.rand(3)
        torch.batch_norm_update_stats(x, self.norm.running_mean, self.norm.running_var, 0.5)
        drawn: torch.Tensor = self.linear(x) + torch.rand(2, 8)
        return drawn


@torch.no_grad()
def test_statistics_and_random_numbers_of_ops_that_nobody_reads(tmp_path: Path) -> None:
    x, wanted, found = torch.randn(2, 8), Unread(), Unread()
    noisy(x.to("meta"))  # torch takes note of the first call of its outline
    found.load_state_dict(wanted.state_dict())
    with gascompile.compile(found, cache_dir=tmp_path, fuse="off") as compiled:
        for seed in range(2):
            results = []
            for model in (wanted, compiled):
                torch.manual_seed(seed)
                results.append((model(x), torch.rand(1)))
            torch.testing.assert_close(*results, rtol=0, atol=0)
    torch.testing.assert_close(found.state_dict(), wanted.state_dict())


def _merge(model: Any) -> None:
    model[0].weight.data += 0.125


def _numpy(model: Any) -> None:
    model[0].weight.detach().numpy()[:] *= 2


@pytest.mark.parametrize("write", [_merge, _numpy, lambda model: model[1].bias.data.zero_()])
@torch.no_grad()
def test_whole_weights_that_are_written_past_their_versions(
    write: Callable[[Any], None], tmp_path: Path
) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(2, 8)
    with gascompile.compile(model, cache_dir=tmp_path, fuse="off") as compiled:
        for _ in range(2):
            assert torch.equal(compiled(x), model(x))
            write(model)
        assert torch.equal(compiled(x), model(x))
