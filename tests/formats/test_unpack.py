"""Packed weights whose parts lie apart, against values that were known before they were packed, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import pytest
import torch

from gascompile.cost_models.formulas.kernel_workspace import kernel_workspace_bytes
from gascompile.formats import ops as format_ops
from gascompile.formats.dtypes import is_lossless
from gascompile.formats.layout import is_packed
from gascompile.formats.packings import packing_of, rows_of
from gascompile.formats.workspace import decode_workspace_bytes
from tests.allocator import peak_growth_bytes
from tests.quantised_files import Layer, awq, compressed, fp8, gptq, rounded

ORDER: Mapping[str, tuple[str, ...]] = {
    "gptq": ("qweight", "g_idx", "qzeros", "scales"),
    "awq": ("qweight", "qzeros", "scales"),
    "packed": ("weight_packed", "weight_g_idx", "weight_zero_point", "weight_scale"),
    "fp8": ("weight", "weight_scale_inv"),
}
bf16, f16 = torch.bfloat16, torch.float16
CASES: Mapping[str, Callable[[], Layer]] = {
    "gptq4-g32-f16-v1": partial(gptq, 48, 64, has_groups=False),
    "gptq4-g32-f16": partial(gptq, 40, 64, version=2, has_groups=False),
    "gptq4-row-bf16-v1": partial(gptq, 24, 40, group=-1, dtype=bf16, sym=True, has_groups=False),
    "gptq4-g24-f16-v1": partial(gptq, 24, 64, group=24, has_groups=False),
    "gptq8-g16-f16-v1": partial(gptq, 20, 32, bits=8, group=16, has_groups=False),
    "gptq4-g16-f16-v1-idx": partial(gptq, 24, 64, group=16, ordered=True),
    "awq4-g32-f16": partial(awq, 40, 96),
    "awq4-row-f16": partial(awq, 24, 96, group=-1),
    "packed4-g16-bf16": partial(compressed, 21, 48, group=16),
    "packed4-row-f16": partial(compressed, 9, 13, group=-1, dtype=f16),
    "packed4-g16-bf16-zeros": partial(compressed, 21, 48, group=16, sym=False),
    "packed4-g16-f16-idx": partial(compressed, 21, 48, group=16, ordered=True, dtype=f16),
    "packed8-g16-bf16": partial(compressed, 21, 48, bits=8, group=16),
    "packed8-row-f32-zeros": partial(compressed, 33, 31, bits=8, group=-1, sym=False, dtype=torch.float32),
    "fp8-32x32-f32": partial(fp8, 70, 75),
    "fp8-24x40-bf16": partial(fp8, 50, 81, block=(24, 40), dtype=bf16),
    "fp8-row-bf16": partial(fp8, 37, 33, block="row", dtype=bf16),
    "fp8-all-f32": partial(fp8, 35, 33, block="all"),
}  # fmt: skip


def joined(form: str, layer: Layer) -> torch.Tensor:
    packing = packing_of(form)
    assert packing is not None
    parts = [layer.parts[name] for name in ORDER[packing.kind] if name in layer.parts]
    return torch.cat([part.reshape(-1).view(torch.uint8) for part in parts])


@pytest.mark.parametrize("form", CASES)
def test_values_are_those_that_were_packed(form: str, kernels: object) -> None:
    torch.manual_seed(len(form))
    layer = CASES[form]()
    wire = joined(form, layer)
    rows, columns = layer.values.shape
    assert format_ops.transfer_matrix(form, rows, columns, 0) == ("uint8", (wire.numel(),))
    assert rows_of(form, columns, wire.numel()) == rows
    x = torch.randn(3, columns)
    bias = torch.randn(rows)
    for dtype in (torch.float32, f16, bf16):
        wanted = rounded(layer.values, dtype)
        found = format_ops.DECODE(wire, form, columns, 0, dtype)
        assert found.dtype == dtype
        assert torch.equal(found, wanted)
        narrow = x.to(dtype)
        out = format_ops.LINEAR(narrow, wire, bias.to(dtype), form, 0)
        linear = torch.nn.functional.linear(narrow, wanted, bias.to(dtype))
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(out, linear, rtol=tolerance, atol=tolerance)
        meta = wire.to("meta")
        assert format_ops.LINEAR(narrow.to("meta"), meta, None, form, 0).shape == out.shape
        assert format_ops.DECODE(meta, form, columns, 0, dtype).shape == found.shape


@pytest.mark.parametrize("form", CASES)
def test_blocks_of_rows_and_what_they_take(
    form: str, kernels: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are taken 16 at a time here, as those of large weights are."""
    monkeypatch.setattr(format_ops, "_BLOCK_WEIGHTS", 1)
    torch.manual_seed(1)
    layer = CASES[form]()
    wire, columns = joined(form, layer), layer.values.shape[1]
    for dtype in (torch.float32, bf16):
        wanted = rounded(layer.values, dtype)
        x = torch.randn(5, columns).to(dtype)
        found = format_ops.DECODE(wire, form, columns, 0, dtype)
        assert torch.equal(found, wanted)
        out = format_ops.LINEAR(x, wire, None, form, 0)
        torch.testing.assert_close(out, x @ wanted.t(), rtol=2e-2, atol=2e-2)
        taken = peak_growth_bytes(partial(format_ops.DECODE, wire, form, columns, 0, dtype))
        result_bytes = found.numel() * found.element_size()
        rows = layer.values.shape[0]
        room = decode_workspace_bytes(rows, columns, form, 0, found.element_size())
        assert taken <= room + result_bytes
        taken = peak_growth_bytes(partial(format_ops.LINEAR, x, wire, None, form, 0))
        args = (x, wire, None, form, 0)
        room = kernel_workspace_bytes(format_ops.LINEAR, args, [x, wire], [out])
        assert taken <= room + out.numel() * out.element_size()


@pytest.mark.parametrize(
    "form", ["packed4-g16-bf16-zeros", "packed4-row-f16", "fp8-32x32-f32", "fp8-row-bf16"]
)
def test_rows_that_begin_anywhere(form: str, kernels: object) -> None:
    """Files are read to where their pages line up: parts by rows need no alignment."""
    layer = CASES[form]()
    wire = joined(form, layer)
    for begin in (1, 2, 3):
        moved = torch.zeros(wire.numel() + begin, dtype=torch.uint8)[begin:].copy_(wire)
        found = format_ops.DECODE(moved, form, layer.values.shape[1], 0, torch.float32)
        assert torch.equal(found, rounded(layer.values, torch.float32))


def test_what_is_no_number_stays_none(kernels: object) -> None:
    torch.manual_seed(2)
    layer = fp8(64, 64, has_nan=True)
    assert layer.values.isnan().any()
    layer.parts["weight_scale_inv"][1, 0] = torch.inf
    layer.parts["weight_scale_inv"][1, 1] = 0
    found = format_ops.DECODE(joined("fp8-32x32-f32", layer), "fp8-32x32-f32", 64, 0, torch.float32)
    assert torch.equal(found[:32].isnan(), layer.values[:32].isnan())
    codes = layer.parts["weight"].float()
    assert torch.equal(found[32:, :32].isnan(), (codes[32:, :32] * torch.inf).isnan())
    assert bool((found[32:, 32:].nan_to_num(0) == 0).all())


def test_names_of_forms() -> None:
    for form in CASES:
        packing = packing_of(form)
        assert packing is not None and packing.form == form
        assert is_packed(form)
    odd = (
        "gptq3-g32-f16", "gptq4-g0-f16", "gptq4-g32-f64", "awq8-g32-f16", "awq4-g32-f16-v1", "awq4-g32-f16-idx",
        "packed4-g32-f16-v1", "gptq4-g32-f16-zeros", "fp8-0x32-f32", "fp8-row-f64", "gptq4-g32-f16\n", "int3", "",
        "gptq4-g99999999999-f16", "fp8-row-f32-idx", "gptq4-g\u0663-f16",
    )  # fmt: skip
    for form in odd:
        assert packing_of(form) is None and not is_packed(form), form
    with pytest.raises(ValueError, match="no whole rows"):
        rows_of("gptq4-g32-f16", 64, 1001)


def test_dtypes_that_hold_the_values() -> None:
    assert is_lossless("gptq4-g32-f16", "float16") and is_lossless("gptq4-g32-f16", "float32")
    assert not is_lossless("gptq4-g32-f16", "bfloat16")
    assert is_lossless("fp8-row-bf16", "bfloat16") and not is_lossless("fp8-row-bf16", "float16")
    # Scales in float32 are those of formats whose values are rounded to what is computed in.
    assert is_lossless("fp8-32x32-f32", "bfloat16") and is_lossless("fp8-32x32-f32", "float16")
    assert not is_lossless("fp8-32x32-f32", "int8")
