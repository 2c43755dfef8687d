"""Kernels never allocate more than planned, by the allocator's own record."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils import _pytree as pytree

from gascompile.cost_models.formulas.kernel_workspace import kernel_workspace_bytes
from tests.allocator import peak_growth_bytes


def measured_bytes(call: Callable[[], Any]) -> int:
    """Return what a call allocates beside its results."""
    with torch.no_grad():
        result = call()
        own: int = sum(t.untyped_storage().nbytes() for t in pytree.tree_leaves(result))
        del result
        return peak_growth_bytes(call) - own


def planned_bytes(func: Any, args: tuple[Any, ...]) -> int:
    with FakeTensorMode() as mode:
        fakes = pytree.tree_map_only(torch.Tensor, mode.from_tensor, args)
        outputs = pytree.tree_leaves(func(*fakes))
        inputs = [v for v in pytree.tree_leaves(fakes) if isinstance(v, torch.Tensor)]
        return kernel_workspace_bytes(func, fakes, inputs, outputs)


def _convolution(draw: random.Random) -> tuple[Any, ...]:
    dims = draw.choice([1, 2, 2, 3])
    batch, kernel = draw.choice([1, 2, 4]), draw.choice([1, 2, 3, 5])
    inner, outer = draw.choice([3, 4, 8, 16, 20, 64]), draw.choice([1, 8, 16, 24, 64])
    groups = draw.choice([1, 1, 1, 4, inner])
    if groups == inner:
        outer = inner
    elif inner % groups or outer % groups:
        groups = 1
    transposed = draw.random() < 0.3
    size = draw.choice([9, 13, 16])
    channels = (inner, outer // groups) if transposed else (outer, inner // groups)
    image = torch.randn(batch, inner, *[size] * dims)
    if dims == 2 and draw.random() < 0.3:
        image = image.to(memory_format=torch.channels_last)
    weight = torch.randn(*channels, *[kernel] * dims)
    stride, dilation = draw.choice([1, 1, 2]), draw.choice([1, 1, 1, 2])
    lists = ([stride] * dims, [0] * dims, [dilation] * dims, transposed, [0] * dims)
    return (image, weight, None, *lists, groups)


@pytest.mark.parametrize("seed", range(40))
def test_convolutions(seed: int) -> None:
    args = _convolution(random.Random(seed))
    func = torch.ops.aten.convolution.default
    assert measured_bytes(lambda: func(*args)) <= planned_bytes(func, args)


@pytest.mark.parametrize("rows", [1, 16, 128, 600])
@pytest.mark.parametrize(("depth", "columns"), [(64, 64), (512, 256), (3072, 512)])
def test_products_in_bfloat16(rows: int, depth: int, columns: int) -> None:
    left = torch.randn(rows, depth, dtype=torch.bfloat16)
    right = torch.randn(columns, depth, dtype=torch.bfloat16).t()
    func = torch.ops.aten.mm.default
    assert measured_bytes(lambda: left @ right) <= planned_bytes(func, (left, right))


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize(("steps", "width"), [(5, 64), (50, 256)])
def test_lstm(layers: int, steps: int, width: int) -> None:
    lstm = torch.nn.LSTM(width, 64, layers, bidirectional=True)
    x, state = torch.randn(steps, 2, width), torch.zeros(2 * layers, 2, 64)
    weights = list(lstm.parameters())
    args = (x, [state, state], weights, True, layers, 0.0, False, True, False)
    planned = _leaf_bytes(torch.ops.aten.lstm.input, args)
    assert measured_bytes(lambda: torch.ops.aten.lstm.input(*args)) <= planned


def _leaf_bytes(func: Any, args: tuple[Any, ...]) -> int:
    from gascompile.passes.graph.propagate import _Recorder

    with FakeTensorMode() as mode, torch.no_grad():
        fakes = pytree.tree_map_only(torch.Tensor, mode.from_tensor, args)
        recorder = _Recorder()
        with recorder:
            func(*fakes)
    return recorder.kernel_bytes + recorder.peak_bytes


@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
def test_resizing(mode: str) -> None:
    x = torch.randn(2, 8, 16, 16)
    func = getattr(torch.ops.aten, f"upsample_{mode}2d").default
    args: tuple[Any, ...] = (x, [32, 32]) if mode == "nearest" else (x, [32, 32], False)
    assert measured_bytes(lambda: func(*args)) <= planned_bytes(func, args) + 256


def test_mixed_dtypes_are_converted_first() -> None:
    a, b = torch.randn(100, 100), torch.ones(100, 100, dtype=torch.long)
    func = torch.ops.aten.add.Tensor
    assert planned_bytes(func, (a, b)) == math.prod(b.shape) * 4
    assert measured_bytes(lambda: a + b) <= planned_bytes(func, (a, b))
    assert planned_bytes(func, (a, a)) == 0


def test_layer_norm_copies_what_is_not_contiguous() -> None:
    x = torch.randn(4, 8, 64).transpose(0, 1)
    func = torch.ops.aten.native_layer_norm.default
    args = (x, [64], None, None, 1e-5)
    assert planned_bytes(func, args) == x.nbytes
    assert measured_bytes(lambda: functional.layer_norm(x, (64,))) <= x.nbytes + 256


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("is_contiguous", [True, False])
@pytest.mark.parametrize("threads", [1, 2])
def test_backward_passes_of_layer_norms_sum_per_thread(
    dtype: torch.dtype, is_contiguous: bool, threads: int
) -> None:
    x = torch.randn(8, 4, 768, dtype=dtype)
    x = x if is_contiguous else x.transpose(0, 1)
    weight = torch.ones(768, dtype=dtype)
    statistics = torch.native_layer_norm(x, [768], weight, weight, 1e-5)[1:]
    args = (x, x, [768], *statistics, weight, weight, [True, True, True])
    func = torch.ops.aten.native_layer_norm_backward.default
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        measured = measured_bytes(lambda: func(*args))
        planned = planned_bytes(func, args)
    finally:
        torch.set_num_threads(before)
    assert threads * 2 * 768 * x.itemsize <= measured <= planned
