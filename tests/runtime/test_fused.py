"""Calls of kernels by address, with Python functions in the place of machine code."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import fx

from gascompile.core.errors import PlanMismatchError, StorageError
from gascompile.core.kernels import Kernel, KernelFiles, Launch, Layout, Pointer, Segment
from gascompile.core.plan import OpPlan
from gascompile.runtime.kernels.fused import FusedSegment, bind, load_library, segment_nodes
from gascompile.runtime.run.meter import LiveBytes, Meter, fused_meter

ROW = Layout(dtype="float32", shape=(8,), stride=(1,))
ROW_BYTES = 32


def floats(address: int) -> Any:
    return (ctypes.c_float * 8).from_address(address)


def graph() -> dict[str, fx.Node]:
    """Return the nodes of ``total = x + y; double = total * 2``."""
    made = fx.Graph()
    x, y = made.placeholder("x"), made.placeholder("y")
    total = made.create_node("call_function", torch.ops.aten.add.Tensor, (x, y), name="total")
    double = made.create_node("call_function", torch.ops.aten.mul.Tensor, (total, 2), name="double")
    made.output((total, double))
    return {node.name: node for node in made.nodes}


def segment(*outputs: str) -> Segment:
    return Segment(
        ops=("total", "double"),
        inputs=("x", "y"),
        outputs=outputs,
        scratch_limit_bytes=ROW_BYTES,
        key="0" * 40,
    )


def fused(kernel: Kernel, *outputs: str, **functions: Callable[..., None]) -> FusedSegment:
    library = cast("ctypes.CDLL", SimpleNamespace(**functions))
    return FusedSegment(segment=segment(*outputs), kernel=kernel, library=library)


def launch(symbol: str, *places: int) -> Launch:
    return Launch(symbol=symbol, arguments=tuple(Pointer(place=place) for place in places))


def add(x: int, y: int, into: int) -> None:
    floats(into)[:] = [a + b for a, b in zip(floats(x), floats(y), strict=True)]


def twice(x: int, into: int) -> None:
    floats(into)[:] = [2 * a for a in floats(x)]


SINGLE = Kernel(
    inputs=(ROW, ROW),
    outputs=(ROW,),
    scratch_bytes=(ROW_BYTES,),
    launches=(launch("add", 0, 1, 3), launch("twice", 3, 2)),
)


def test_a_single_output_goes_through_scratch() -> None:
    call = bind(fused(SINGLE, "double", add=add, twice=twice), graph())
    x, y = torch.randn(8), torch.randn(8)
    assert torch.equal(call(x, y), (x + y) * 2)


def test_several_outputs_come_in_order() -> None:
    kernel = Kernel(
        inputs=(ROW, ROW),
        outputs=(ROW, ROW),
        launches=(launch("add", 0, 1, 2), launch("twice", 2, 3)),
    )
    x, y = torch.randn(8), torch.randn(8)
    total, double = bind(fused(kernel, "total", "double", add=add, twice=twice), graph())(x, y)
    assert torch.equal(total, x + y)
    assert torch.equal(double, (x + y) * 2)


def test_an_argument_may_begin_inside_an_input() -> None:
    half = Launch(symbol="copy", arguments=(Pointer(place=0, offset_bytes=16), Pointer(place=2)))
    kernel = Kernel(inputs=(ROW, ROW), outputs=(ROW,), launches=(half,))

    def copy(source: int, into: int) -> None:
        ctypes.memset(into, 0, ROW_BYTES)
        ctypes.memmove(into, source, 16)

    x = torch.arange(8.0)
    assert bind(fused(kernel, "double", copy=copy), graph())(x, x).tolist()[:4] == [4, 5, 6, 7]


@pytest.mark.parametrize(
    "x",
    [torch.randn(16)[::2], torch.randn(4), torch.randn(8, dtype=torch.float64)],
    ids=["stride", "shape", "dtype"],
)
def test_inputs_that_lie_otherwise_are_computed_op_by_op(x: torch.Tensor) -> None:
    def refuse(*addresses: int) -> None:
        raise AssertionError("a kernel would read beyond its input")

    call = bind(fused(SINGLE, "double", add=refuse, twice=refuse), graph())
    assert torch.equal(call(x, x), (x + x) * 2)


def test_an_error_names_the_fused_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*addresses: int) -> None:
        raise MemoryError("no room")

    call = bind(fused(SINGLE, "double", add=fail, twice=fail), graph())
    with pytest.raises(MemoryError) as error:
        call(torch.randn(8), torch.randn(8))
    assert error.value.__notes__ == ["in the fused ops 'total' to 'double'"]


def test_a_library_without_the_function_is_refused() -> None:
    with pytest.raises(StorageError, match="lack the function 'add'"):
        bind(fused(SINGLE, "double", twice=twice), graph())


def test_bytes_that_are_no_library_are_refused() -> None:
    with pytest.raises(StorageError, match="cannot be loaded"):
        load_library(KernelFiles(record=b"{}", code=b"no machine code"))


def test_a_segment_of_another_plan_is_refused() -> None:
    ops = [OpPlan(name=name, site="cpu", time_s=0.0) for name in ("total", "other")]
    with pytest.raises(PlanMismatchError, match="'total' to 'double'"):
        segment_nodes(segment("double"), graph(), ops)


def test_only_outputs_and_scratch_count() -> None:
    total = Meter(births=(("sum", -1),), deaths=(), workspace_bytes=1000)
    double = Meter(births=(("double", -1),), deaths=("sum",), workspace_bytes=1000)
    live = LiveBytes()
    live.record(fused_meter((double,), (total, double), 24), torch.empty(8))
    assert live.peak_bytes == ROW_BYTES + 24
    live = LiveBytes()
    both = fused_meter((total, double), (total, None, double), 0)
    live.record(both, (torch.empty(8), torch.empty(16)))
    assert live.peak_bytes == 3 * ROW_BYTES
    assert live.live_bytes == 2 * ROW_BYTES  # the sum has been read for the last time
