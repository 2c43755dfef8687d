"""What ops take on a GPU, as torch's allocator there counts it: scratch memory without results and what stays."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, TypeGuard

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from gascompile.cost_models.measure.op_memory import OpCall
from gascompile.cost_models.measure.ops_on_device import OpsOnDevice
from tests.cost_models.counted_device import CountedDevice

aten = torch.ops.aten
ADDMM, MUL, MM = aten.addmm.default, aten.mul.Tensor, aten.mm.default
MIB = 1 << 20


def call_of(function: Any, *args: Any, **kwargs: Any) -> OpCall:
    """Return a call on fake tensors in the place of the real ones in ``args``."""
    with FakeTensorMode() as mode:
        fakes = pytree.tree_map_only(torch.Tensor, mode.from_tensor, args)
        results = pytree.tree_leaves(function(*fakes, **kwargs))
    given = {v.untyped_storage()._cdata for v in pytree.tree_leaves(fakes) if _is_tensor(v)}
    made = [v.untyped_storage() for v in results if _is_tensor(v)]
    result_bytes = sum(storage.nbytes() for storage in made if storage._cdata not in given)
    return OpCall(function, fakes, kwargs, result_bytes)


def _is_tensor(value: object) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor)


def addmm() -> OpCall:
    return call_of(ADDMM, torch.ones(7), torch.ones(3, 5), torch.ones(5, 7))


def test_scratch_counts_and_what_stays_does_not() -> None:
    with CountedDevice(scratch={ADDMM: MIB}, kept={ADDMM: 32 * MIB}) as device:
        assert device.ops().workspace_bytes(addmm()) == MIB
    assert device.calls[ADDMM] == 2, "one to warm it up"


@pytest.mark.parametrize(
    "call",
    [
        call_of(MUL, torch.ones(3, 5), 2.0),
        call_of(aten.t.default, torch.ones(3, 5)),
        call_of(aten.add_.Tensor, torch.ones(3, 5), 1),
        call_of(aten.topk.default, torch.ones(3, 9), 2),
    ],
    ids=lambda call: str(call.function),
)
def test_results_and_their_rounding_are_no_scratch(call: OpCall) -> None:
    with CountedDevice() as device:
        assert device.ops().workspace_bytes(call) == 0


def test_results_that_were_planned_smaller_count() -> None:
    call = call_of(MUL, torch.ones(256, 4), 2.0)
    with CountedDevice() as device:
        assert device.ops().workspace_bytes(call._replace(result_bytes=1000)) == 4096 - 1000


@pytest.mark.parametrize("error", [RuntimeError, NotImplementedError, ValueError, IndexError])
def test_an_op_that_the_device_refuses(error: type[Exception]) -> None:
    with CountedDevice(errors={ADDMM: error}) as device:
        assert device.ops().workspace_bytes(addmm()) is None
        assert device.ops().time_s(addmm()) is None


def test_a_full_device_gets_its_memory_back() -> None:
    with CountedDevice(errors={ADDMM: torch.OutOfMemoryError}) as device:
        ops = device.ops()
        before_bytes, waits = device.runtime.allocated_bytes, device.runtime.main_waits()
        assert ops.workspace_bytes(addmm()) is None
        assert device.runtime.main_waits() == waits + 1, "unused blocks were given back"
        gc.collect()
        assert device.runtime.allocated_bytes == before_bytes


def test_ops_too_large_for_half_of_what_is_free_are_not_called() -> None:
    with CountedDevice(total_bytes=8 * MIB) as device:
        large = call_of(MUL, torch.ones(2 * MIB // 4), 2.0)
        assert device.ops().workspace_bytes(large) is None
        assert device.calls[MUL] == 0


def test_ops_that_may_do_more_than_compute_are_not_called() -> None:
    condition = call_of(aten._assert_async.msg, torch.ones(()), "words")
    with CountedDevice() as device:
        assert device.ops().workspace_bytes(condition) is None
        assert device.ops().workspace_bytes(OpCall(print, ("called",), {}, 0)) is None
    assert not device.calls[condition.function]


def test_random_numbers_go_on_as_they_would_have() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    with CountedDevice() as device:
        assert device.ops().workspace_bytes(call_of(aten.rand_like.default, torch.ones(9))) == 0
    assert torch.equal(torch.rand(4), expected)


def test_seconds_of_a_call() -> None:
    with CountedDevice() as device:
        time_s = device.ops().time_s(addmm())
    assert time_s is not None
    assert 0 < time_s < 1
    assert device.calls[ADDMM] > 3


def test_memory_is_given_back_at_the_end() -> None:
    with CountedDevice() as device:
        ops = device.ops()
        waits = device.runtime.main_waits()
        ops.close()
        assert device.runtime.main_waits() == waits + 2, "synchronised, and emptied"


# ------------------------------------------------------------ on a GPU


def measured_bytes(call: Callable[[], Any]) -> int:
    """Return what a warm call takes on the GPU beside its results."""
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    value = call()
    torch.cuda.synchronize()
    made = torch.cuda.memory_allocated() - before
    del value
    return torch.cuda.max_memory_allocated() - before - made


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_product_with_a_bias_on_a_gpu(dtype: torch.dtype) -> None:
    shapes = [(1024,), (64, 512), (512, 1024)]
    values = [torch.ones(shape, dtype=dtype, device="cuda") for shape in shapes]
    ops = OpsOnDevice()
    found = ops.workspace_bytes(call_of(ADDMM, *(torch.ones(s, dtype=dtype) for s in shapes)))
    assert found is not None
    assert found >= measured_bytes(lambda: torch.addmm(*values))
    assert found <= 64 * MIB


@pytest.mark.gpu
def test_elementwise_ops_and_views_take_nothing_on_a_gpu() -> None:
    ops = OpsOnDevice()
    for size in (1, 1000, 3 * MIB):
        assert ops.workspace_bytes(call_of(MUL, torch.ones(size), 2.0)) == 0
        assert ops.workspace_bytes(call_of(aten.t.default, torch.ones(size, 1))) == 0


@pytest.mark.gpu
def test_a_sort_takes_scratch_on_a_gpu() -> None:
    values = torch.ones(1 << 18)
    found = OpsOnDevice().workspace_bytes(call_of(aten.sort.default, values))
    on_gpu = values.cuda()
    assert found is not None
    assert found >= measured_bytes(lambda: torch.sort(on_gpu)) > 0


@pytest.mark.gpu
def test_kernels_of_the_processor_alone_are_refused_by_a_gpu() -> None:
    image, weight = torch.ones(1, 3, 8, 8), torch.ones(4, 3, 3, 3)
    args = (image, weight, None, [0, 0], [1, 1], [1, 1], 1)
    call = OpCall(aten.mkldnn_convolution.default, args, {}, 0)
    assert OpsOnDevice().workspace_bytes(call) is None
    assert torch.ones(1, device="cuda").item() == 1, "the device goes on"


@pytest.mark.gpu
def test_a_longer_product_takes_longer_on_a_gpu() -> None:
    ops = OpsOnDevice()
    times_s = [
        ops.time_s(call_of(MM, torch.ones(rows, 4096), torch.ones(4096, 4096)))
        for rows in (1024, 16384)
    ]
    assert times_s[0] is not None
    assert times_s[1] is not None
    assert times_s[1] > 4 * times_s[0]
