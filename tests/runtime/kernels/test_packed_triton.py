"""Products of graphs with packed weights by the launchers: those of a GPU, and their references in CPU memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from gascompile.formats import ops as format_ops
from gascompile.formats.layout import DEFAULT_GROUPS, FORMS
from gascompile.formats.quantize import pack
from gascompile.runtime.kernels.packed_triton import TritonPackedKernels

HERE = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]


class Counting(TritonPackedKernels):
    """Counts what it did."""

    def __init__(self) -> None:
        self.done = {"linear": 0, "linear_by_blocks": 0, "decode": 0}

    def linear(self, *args: object) -> bool:
        return self._count("linear", args)

    def linear_by_blocks(self, *args: object) -> bool:
        return self._count("linear_by_blocks", args)

    def decode(self, *args: object) -> bool:
        return self._count("decode", args)

    def _count(self, name: str, args: tuple[object, ...]) -> bool:
        did = bool(getattr(TritonPackedKernels, name)(self, *args))
        self.done[name] += did
        return did


@pytest.fixture
def counting() -> Iterator[Counting]:
    before = {device: format_ops.kernels_for(device) for device in ("cpu", "cuda")}
    found = Counting()
    for device in before:
        format_ops.use_kernels(found, device=device)
    yield found
    for device, kernels in before.items():
        format_ops.use_kernels(kernels, device=device)


@pytest.mark.parametrize("place", HERE)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_layers_of_a_graph(
    place: str, form: str, dtype: torch.dtype, counting: Counting
) -> None:
    group = DEFAULT_GROUPS[form]
    weight = torch.randn(96, 128)
    packed = pack(weight, form, group).to(place)
    values = format_ops.decoded(packed, form, 128, group, torch.float32)
    assert counting.done["decode"] == (form != "int4")
    bias = torch.randn(96).to(place, dtype)
    for rows, name in ((3, "linear"), (40, "linear_by_blocks")):
        x = torch.randn(rows, 128).to(place, dtype)
        result = format_ops.LINEAR(x, packed, bias, form, group)
        expected = x.double() @ values.double().T + bias.double()
        size = float(expected.abs().max())
        assert float((result.double() - expected).abs().max()) <= size * (
            1e-5 if dtype == torch.float32 else 0.02
        )
        assert counting.done[name] == 1


@pytest.mark.parametrize("place", HERE)
def test_what_is_not_for_it_is_plain_torch(place: str, counting: Counting) -> None:
    weight = torch.randn(8, 64)
    packed = pack(weight, "int8", 16).to(place)
    area = torch.zeros(8 * packed.shape[1] + 16, dtype=torch.uint8, device=place)
    apart = area[1 : 1 + packed.numel()].view(packed.shape)
    apart.copy_(packed)
    x = torch.randn(2, 64).to(place)
    before = dict(counting.done)
    moved = format_ops.LINEAR(x, apart, None, "int8", 16)
    narrow = format_ops.LINEAR(x, weight.bfloat16().to(place), None, "bfloat16", 0)
    assert counting.done == before
    assert torch.allclose(moved, format_ops.LINEAR(x, packed, None, "int8", 16), atol=1e-5)
    assert torch.allclose(narrow.cpu(), x.cpu() @ weight.bfloat16().float().T, atol=1e-4)


def test_a_tile_is_written_where_it_belongs(counting: Counting) -> None:
    packed = pack(torch.randn(32, 64), "int10", 16)
    x = torch.randn(4, 64)
    whole = format_ops.LINEAR(x, packed, None, "int10", 16)
    out = None
    for begin in (0, 16):
        part = packed[begin : begin + 16]
        out = format_ops.linear_tile(out, x, part, None, begin, 32, "int10", 16)
    assert out is not None and torch.allclose(out, whole, atol=1e-5)
    assert counting.done["linear_by_blocks"] == 2
