"""Whatever the layout of inputs, weights and buffers: results, effects on the caller's tensors and sharing as eager's.

A sample runs by default; ``GASCOMPILE_FUZZ_RUNS`` set to at least their number runs all combinations.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import gascompile
from gascompile.core.errors import (
    CaptureError,
    GASCompileError,
    PlanMismatchError,
    UnsupportedOpError,
)
from tests.allocator import peak_growth_bytes
from tests.integration.layout_cases import CASES, LAYOUTS, PLACES, Calls, laid_out

ALL = [(name, layout, place) for name in CASES for layout in LAYOUTS for place in PLACES]
RUNS = min(int(os.environ.get("GASCOMPILE_FUZZ_RUNS", "30")), len(ALL))
CHOSEN = random.Random(5).sample(ALL, RUNS)
REFUSED = (CaptureError, UnsupportedOpError)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("layouts")


def make(name: str, layout: str, place: str) -> tuple[nn.Module, list[torch.Tensor]]:
    torch.manual_seed(1)
    case = CASES[name]
    model = Calls(case, layout, place)
    inputs = [torch.randn(shape) for shape in case.inputs]
    return model, [laid_out(x, layout if place == "inputs" else "contiguous") for x in inputs]


def eager(model: nn.Module, inputs: Sequence[Any]) -> list[Any] | None:
    """Return the outputs, ``None`` where eager itself refuses."""
    try:
        with torch.no_grad():
            return flat(model(*inputs))
    except RuntimeError:
        return None


def flat(outputs: Any) -> list[Any]:
    return torch.utils._pytree.tree_leaves(outputs)


def assert_equal(found: Sequence[Any], expected: Sequence[Any]) -> None:
    for value, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-5, atol=1e-5, equal_nan=True)


def sharing(outputs: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
    """Return which outputs are inputs or each other, and which lie in the memory of one of them, and where."""
    found: list[Any] = []
    tensors = [*inputs, *outputs]
    for i, output in enumerate(outputs, start=len(inputs)):
        for j, other in enumerate(tensors[:i]):
            if output is other:
                found.append((i, j, "is"))
            elif output.untyped_storage().data_ptr() == other.untyped_storage().data_ptr():
                found.append((i, j, output.data_ptr() - other.data_ptr(), output.stride()))
    return found


def strides(values: Sequence[Any]) -> list[Any]:
    return [value.stride() for value in values]


@pytest.mark.filterwarnings("ignore:Use of index_fill_ on expanded tensors:UserWarning")
@pytest.mark.parametrize(("name", "layout", "place"), CHOSEN)
def test_layouts(name: str, layout: str, place: str, folder: Path) -> None:
    real, inputs = make(name, layout, place)
    model, given_inputs = make(name, layout, place)
    options: dict[str, Any] = {
        "machine": "cpu-nvme", "cache_dir": folder, "fuse": "off", "time_limit_s": 1.0
    }  # fmt: skip
    expected = eager(real, inputs)
    if expected is None:
        with pytest.raises((RuntimeError, GASCompileError)):
            gascompile.compile(model, "1MiB", **options)(*given_inputs)
        return
    example = make(name, "contiguous", place)[1] if place == "inputs" else given_inputs
    outputs = None
    try:
        with pytest.raises(gascompile.InfeasiblePlanError) as error:
            gascompile.compile(model, 0, example_inputs=tuple(given_inputs), **options)
        # Room for an own plan of the layout, and no more.
        budget = max(error.value.required_bytes, 1 << 12) + (1 << 15 if place == "inputs" else 0)
        compiled = gascompile.compile(model, budget, example_inputs=tuple(example), **options)
    except REFUSED as refusal:
        pytest.skip(str(refusal))
    with compiled:
        outputs = flat(compiled(*given_inputs))
        assert_equal(outputs, expected)
        assert_equal(given_inputs, inputs)
        # What shares memory with a weight is a copy; where eager has a faster layer, it may lie otherwise.
        if name != "return_weights" and strides(outputs) == strides(expected):
            assert sharing(outputs, given_inputs) == sharing(expected, inputs)
        report = compiled.last_run
        assert report is not None and report.peak_bytes["cpu"] <= budget
        again = eager(real, inputs)
        assert again is not None
        assert_equal(flat(compiled(*given_inputs)), again)
        assert_equal(given_inputs, inputs)
        assert_equal(list(model.state_dict().values()), list(real.state_dict().values()))
        executor = compiled._gascompile.executor
        assert executor is not None
        growth = peak_growth_bytes(lambda: executor.run(*given_inputs))
        arena = compiled.plan.arena_bytes.get("cpu", 0)
        assert growth + arena <= budget


class Image(nn.Module):
    """Depends on how the result of a convolution lies."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layer = nn.Conv2d(channels, 4, 3, padding=1)

    def forward(self, image: torch.Tensor) -> Any:
        found = self.layer(image)
        rows = found.as_strided((found.numel(),), (1,))
        return found, rows, found * (2 if found.is_contiguous() else 3)


@pytest.mark.parametrize(("images", "channels"), [(1, 3), (2, 1), (1, 1), (2, 3)])
@pytest.mark.parametrize("place", ["inputs", "weights"])
def test_images_of_one_row_or_channel(images: int, channels: int, place: str, folder: Path) -> None:
    model = Image(channels).eval()
    image = torch.randn(images, channels, 4, 5)
    if place == "weights":
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    else:
        image = torch.empty_like(image, memory_format=torch.channels_last).copy_(image)
    with gascompile.compile(model, "1MiB", machine="cpu-nvme", cache_dir=folder) as compiled:
        # A part of another tensor, and a contiguous one, with strides of their own where nothing depends on them.
        for value in (image, torch.cat([image, image])[:images], image.contiguous()):
            expected = eager(model, [value])
            with torch.no_grad():
                outputs = flat(compiled(value))
            assert expected is not None
            assert_equal(outputs, expected)
            assert strides(outputs) == strides(expected)


class Writes(nn.Module):
    """Writes to its first argument, reads the second, and tells whether they are one."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        x[1:].mul_(2)
        made = x + y if x is y else x * y
        y.t().add_(1)
        return made, x, y[0]


def pair(which: str, offset: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two matrices of four by four: one, apart, or views of one memory."""
    memory = torch.arange(80.0)
    x = memory[16:32].view(4, 4)
    if which == "same":
        return x, x
    if which == "apart":
        return x, x.clone()
    return x, memory[offset : offset + 16].view(4, 4).t() if which == "turned" else memory[
        offset : offset + 16
    ].view(4, 4)


@pytest.fixture(scope="module")
def written(folder: Path) -> tuple[gascompile.CompiledModel, gascompile.CompiledModel]:
    """Return a model planned per signature, and one planned for two tensors."""
    options: dict[str, Any] = {"machine": "cpu-nvme", "cache_dir": folder, "fuse": "off"}
    example = pair("apart", 0)
    return (
        gascompile.compile(Writes(), "64KiB", **options),
        gascompile.compile(Writes(), "64KiB", example_inputs=example, **options),
    )


@settings(max_examples=12, deadline=None)
@given(
    calls=st.lists(
        st.tuples(
            st.sampled_from(["same", "apart", "views", "turned"]), st.sampled_from([8, 16, 20, 48])
        ),
        min_size=1,
        max_size=4,
    )
)
def test_arguments_that_share_memory(
    calls: list[tuple[str, int]],
    written: tuple[gascompile.CompiledModel, gascompile.CompiledModel],
) -> None:
    for which, offset in calls:
        for compiled in written:
            real, mine = pair(which, offset), pair(which, offset)
            expected = eager(Writes(), real)
            assert expected is not None
            outputs = flat(compiled(*mine))
            assert_equal(outputs, expected)
            assert_equal(mine, real)
            assert sharing(outputs, mine) == sharing(expected, real)


def test_a_plan_for_one_tensor_is_not_used_for_two(folder: Path) -> None:
    x, y = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    attention = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    compiled = gascompile.compile(
        attention, "64KiB", example_inputs=(x, x, x), cache_dir=folder, machine="cpu-nvme"
    )
    for call in ((x, x, x), (x, y, y), (y, x, y), (x, x, y)):
        expected = eager(attention, call)
        assert expected is not None
        assert_equal(flat(compiled(*call)), expected)


def test_a_bundle_refuses_what_it_was_not_planned_for(folder: Path, tmp_path: Path) -> None:
    model, x = nn.Linear(8, 8), torch.randn(8, 8)
    options: dict[str, Any] = {"machine": "cpu-nvme", "cache_dir": folder}
    gascompile.compile(model, "64KiB", example_inputs=(x,), **options).save(tmp_path / "bundle")
    loaded = gascompile.load(tmp_path / "bundle", any_machine=True)
    assert_equal([loaded(x)], [model(x)])
    assert_equal([loaded(x[:, None].transpose(0, 1)[0])], [model(x)])
    with pytest.raises(PlanMismatchError, match=r"strides.*contiguous"):
        loaded(x.t())
    with pytest.raises(UnsupportedOpError, match="to_dense"):
        loaded(x.to_sparse())


class Named(nn.Module):
    """Adds a parameter of any name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.register_parameter(name, nn.Parameter(torch.randn(4, 4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.get_parameter(self.name)


@pytest.mark.parametrize("name", ["%x", "w[0:4]"])
def test_names_that_plans_give_to_others_are_refused(name: str, folder: Path) -> None:
    model = Named(name)
    with pytest.raises(UnsupportedOpError, match="in the model"):
        gascompile.compile(
            model, example_inputs=(torch.randn(4, 4),), cache_dir=folder, machine="cpu-nvme"
        )


class Offsets(nn.Module):
    """Takes a view of one of its tensors at a place in its storage."""

    def __init__(self, of: str) -> None:
        super().__init__()
        self.of = of
        self.w = nn.Parameter(torch.randn(20)[4:])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value = x if self.of == "x" else self.w
        return value.as_strided((2, 2), (2, 1), 1) + x.sum()


@pytest.mark.parametrize("of", ["x", "w"])
def test_places_in_storages_are_refused(of: str, folder: Path) -> None:
    with pytest.raises(UnsupportedOpError, match="storage_offset"):
        gascompile.compile(
            Offsets(of), example_inputs=(torch.randn(8),), cache_dir=folder, machine="cpu-nvme"
        )
