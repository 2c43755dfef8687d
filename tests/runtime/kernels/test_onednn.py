"""oneDNN's products against products in float64, and torch's own bits where they are not for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.nn.functional import linear
from torch.profiler import ProfilerActivity, profile

from gascompile.runtime.kernels import onednn

SIZES = [(512, 512), (1024, 600), (600, 1024), (4096, 520)]

pytestmark = pytest.mark.skipif(
    not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="torch has no oneDNN here"
)


def operands(
    outputs: int, columns: int, *rows: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(outputs + columns)
    sizes = ((*rows, columns), (outputs, columns), (outputs,))
    x, weight, bias = (torch.randn(size, generator=rng).to(dtype) for size in sizes)
    return x, weight, bias


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("rows", [(), (1,), (3, 5), (70,)])
def test_products_are_right(sizes: tuple[int, int], rows: tuple[int, ...]) -> None:
    x, weight, bias = operands(*sizes, *rows)
    assert onednn.takes(weight)
    wanted = linear(x.double(), weight.double())
    for found, exact in (
        (onednn.linear(x, weight), wanted),
        (onednn.linear(x, weight, bias), wanted + bias.double()),
    ):
        assert found.is_contiguous()
        assert found.untyped_storage().nbytes() == found.nbytes
        torch.testing.assert_close(found, exact.float(), rtol=1e-5, atol=1e-4)


def test_what_is_not_for_it_has_the_bits_of_torch() -> None:
    x, weight, bias = operands(512, 512, 4)
    for other in (
        operands(256, 2048, 4),
        operands(2048, 256, 4),
        operands(512, 512, 4, dtype=torch.bfloat16),
        (x[:0], weight, bias),
        (torch.ones(512, 4).t(), weight, bias),
        (x, torch.ones(512, 512).tril().t(), bias),
    ):
        assert torch.equal(onednn.linear(*other), linear(*other))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = onednn.linear(x, weight, bias)
    assert found.dtype is torch.bfloat16


@pytest.mark.parametrize(
    "bias",
    [
        torch.arange(1024.0)[::2],
        torch.tensor(3.0).expand(512),
        torch.tensor(3.0),
        torch.tensor([3.0]),
        torch.arange(512.0)[None],
        torch.arange(2048.0).reshape(4, 512),
    ],
    ids=["strided", "expanded", "scalar", "one", "row", "rows"],
)
def test_biases_of_any_kind_count(bias: torch.Tensor) -> None:
    x, weight, _ = operands(512, 512, 4)
    assert torch.equal(onednn.linear(x, weight, bias), linear(x, weight, bias))


@pytest.mark.parametrize(
    ("x", "bias"),
    [
        (torch.ones(4, 600), None),
        (torch.tensor(1.0), None),
        (torch.ones(4, 512), torch.ones(511)),
        (torch.ones(4, 512), torch.ones(1024)),
    ],
)
def test_what_does_not_fit_is_refused_as_by_torch(
    x: torch.Tensor, bias: torch.Tensor | None
) -> None:
    with pytest.raises(RuntimeError) as torchs:
        linear(x, torch.ones(512, 512), bias)
    with pytest.raises(RuntimeError) as own:
        onednn.linear(x, torch.ones(512, 512), bias)
    assert str(own.value) == str(torchs.value)


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="other processors take torch's"
)
@pytest.mark.parametrize("sizes", [*SIZES, (2048, 2048), (512, 8192), (8192, 512)])
@pytest.mark.parametrize("rows", [1, 2, 33, 130])
@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_it_takes_no_more_memory_than_it_says(
    sizes: tuple[int, int], rows: int, num_threads: int
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        x, weight, bias = operands(*sizes, rows)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            result_bytes = onednn.linear(x, weight, bias).nbytes
        limit_bytes = onednn.scratch_bytes()
    finally:
        torch.set_num_threads(before)
    assert seen.profiler is not None
    results = seen.profiler.kineto_results
    assert results is not None
    taken = [e.nbytes() for e in results.events() if e.name() == "[memory]" and e.nbytes() > 0]
    assert result_bytes in taken
    assert sum(taken) - result_bytes <= limit_bytes


@pytest.fixture
def asked_anew() -> Iterator[None]:
    onednn.is_faster_here.cache_clear()
    yield
    onednn.is_faster_here.cache_clear()


@pytest.mark.usefixtures("asked_anew")
@pytest.mark.parametrize("vendor", ["GenuineIntel", ""])
def test_it_is_for_processors_that_are_not_of_the_maker_of_mkl(
    monkeypatch: pytest.MonkeyPatch, vendor: str
) -> None:
    monkeypatch.setattr(onednn, "_vendor", lambda: vendor)
    assert not onednn.is_faster_here()


@pytest.mark.usefixtures("asked_anew")
def test_it_is_for_processors_with_its_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "_vendor", lambda: "AuthenticAMD")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert not onednn.is_faster_here()


def test_it_is_off_where_the_user_has_switched_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = operands(512, 512, 4)
    # What torch.backends.mkldnn.flags sets, which warns of other flags.
    torch._C._set_mkldnn_enabled(False)
    try:
        monkeypatch.setattr(onednn, "_product", lambda: pytest.fail("a product of oneDNN"))
        assert torch.equal(onednn.linear(x, weight, bias), linear(x, weight, bias))
    finally:
        torch._C._set_mkldnn_enabled(True)
