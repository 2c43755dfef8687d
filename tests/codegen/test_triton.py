"""Kernels for a GPU, written where there is none: run in Triton's interpreter, they compute what eager computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._triton import has_triton

from gascompile.codegen.cubin import compile_image, joined
from gascompile.codegen.target import GpuTarget, target_here
from gascompile.codegen.triton import GeneratedTriton, generate_triton
from gascompile.core.errors import UnsupportedOpError
from gascompile.core.kernels import KernelFiles, Segment
from gascompile.runtime.devices.driver import open_driver
from gascompile.runtime.kernels.fused import FusedSegment, bind
from gascompile.runtime.kernels.gpu_code import GpuCode
from tests.interpreted_gpu import (
    HOPPER,
    FakeLibrary,
    fake_driver,
    image_of_source,
    needs_interpreter,
)

Function = Callable[..., Any]
HALVES = (torch.bfloat16, torch.float16)


def traced(function: Function, *inputs: torch.Tensor) -> dict[str, fx.Node]:
    """Return the nodes of a function as those of a program that was moved to a GPU."""
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in inputs]
        graph = make_fx(lambda *x: _tuple(function(*x)))(*fakes).graph
    return {node.name: node for node in graph.nodes}


def _tuple(values: Any) -> Any:
    return values if isinstance(values, tuple) else (values,)


def generated(nodes: dict[str, fx.Node], target: GpuTarget = HOPPER) -> GeneratedTriton:
    inputs, ops, outputs = parts(nodes)
    return generate_triton("k", ops, inputs, outputs, target=target)


def parts(nodes: dict[str, fx.Node]) -> tuple[list[fx.Node], list[fx.Node], list[fx.Node]]:
    listed = list(nodes.values())
    made: Any = listed[-1].args[0]
    inputs = [n for n in listed if n.op == "placeholder"]
    return inputs, [n for n in listed if n.op == "call_function"], list(made)


def bound(nodes: dict[str, fx.Node]) -> tuple[Function, FakeLibrary, GeneratedTriton]:
    """Return the call of a segment that is interpreted, what it launched so far, and its sources."""
    found = generated(nodes)
    code, functions = joined({s.symbol: image_of_source(s, HOPPER) for s in found.sources})
    driver, library = fake_driver()
    gpu_code = GpuCode(KernelFiles(record=b"", code=code), functions, driver)
    fused = FusedSegment(segment=segment_of(nodes), kernel=found.kernel, library=gpu_code)
    return bind(fused, nodes), library, found


def segment_of(nodes: dict[str, fx.Node]) -> Segment:
    inputs, ops, outputs = (tuple(node.name for node in part) for part in parts(nodes))
    return Segment(ops=ops, inputs=inputs, outputs=outputs, scratch_limit_bytes=1 << 30, key="k")


def check(function: Function, *inputs: torch.Tensor) -> tuple[FakeLibrary, GeneratedTriton]:
    """Assert that the kernel makes what eager makes within rounding, and lays it out so."""
    call, library, found = bound(traced(function, *inputs))
    outputs = call(*inputs)
    assert library.launches
    assert_close(outputs, function(*inputs))
    return library, found


def assert_close(outputs: Any, expected: Any, ulps: int = 2) -> None:
    for value, wanted in zip(_tuple(outputs), _tuple(expected), strict=True):
        close: dict[str, Any] = {}
        if wanted.is_floating_point():
            # A result is a difference of larger values, each rounded once more or less.
            scale = float(wanted.nan_to_num(0.0, 0.0, 0.0).abs().max())
            close = {"rtol": 1e-5, "atol": ulps * torch.finfo(wanted.dtype).eps * max(scale, 1e-3)}
        torch.testing.assert_close(value, wanted, equal_nan=True, **close)
        assert value.stride() == wanted.stride()


# ------------------------------------------------------------ segments


def chain(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.silu(x * 1.5 + 0.1) * torch.sigmoid(y) - torch.tanh(x) * torch.exp(-y * y)


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * wide.to(x.dtype)


def norms(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    whole = nn.functional.layer_norm(x, (x.shape[-1],), weight, weight)
    return whole, torch.softmax(x * 2, -1), nn.functional.gelu(whole)


def corners(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    overflown = (x.half() * 60000.0) * 2 / 3
    return overflown, (x.bfloat16() * 2 + x.bfloat16().tanh()).float() * x


def views(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    a, b = (x * 2).chunk(2, -1)
    turned = torch.cat((-b, a), -1) * y + x.t()[:1].t()
    return turned, (x.unsqueeze(0) + y[:, None, :1]).permute(2, 0, 1) * 2, a.t() * 3 + 1


def whole(n: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    masked = (x * 2).masked_fill(n[:1] > 3, float("-inf"))
    large = torch.where(n > 3, n * 2**40 + 2**62, n.int() * 1003) - (n >> 1)
    return large, masked.max(1).values + 1, (x > 0) & (n > 0), (x * 2).argmax(1) + 1


@needs_interpreter
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(3, 37), (1, 1), (2, 5, 64)], ids=str)
def test_chains(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check(chain, torch.randn(shape).to(dtype), torch.randn(shape).to(dtype))


@needs_interpreter
@pytest.mark.parametrize(
    ("width", "dtype"),
    [
        (1, torch.float32),
        (300, torch.float32),
        *((37, dtype) for dtype in (torch.float32, *HALVES)),
    ],
    ids=str,
)
def test_reductions_of_rows(width: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(3, width).to(dtype), torch.randn(width).to(dtype)
    check(rms_norm, x, weight)
    check(norms, x, weight)


@needs_interpreter
def test_rows_that_no_block_holds_are_reduced_in_a_loop() -> None:
    _, found = check(norms, torch.randn(1, 3000), torch.randn(3000))
    assert any("for " in source.text for source in found.sources)


@needs_interpreter
def test_a_reduction_of_everything_goes_through_scratch() -> None:
    library, found = check(lambda x: ((x * 2).sum() + 1, x * 3), torch.randn(300, 401))
    assert found.kernel.scratch_bytes
    assert len(library.launches) > 1


@needs_interpreter
def test_reduced_types_are_rounded_and_overflow_after_every_op() -> None:
    x = torch.randn(7, 33)
    x[0, :4] = torch.tensor([float("nan"), float("inf"), -0.0, 0.0])
    assert corners(x)[0].isinf().any()
    check(corners, x)


@needs_interpreter
def test_views_and_broadcasts() -> None:
    check(views, torch.randn(6, 10), torch.randn(6, 10))
    check(views, torch.randn(10, 6).t(), torch.randn(6, 10))


@needs_interpreter
def test_whole_numbers_and_conditions() -> None:
    check(whole, torch.randint(-9, 9, (5, 9)), torch.randn(5, 9))


@needs_interpreter
def test_a_scalar_is_read_from_memory() -> None:
    check(lambda x, scale: (x * scale + 1).tanh(), torch.randn(33), torch.tensor(1.25))


# ------------------------------------------------------------ what is written


def test_equal_segments_are_equal_kernels_and_nothing_is_measured() -> None:
    nodes = traced(norms, torch.randn(5, 100), torch.randn(100))
    first, second = generated(nodes), generated(nodes)
    assert first == second
    (source,) = first.sources
    assert set(source.constants) >= {"xnumel", "XBLOCK"}
    assert set(source.constants.values()) >= {5}
    assert source.num_warps in (1, 2, 4, 8, 16)


def test_torch_answers_for_itself_before_and_afterwards() -> None:
    before, has_gpu = torch.cuda.get_device_properties, has_triton()
    assert has_gpu == torch.cuda.is_available()
    generated(traced(lambda x: x.tanh() * 2, torch.randn(4)))
    assert has_triton() == has_gpu
    assert torch.cuda.get_device_properties is before
    if not torch.cuda.is_available():
        with pytest.raises((AssertionError, RuntimeError)):
            torch.cuda.get_device_properties(0)


def twice_the_same(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    made = x * 2
    return made, made.t()


@pytest.mark.parametrize(
    "function",
    [lambda x: (x @ x).tanh() + 1, twice_the_same],
    ids=["product", "two results in one memory"],
)
def test_what_is_more_than_loops_is_refused(function: Function) -> None:
    with pytest.raises(UnsupportedOpError):
        generated(traced(function, torch.randn(40, 40)))


@needs_interpreter
def test_inputs_that_may_begin_anywhere_are_read_so() -> None:
    nodes = traced(chain, torch.randn(32), torch.randn(32))
    first = parts(nodes)[0][0]
    with first.meta["val"].fake_mode:
        first.meta["val"] = torch.empty(33)[1:]
    call, library, found = bound(nodes)
    assert found.kernel.aligned == (1,)
    odd, y = torch.randn(33)[1:], torch.randn(32)
    assert_close(call(odd, y), chain(odd, y))
    assert library.launches


@needs_interpreter
def test_inputs_that_lie_otherwise_are_computed_op_by_op() -> None:
    call, library, found = bound(traced(chain, torch.randn(4, 8), torch.randn(4, 8)))
    assert found.kernel.aligned == (0, 1)
    x, y = torch.randn(4, 8), torch.randn(4, 8)
    odd = torch.randn(33)[1:].view(4, 8)
    assert odd.data_ptr() % 16
    for a, b in ((x.t().contiguous().t(), y), (odd, y), (x.double(), y), (x[:2], y[:2])):
        assert torch.equal(call(a, b), chain(a, b))
    assert not library.launches
    call(x, y)
    assert len(library.launches) == 1


# ------------------------------------------------------------ on a GPU

# Divisions and functions of a GPU are not rounded as exactly as its sums.
_GPU_ULPS = 8


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (chain, ((300, 1001), (300, 1001))),
        (rms_norm, ((17, 4096), (4096,))),
        (norms, ((3, 37), (37,))),
        (norms, ((2, 20000), (20000,))),
        (views, ((6, 10), (6, 10))),
        (lambda x: ((x * 2).sum() / x.numel(), x * 3), ((3000, 401),)),
    ],
    ids=["chain", "rms norm", "short rows", "long rows", "views", "everything"],
)
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_compiled_kernels_compute_on_the_gpu(
    function: Function, shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype
) -> None:
    inputs = [torch.randn(shape).to(dtype) for shape in shapes]
    nodes = traced(function, *inputs)
    call = bound_to_the_gpu(nodes)
    on_gpu = [x.cuda() for x in inputs]
    expected = function(*on_gpu)
    for _ in range(2):
        assert_close(call(*on_gpu), expected, _GPU_ULPS)
    with torch.cuda.stream(torch.cuda.Stream()):
        found = call(*on_gpu)
        torch.cuda.current_stream().synchronize()
    assert_close(found, expected, _GPU_ULPS)
    # A graph may hold it: nothing waits, and all memory is the stream's.
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(*on_gpu)
    for value in on_gpu:
        value.mul_(0.5)
    graph.replay()
    assert_close(captured, function(*on_gpu), _GPU_ULPS)


@pytest.mark.gpu
def test_inputs_that_lie_otherwise_are_computed_op_by_op_on_the_gpu() -> None:
    call = bound_to_the_gpu(traced(chain, torch.randn(4, 8), torch.randn(4, 8)))
    odd = torch.randn(33, device="cuda")[1:].view(4, 8)
    assert odd.data_ptr() % 16
    assert torch.equal(call(odd, odd), chain(odd, odd))


def bound_to_the_gpu(nodes: dict[str, fx.Node]) -> Function:
    target = target_here()
    assert target is not None
    found = generated(nodes, target)
    code, functions = joined({s.symbol: compile_image(s, target) for s in found.sources})
    library = GpuCode(KernelFiles(record=b"", code=code), functions, open_driver())
    fused = FusedSegment(segment=segment_of(nodes), kernel=found.kernel, library=library)
    return bind(fused, nodes, torch.device("cuda", torch.cuda.current_device()))
