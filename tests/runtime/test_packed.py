"""Compiled products with packed weights against float64 and plain torch, over all forms and odd shapes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gascompile.codegen.build import has_compiler
from gascompile.codegen.packed_kernels import use_packed_kernels
from gascompile.formats import ops as format_ops
from gascompile.formats.layout import GROUPS, LOW_BITS
from gascompile.formats.quantize import pack
from gascompile.formats.workspace import decode_workspace_bytes, linear_workspace_bytes
from gascompile.runtime.kernels import packed as wire
from gascompile.runtime.kernels.packed import MAX_FEW_ROWS, PackedKernels
from tests.allocator import peak_growth_bytes

pytestmark = pytest.mark.skipif(not has_compiler(), reason="needs a C++ compiler")
FORMS = ("bfloat16", "int4", *LOW_BITS)
SOME = {"weight": "int8"}
EXAMPLES = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(autouse=True)
def _plain_again() -> Iterator[None]:
    before = format_ops.kernels_for()
    yield
    format_ops.use_kernels(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def kernels(folder: Path) -> PackedKernels:
    format_ops.use_kernels(None)
    use_packed_kernels(SOME, folder, make=True)
    found = format_ops.kernels_for()
    assert isinstance(found, PackedKernels)
    return found


def packed(outputs: int, columns: int, form: str, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a wire matrix that ends where its memory does, and its values."""
    weight = pack(torch.randn(outputs, columns) * torch.rand(outputs, 1) * 3, form, group)
    format_ops.use_kernels(None)
    return weight, format_ops.decoded(weight, form, columns, group, torch.float32).double()


def is_near(result: torch.Tensor, x: torch.Tensor, values: torch.Tensor) -> bool:
    """Return whether a product is right to some roundings of what was added up."""
    exact = x.double() @ values.T
    added = x.double().abs() @ values.T.abs()
    return bool(((result.double() - exact).abs() <= 2e-6 * added).all())


@EXAMPLES
@given(
    form=st.sampled_from(FORMS),
    columns=st.integers(1, 700),
    group=st.sampled_from(GROUPS),
    rows=st.integers(1, MAX_FEW_ROWS + 3),
    outputs=st.integers(1, 70),
    room=st.integers(1, 70),
)
def test_products_equal_float64(
    form: str,
    columns: int,
    group: int,
    rows: int,
    outputs: int,
    room: int,
    kernels: PackedKernels,
) -> None:
    if form == "int4":
        columns = -(-columns // group) * group
    weight, values = packed(outputs, columns, form, group)
    x = torch.randn(rows, columns)
    area = torch.full((rows, outputs + 5), 7.0)
    out = area[:, 2 : 2 + outputs]
    is_odd = LOW_BITS.get(form, 0) and -(-columns * LOW_BITS[form] // 8) % 16
    is_known = not is_odd and (form != "int4" or group % 32 == 0)
    did = kernels.linear(out, x, weight, form, group)
    assert did == (is_known and rows <= MAX_FEW_ROWS)
    assert not did or is_near(out, x, values)
    scratch = torch.full((room + 1, columns), 7.0)
    out.fill_(7.0)
    did = kernels.linear_by_blocks(out, x, weight, form, group, scratch[:room])
    assert did == is_known
    assert not did or is_near(out, x, values)
    assert bool((scratch[room:] == 7).all())
    assert bool((area[:, :2] == 7).all() and (area[:, 2 + outputs :] == 7).all())
    format_ops.use_kernels(kernels)
    format_ops.linear_into(out, x, weight, form, group)
    assert is_near(out, x, values)


@EXAMPLES
@given(
    form=st.sampled_from(list(LOW_BITS)),
    columns=st.integers(1, 700),
    group=st.sampled_from(GROUPS),
    rows=st.integers(1, 9),
)
def test_decoded_values_are_those_of_plain_torch_bit_for_bit(
    form: str, columns: int, group: int, rows: int, kernels: PackedKernels
) -> None:
    weight, values = packed(rows, columns, form, group)
    out = torch.full((rows + 1, columns), 7.0)
    format_ops.use_kernels(kernels)
    if kernels.decode(out[:rows], weight, form, group):
        assert torch.equal(out[:rows].double(), values)
        assert bool((out[rows] == 7).all())
    found = format_ops.decoded(weight, form, columns, group, torch.float32)
    assert torch.equal(found.double(), values)


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_a_staging_area(kernels: PackedKernels, form: str) -> None:
    """Some rows of a larger weight, at an odd distance and address."""
    weight, values = packed(12, 256, form, 32)
    step = weight.shape[1] + 7
    area = torch.full((12 * step + 1,), 99, dtype=torch.uint8).to(weight.dtype)
    rows = area[1:].as_strided(weight.shape, (step, 1))
    rows.copy_(weight)
    x, out = torch.randn(2, 256), torch.empty(2, 5)
    assert kernels.linear(out, x, rows[4:9], form, 32)
    assert is_near(out, x, values[4:9])
    out.zero_()
    assert kernels.linear_by_blocks(out, x, rows[4:9], form, 32, torch.empty(8, 256))
    assert is_near(out, x, values[4:9])


def test_every_byte_is_understood(kernels: PackedKernels) -> None:
    """Bytes as they may come, -128 included, which packing does not write."""
    weight, _ = packed(4, 256, "int10", 16)
    weight[:, : 256 + 64] = torch.arange(320).to(torch.uint8) * torch.tensor([[1], [3], [7], [11]])
    format_ops.use_kernels(None)
    values = format_ops.decoded(weight, "int10", 256, 16, torch.float32)
    out = torch.empty(4, 256)
    assert kernels.decode(out, weight, "int10", 16)
    assert torch.equal(out, values)


def test_what_is_not_for_it_is_left_to_plain_torch(kernels: PackedKernels) -> None:
    weight, _ = packed(8, 64, "bfloat16", 0)
    x = torch.randn(2, 64)
    out = torch.full((2, 8), 7.0)
    for other in (x.double(), x.bfloat16(), torch.randn(MAX_FEW_ROWS + 1, 64)):
        wanted = out.new_empty(other.shape[0], 8, dtype=other.dtype)
        assert not kernels.linear(wanted, other, weight, "bfloat16", 0)
    assert not kernels.linear(out, x, weight.half(), "float16", 0)
    assert not kernels.linear(out.T.contiguous().T, x, weight, "bfloat16", 0)
    assert bool((out == 7).all())


def test_without_forms_nothing_is_compiled(tmp_path: Path) -> None:
    format_ops.use_kernels(None)
    use_packed_kernels({}, tmp_path, make=True)
    assert format_ops.kernels_for() is None and not list(tmp_path.iterdir())


def test_loading_compiles_nothing(tmp_path: Path, kernels: PackedKernels) -> None:
    del kernels
    format_ops.use_kernels(None)
    use_packed_kernels(SOME, tmp_path, make=False)
    assert format_ops.kernels_for() is None and not list(tmp_path.iterdir())


def test_a_damaged_library_is_compiled_again(
    tmp_path: Path, folder: Path, kernels: PackedKernels, caplog: pytest.LogCaptureFixture
) -> None:
    del kernels
    (whole,) = (folder / "native").iterdir()
    path = tmp_path / "native" / whole.name
    path.parent.mkdir()
    content = bytearray(whole.read_bytes())
    content[0x2000:0x3000] = bytes(0x1000)
    path.write_bytes(content)
    format_ops.use_kernels(None)
    use_packed_kernels(SOME, tmp_path, make=True)
    assert format_ops.kernels_for() is not None and path.read_bytes() == whole.read_bytes()
    assert "is damaged" in caplog.text


def test_without_a_compiler_plain_torch_serves(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    format_ops.use_kernels(None)
    monkeypatch.setenv("CXX", "no-such-compiler")
    use_packed_kernels(SOME, tmp_path, make=True)
    assert format_ops.kernels_for() is None
    assert "no C++ compiler 'no-such-compiler'" in caplog.text


def test_another_library_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.so"
    path.write_bytes(b"no library")
    with pytest.raises(OSError, match=r"other\.so"):
        wire.install(path)


def test_what_torch_refuses_is_refused(kernels: PackedKernels) -> None:
    """Compiled code looks at no size: a weight of another width or dtype never reaches it."""
    x = torch.randn(2, 64)
    for weight in (torch.randn(8, 32).bfloat16(), torch.randn(8, 96).bfloat16()):
        assert not kernels.linear(torch.empty(2, 8), x, weight, "bfloat16", 0)
        with pytest.raises(RuntimeError, match="must match"):
            format_ops.LINEAR(x, weight, None, "bfloat16", 0)
    halves = torch.randn(8, 64).half()
    assert torch.allclose(
        format_ops.LINEAR(x, halves, None, "bfloat16", 0), x @ halves.float().T, atol=1e-4
    )
    weight, _ = packed(8, 64, "int8", 16)
    for out in (torch.empty(1, 8), torch.empty(2, 7), torch.empty(2, 9)):
        assert not kernels.linear(out, x, weight, "int8", 16)
    assert not kernels.decode(torch.empty(7, 64), weight, "int8", 16)
    assert not kernels.decode(torch.empty(8, 32), weight, "int8", 16)


def test_scales_that_float16_holds_in_fewer_bits_are_kept(kernels: PackedKernels) -> None:
    weight = pack(torch.randn(64, 256) * 2e-4, "int4", 32)
    values = format_ops.decoded(weight, "int4", 256, 32, torch.float32, plain=True).double()
    x, out = torch.randn(1, 256), torch.empty(1, 64)
    assert torch.set_flush_denormal(True)
    try:
        assert kernels.linear(out, x, weight, "int4", 32)
    finally:
        torch.set_flush_denormal(False)
    assert is_near(out, x, values)


@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("columns", [1, 4, 96, 1000, 2048])
@pytest.mark.parametrize("rows", [1, 40])
def test_no_more_memory_than_planned(
    installed: bool, form: str, columns: int, rows: int, kernels: PackedKernels
) -> None:
    group = 32 if form == "int4" else 16
    if form == "int4" and columns % group:
        pytest.skip("int4 needs whole groups")
    weight, _ = packed(700, columns, form, group)
    x = torch.randn(rows, columns)
    format_ops.use_kernels(kernels if installed else None)
    peak_bytes = peak_growth_bytes(partial(format_ops.LINEAR, x, weight, None, form, group))
    planned_bytes = linear_workspace_bytes(x, weight, form, group)
    assert peak_bytes <= planned_bytes + rows * 700 * 4
    for dtype in (torch.float32, torch.bfloat16):
        peak_bytes = peak_growth_bytes(
            partial(format_ops.DECODE, weight, form, columns, group, dtype)
        )
        planned_bytes = decode_workspace_bytes(700, columns, form, group, dtype.itemsize)
        assert peak_bytes <= planned_bytes + 700 * columns * dtype.itemsize
