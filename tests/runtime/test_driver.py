"""The CUDA driver's stand-in gets what the real one would: images, functions, grids, packed arguments."""

from __future__ import annotations

import dataclasses
import json
import threading

import pytest
import torch

from gascompile.codegen.triton import TritonSource
from gascompile.core.errors import DeviceError, StorageError
from gascompile.core.kernels import GpuFunction, KernelFiles, Launch, Pointer
from gascompile.runtime.devices.driver import CudaDriver
from gascompile.runtime.kernels.gpu_code import GpuCode, load_gpu_code
from tests.interpreted_gpu import FakeLibrary, fake_driver, needs_interpreter

pytestmark = needs_interpreter

TWICE = TritonSource(
    symbol="twice",
    text="""import triton
import triton.language as tl

@triton.jit
def twice(x, out, n, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + index, tl.load(x + index, index < n) * 2, index < n)
""",
    signature={"x": "*fp32", "out": "*fp32", "n": "constexpr", "BLOCK": "constexpr"},
    constants={"n": 10, "BLOCK": 4},
    aligned=(),
    num_warps=2,
    num_stages=1,
)
IMAGE = json.dumps(dataclasses.asdict(TWICE)).encode()
FUNCTION = GpuFunction(
    start=3, stop=3 + len(IMAGE), threads=64, shared_bytes=96 << 10, num_parameters=4
)
FILES = KernelFiles(record=b"", code=b"..." + IMAGE + b"....")
LAUNCH = Launch(
    symbol="twice",
    arguments=(Pointer(place=0, offset_bytes=8), Pointer(place=1)),
    grid=(3, 1, 1),
)


def code(driver: CudaDriver, **functions: GpuFunction) -> GpuCode:
    return GpuCode(FILES, functions or {"twice": FUNCTION}, driver)


def test_a_launch_computes_with_the_packed_addresses() -> None:
    driver, library = fake_driver()
    queue = code(driver).launcher(LAUNCH, 0)
    x, out = torch.arange(12.0), torch.zeros(10)
    queue([x.data_ptr(), out.data_ptr()])
    assert torch.equal(out, x[2:] * 2)
    assert library.images == [IMAGE]
    (launched,) = library.launches
    assert (launched.grid, launched.block) == ((3, 1, 1), (64, 1, 1))
    assert launched.shared_bytes == library.most_shared_bytes[1] == 96 << 10
    # What a kernel has beside its arguments is null.
    assert launched.parameters == (x.data_ptr() + 8, out.data_ptr(), 0, 0)


def test_little_shared_memory_is_not_asked_for() -> None:
    driver, library = fake_driver()
    code(driver, twice=dataclasses.replace(FUNCTION, shared_bytes=48 << 10)).launcher(LAUNCH, 0)
    assert not library.most_shared_bytes


def test_launches_go_to_the_stream_of_the_moment_and_the_device() -> None:
    library = FakeLibrary()
    library.runs = False
    streams = {0: 11, 1: 12}
    driver = CudaDriver(library, streams.__getitem__)
    own = code(driver)
    first, second = (own.launcher(LAUNCH, device) for device in (0, 1))
    first([1, 2])
    streams[0] = 13
    first([1, 2])
    second([1, 2])
    assert [x.stream for x in library.launches] == [11, 13, 12]
    assert len(library.images) == 2  # one in the memory of each device


def test_a_thread_that_has_no_context_yet_gets_the_devices() -> None:
    driver, library = fake_driver()
    library.runs = False
    queue = code(driver).launcher(LAUNCH, 0)
    library.current = 0
    thread = threading.Thread(target=queue, args=([1, 2],))
    thread.start()
    thread.join()
    assert library.current == 100
    assert len(library.launches) == 1


def test_a_refused_launch_says_what_the_driver_says() -> None:
    driver, library = fake_driver()
    queue = code(driver).launcher(LAUNCH, 0)
    library.refuses = 719
    with pytest.raises(
        DeviceError, match=r"could not launch a kernel: some error \(CUDA error 719"
    ):
        queue([1, 2])


def test_an_image_is_loaded_once_for_all_who_ask() -> None:
    driver, library = fake_driver()
    functions = {"twice": FUNCTION}
    first, second = (load_gpu_code(FILES, functions, driver) for _ in range(2))
    assert first is second
    for _ in range(2):
        first.launcher(LAUNCH, 0)
    assert len(library.images) == 1
    assert load_gpu_code(FILES, functions, fake_driver()[0]) is not first


@pytest.mark.parametrize(
    ("functions", "launch"),
    [
        ({"other": FUNCTION}, LAUNCH),
        ({}, dataclasses.replace(LAUNCH, symbol="thrice")),
        ({}, dataclasses.replace(LAUNCH, grid=())),
        ({"twice": dataclasses.replace(FUNCTION, stop=10**6)}, LAUNCH),
        ({"twice": dataclasses.replace(FUNCTION, start=-5)}, LAUNCH),
        ({"twice": dataclasses.replace(FUNCTION, num_parameters=1)}, LAUNCH),
    ],
    ids=["other", "symbol", "no grid", "too long", "before", "parameters"],
)
def test_calls_that_do_not_fit_their_code_are_refused(
    functions: dict[str, GpuFunction], launch: Launch
) -> None:
    driver, library = fake_driver()
    with pytest.raises(StorageError, match=r"lack the function|takes 1 addresses"):
        code(driver, **functions).launcher(launch, 0)
    assert not library.images


def test_bytes_that_are_no_image_are_refused() -> None:
    driver, _ = fake_driver()
    shifted = dataclasses.replace(FUNCTION, start=4)
    with pytest.raises(DeviceError, match="could not load an image: invalid image"):
        code(driver, twice=shifted).launcher(LAUNCH, 0)


def test_without_a_driver_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from gascompile.runtime.devices import driver

    monkeypatch.setattr(driver, "_LIBRARY", "libcuda-that-is-not-here.so.1")
    monkeypatch.setattr(driver, "_opened", None)
    with pytest.raises(DeviceError, match="install the GPU's driver"):
        driver.open_driver()
