"""Models that nobody tuned for: odd tensors, mutation, dynamic sizes, and what cannot be captured."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

import gascompile
from gascompile.core.errors import CaptureError, InfeasiblePlanError, UnsupportedOpError
from tests.allocator import peak_growth_bytes
from tests.integration.test_models import smallest_budget
from tests.zoo import assert_same, eager


class Pair(NamedTuple):
    """A type that no other process knows."""

    first: torch.Tensor
    second: torch.Tensor


class Calls(nn.Module):
    """A module of one linear layer whose forward is given."""

    def __init__(self, function: Callable[..., Any], **tensors: torch.Tensor) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.function = function
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


def test_parameters_of_every_layout(cache: Path) -> None:
    base = torch.randn(6, 8)
    model = Calls(
        lambda m, x: [
            torch.cat([m.low, m.high, m.empty]) @ x.t(),
            x @ m.turned.t(),
            functional.linear(x, m.turned.reshape(16, 8)) * m.scalar,
            m.wide.sum(0) + m.sliced,
            m.same * 2,
        ],
        low=base[:3],
        high=base[3:],
        same=base[:3],
        turned=torch.randn(8, 16).t(),
        scalar=torch.randn(()),
        empty=torch.empty(0, 8),
        wide=torch.randn(1, 8).expand(4, 8),
        sliced=torch.randn(8, 16)[:, ::2],
    ).eval()
    inputs = {"x": torch.randn(3, 8)}
    expected = eager(model, inputs)
    for budget in (None, smallest_budget(model, inputs, cache)):
        with gascompile.compile(model, budget, example_inputs=inputs, cache_dir=cache) as compiled:
            for _ in range(4):
                assert_same(compiled(**inputs), expected)


class Positions(nn.Module):
    """Whether the positions are copied or viewed depends on the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(1, 64, 64))
        self.layers = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch = x.shape[0]
        table = self.table.expand(batch, -1, -1).reshape(batch * 64, 64)
        result: torch.Tensor = self.layers(x) + table.view(batch, 64, 64)
        return result


def test_a_view_of_a_streamed_weight_at_one_batch_size_only(cache: Path) -> None:
    model = Positions().eval()
    options: dict[str, Any] = {
        "example_inputs": (torch.randn(4, 64, 64),),
        "dynamic_shapes": ({0: torch.export.Dim("batch", min=1, max=32)},),
        "cache_dir": cache,
    }
    with pytest.raises(InfeasiblePlanError) as error:
        gascompile.compile(model, 0, **options)
    with gascompile.compile(model, error.value.required_bytes, **options) as compiled:
        outside = compiled.plan.peak_bytes["cpu"] - compiled.plan.arena_bytes["cpu"]
        for batch in (1, 1, 2, 32, 1):
            x = torch.randn(batch, 64, 64)
            assert_same(compiled(x), eager(model, {"x": x}))
            executor = compiled._gascompile.executor
            assert executor is not None
            assert peak_growth_bytes(partial(executor.run, x)) <= outside


def count(module: Any, x: torch.Tensor) -> torch.Tensor:
    module.n.add_(1)
    result: torch.Tensor = module.layer(x) + module.n
    return result


def test_signatures_share_the_buffers_of_a_checkpoint(cache: Path, tmp_path: Path) -> None:
    model = Calls(count, n=torch.zeros(())).eval()
    save_file({k: v.clone() for k, v in model.state_dict().items()}, tmp_path / "model.safetensors")
    with torch.device("meta"):
        skeleton = Calls(count, n=torch.zeros(())).eval()
    compiled = gascompile.compile(
        skeleton, checkpoint=tmp_path / "model.safetensors", cache_dir=cache
    )
    for rows in (2, 3, 2, 3):
        x = torch.randn(rows, 8)
        assert_same(compiled(x), eager(model, {"x": x}))


def _overlapping() -> nn.Module:
    base = torch.zeros(8)
    return Calls(lambda m, x: m.a.add_(1) + m.part.sum() + m.layer(x), a=base, part=base[:4])


def _hidden() -> nn.Module:
    model = Calls(lambda m, x: m.layer(x) + m.hidden.add_(1))
    model.hidden = torch.zeros(8)
    return model


REFUSED: dict[str, tuple[Callable[[], nn.Module], type[Exception], str]] = {
    "overlap": (_overlapping, UnsupportedOpError, "'a', which shares memory with 'part'"),
    "attribute": (_hidden, UnsupportedOpError, r"'hidden'.*register_buffer\('hidden', value\)"),
    "named tuple": (
        lambda: Calls(lambda m, x: Pair(x, m.layer(x))),
        CaptureError,
        "returns a type that a saved program cannot name.*use a plain tuple",
    ),
    "dtype": (
        lambda: Calls(lambda m, x: m.layer(x) + m.c.real, c=torch.zeros(8, dtype=torch.complex128)),
        UnsupportedOpError,
        "'c' has the dtype complex128",
    ),
    "transform": (
        lambda: Calls(lambda m, x: torch.func.vmap(m.layer)(x)),
        UnsupportedOpError,
        "no ATen op.*batched",
    ),
    "derivative": (
        lambda: Calls(lambda m, x: torch.func.jvp(m.layer, (x,), (x,))[1]),
        UnsupportedOpError,
        "no ATen op.*formulas",
    ),
    "branch": (
        lambda: Calls(lambda m, x: m.layer(x) if x.sum() > 0 else x),
        CaptureError,
        r"test_unusual_models.py:\d+.*torch.where",
    ),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # of transforms
@pytest.mark.parametrize("name", REFUSED)
def test_what_no_plan_can_hold_is_refused_with_the_way_out(name: str, cache: Path) -> None:
    make, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        gascompile.compile(make().eval(), example_inputs=(torch.randn(3, 8),), cache_dir=cache)
    assert torch.ones(1).data_ptr(), "tensors of this process are no longer what they were"


def test_dynamic_range_that_the_model_breaks_is_named(cache: Path) -> None:
    model = Calls(lambda m, x: m.table[:, : x.shape[0]].contiguous() @ x, table=torch.randn(8, 16))
    with pytest.raises(CaptureError, match=r"rows.*16.*ranges and relations"):
        gascompile.compile(
            model.eval(),
            example_inputs=(torch.randn(3, 8),),
            dynamic_shapes=({0: torch.export.Dim("rows", min=2, max=16)},),
            cache_dir=cache,
        )
