"""The stop watch of a GPU with a stand-in for CUDA on the host: what it copies, where, and what it gives back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gascompile.core.machine import IoSettings
from gascompile.cost_models.measure import cuda_timer
from gascompile.cost_models.measure.cuda_timer import CudaTimer, StagedReader, rows_for
from gascompile.cost_models.measure.gpu import measure_gpu
from tests.drives import Result
from tests.machines.fake_cuda import GIB, FakeCuda

KIB = 1 << 10


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host computes what a GPU would: with small buffers and weights."""
    monkeypatch.setattr(cuda_timer, "_COPY_BYTES", 64 * KIB)
    monkeypatch.setattr(cuda_timer, "_WIDE", 64)
    monkeypatch.setattr(cuda_timer, "_NARROW", 32)


def test_it_describes_the_device() -> None:
    with CudaTimer(FakeCuda(), device="cpu") as timer:
        assert (timer.name, timer.total_bytes, timer.width) == ("Some GPU", 8 * GIB, 64)
    with CudaTimer(FakeCuda(free_bytes=GIB), device="cpu") as timer:
        assert timer.width == 32, "weights that fit into what others have left"


@pytest.mark.parametrize(("into", "out"), [(True, False), (False, True), (True, True)])
def test_copies_go_in_their_directions_on_streams_of_their_own(into: bool, out: bool) -> None:
    cuda = FakeCuda()
    with CudaTimer(cuda, device="cpu") as timer:
        timer._host[0].fill_(1)
        timer._device[1].fill_(2)
        timer._host[1].zero_()
        timer._device[0].zero_()
        before = cuda.num_synchronized
        assert timer.copy_s(4 * KIB, into=into, out=out) > 0
        assert cuda.num_synchronized == before + 2, "before and after, once each"
        assert int(timer._device[0].sum()) == (4 * KIB if into else 0)
        assert int(timer._host[1].sum()) == (8 * KIB if out else 0)
        used = [cuda.streams.index(stream) for stream in cuda.used_streams]
        assert used == [0] * into + [1] * out


def test_a_pass_is_within_the_device() -> None:
    cuda = FakeCuda()
    with CudaTimer(cuda, device="cpu") as timer:
        timer._device[0].fill_(7)
        timer._device[1].zero_()
        assert timer.pass_s(KIB) > 0
        assert int(timer._device[1].sum()) == 7 * KIB
        assert not cuda.used_streams


OPERANDS = [(2 * 16 * 32 + 32 * 32 + 32) * size for size in (4, 2)]
"""Bytes of 16 rows, twice, of square weights and of a bias, in 4 bytes and in 2."""


def test_products_keep_one_pair_of_operands() -> None:
    with CudaTimer(FakeCuda(), device="cpu") as timer:
        for dtype, rows in (("float32", 2), ("bfloat16", 4), ("bfloat16", 4)):
            assert timer.product_s(dtype, rows) > 0
            ((left, right, out),) = timer._operands.values()
            assert (left.shape, right.shape, out.shape) == ((rows, 64), (64, 64), (rows, 64))
            assert out.dtype == getattr(torch, dtype)
            torch.testing.assert_close(out, left @ right)
        assert timer.calls_s(8) > 0


def test_what_libraries_take_is_the_most_beside_operands_of_products() -> None:
    wide, half = OPERANDS
    cuda = FakeCuda(allocated=[100], peaks=[100 + wide + 900, 100 + half + 1000])
    with CudaTimer(cuda, device="cpu") as timer:
        assert timer.library_bytes() == 1000
        assert not timer._operands
        cuda.peaks = [0]
        assert timer.library_bytes() == 0


def test_closing_gives_all_memory_back() -> None:
    cuda = FakeCuda()
    with CudaTimer(cuda, device="cpu") as timer:
        timer.product_s("float32", 2)
    assert not (timer._host or timer._device or timer._operands)
    assert cuda.num_emptied == 1


def test_it_is_what_the_measurement_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gascompile.cost_models.measure.gpu._LARGE_BYTES", 64 * KIB)
    monkeypatch.setattr("gascompile.cost_models.measure.gpu._SMALL_BYTES", 4 * KIB)
    with CudaTimer(
        FakeCuda(allocated=[1], peaks=[6 + size for size in OPERANDS]), device="cpu"
    ) as timer:
        found = measure_gpu(timer, rows=(1, 2), num_repeats=2, dtypes=("float32",))
    assert found.name == "Some GPU"
    assert found.library_bytes == 5
    assert len(found.points["float32"]) == 2
    assert found.into.bytes_per_s > 0
    assert found.into.latency_s >= 0


def test_rows_grow_with_the_effort() -> None:
    assert set(rows_for("in short")) < set(rows_for("thoroughly"))
    assert list(rows_for("thoroughly")) == sorted(rows_for("thoroughly"))


def test_staged_reads_take_turns_with_two_buffers(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(1, 5)) * KIB)
    cuda = FakeCuda()
    buffers: list[int] = []

    def read(
        path: str, *, offset: int, size_bytes: int, into: memoryview, io: IoSettings
    ) -> Result:
        buffers.append(torch.frombuffer(into, dtype=torch.uint8).data_ptr())
        into[:] = Path(path).read_bytes()[offset : offset + size_bytes]
        return Result(1.0, "O_DIRECT")

    staged = StagedReader(read, 4 * KIB, cuda, device="cpu")
    target = staged._target
    for turn in range(4):
        found = staged(
            str(path),
            offset=turn,
            size_bytes=KIB,
            into=memoryview(bytearray()),
            io=IoSettings(),
        )
        assert found.path == "O_DIRECT"
        assert 0 < found.time_s < 1.0, "by its own clock"
        assert bytes(target[:KIB].tolist()) == path.read_bytes()[turn : turn + KIB]
    assert buffers == buffers[:2] * 2
    assert buffers[0] != buffers[1]
    assert cuda.streams[0].num_synchronized == 4, "a buffer is filled again once its copy is over"
