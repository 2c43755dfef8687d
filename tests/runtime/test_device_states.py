"""States on a device: copies that share memory as the caller's do, and what flows between the two."""

from __future__ import annotations

import pytest
import torch

from gascompile.runtime.memory.device_states import DeviceStates


class Apart:
    """A device whose memory is not the caller's; counts what it holds."""

    is_host = False

    def __init__(self) -> None:
        self.kept_bytes = 0
        self.num_waits = 0

    def keep(self, value: torch.Tensor) -> torch.Tensor:
        self.kept_bytes += value.nbytes
        return value.clone(memory_format=torch.contiguous_format)

    def synchronize(self) -> None:
        self.num_waits += 1


class Here(Apart):
    """The host."""

    is_host = True


def test_views_of_one_memory_stay_views_of_one_memory() -> None:
    base = torch.arange(1000, dtype=torch.float32)
    held = {
        "low": base[100:110],
        "turned": base[100:120].view(4, 5).t(),
        "bytes": base.view(torch.uint8)[440:448],
        "alone": torch.ones(3),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(7),
    }
    device = Apart()
    states = DeviceStates(device, held)
    assert device.kept_bytes == 20 * 4 + 3 * 4 + 8
    assert states.size_bytes == device.kept_bytes
    for name, tensor in held.items():
        copied = states.tensors[name]
        assert torch.equal(copied, tensor)
        assert copied.stride() == tensor.stride()
        if tensor.numel():
            assert copied.data_ptr() != tensor.data_ptr()
            assert states.contains(copied)
            assert not states.contains(tensor)
    states.tensors["low"].fill_(-1.0)
    assert (states.tensors["turned"].t().flatten()[:10] == -1.0).all()
    assert torch.equal(states.tensors["bytes"].view(torch.float32), torch.tensor([110.0, 111.0]))
    assert held["low"][0] == 100.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_what_each_side_writes_reaches_the_other(dtype: torch.dtype) -> None:
    mine = torch.zeros(4, dtype=dtype)
    states = DeviceStates(Apart(), {"mine": mine})
    states.tensors["mine"].fill_(1)
    states.push()
    assert (states.tensors["mine"] == 1).all(), "nothing was written here: nothing is taken over"
    states.pull()
    assert (mine == 1).all()
    mine[2] = 0
    states.push()
    assert states.tensors["mine"].tolist() == mine.tolist()
    assert states.tensors["mine"][2] == 0


def test_the_callers_write_wins_where_both_wrote() -> None:
    mine = torch.zeros(2)
    states = DeviceStates(Apart(), {"mine": mine})
    states.tensors["mine"].fill_(1)
    mine.fill_(5)
    states.pull()
    assert mine.tolist() == states.tensors["mine"].tolist() == [5, 5]


def test_constants_are_never_written_to() -> None:
    constant = torch.tensor([1.0, float("nan"), -0.0]).expand(2, 3)
    version = constant._version
    states = DeviceStates(Apart(), {"constant": constant})
    states.pull()
    assert constant._version == version
    states.tensors["constant"][:1, 1].fill_(0.0)
    states.pull()
    assert constant[1].tolist() == [1.0, 0.0, 0.0]


def test_tensors_that_torch_does_not_count_writes_of_are_taken_once() -> None:
    with torch.inference_mode():
        mine = torch.zeros(2)
    states = DeviceStates(Apart(), {"mine": mine})
    states.push()
    assert states.tensors["mine"].tolist() == [0, 0]


def test_closing_brings_the_caller_up_to_date_and_keeps_nothing() -> None:
    mine, device = torch.zeros(2), Apart()
    states = DeviceStates(device, {"mine": mine})
    states.tensors["mine"].fill_(3)
    states.close()
    states.close()
    assert mine.tolist() == [3, 3]
    assert not states.tensors
    assert device.num_waits == 1


def test_on_the_host_they_are_the_callers_own() -> None:
    mine, device = torch.zeros(2), Here()
    states = DeviceStates(device, {"mine": mine})
    assert states.tensors["mine"] is mine
    states.push()
    states.pull()
    states.close()
    assert states.tensors["mine"] is mine
    assert device.num_waits == device.kept_bytes == 0
