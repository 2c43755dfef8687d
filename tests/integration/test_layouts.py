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
from torch import nn

import gascompile
from gascompile.errors import CaptureError, GASCompileError, UnsupportedOpError
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
        if place == "inputs":
            assert sharing(outputs, given_inputs) == sharing(expected, inputs)
        report = compiled.last_run
        assert report is not None and report.peak_bytes["cpu"] <= budget
        again = eager(real, inputs)
        assert again is not None
        assert_equal(flat(compiled(*given_inputs)), again)
        assert_equal(given_inputs, inputs)
        assert_equal(list(model.state_dict().values()), list(real.state_dict().values()))
        executor = compiled._executor
        assert executor is not None
        growth = peak_growth_bytes(lambda: executor.run(*given_inputs))
        arena = compiled.plan.arena_bytes.get("cpu", 0)
        assert growth + arena <= budget
