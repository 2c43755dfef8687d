"""Attention for a GPU: the processor's results, gradients and strides, by whichever kernel takes the operands."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gascompile.runtime.kernels import attention

_ATEN: Any = torch.ops.aten
_OF_CPU = getattr(_ATEN, attention.FORWARD), getattr(_ATEN, attention.BACKWARD)


def operands(
    rows: int,
    columns: int,
    width: int,
    *,
    heads: int = 4,
    dtype: torch.dtype = torch.float32,
    by_heads: bool = False,
) -> list[torch.Tensor]:
    made = [torch.randn(2, n, heads, width).transpose(1, 2) for n in (rows, columns, columns, rows)]
    return [x.contiguous().to(dtype) if by_heads else x.to(dtype) for x in made]


def masks(rows: int, columns: int, kind: str) -> torch.Tensor | None:
    if kind == "none":
        return None
    shape = {"rows and columns": (rows, columns), "all": (2, 4, rows, columns)}.get(
        kind, (2, 1, 1, columns)
    )
    kept = torch.rand(shape) < 0.7
    kept[..., 0] = True
    return torch.zeros(shape).masked_fill(~kept, -torch.inf)


def compare(found: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...], atol: float) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype
        assert one.stride() == other.stride()
        torch.testing.assert_close(one.cpu(), other, rtol=atol, atol=atol)


def check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    grad: torch.Tensor,
    place: str,
    *,
    is_causal: bool = False,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
    atol: float = 2e-5,
) -> None:
    options: dict[str, Any] = {"attn_mask": mask, "scale": scale}
    forward, backward = _OF_CPU
    wanted = forward(q, k, v, 0.0, is_causal, **options)
    of_wanted = backward(grad, q, k, v, *wanted, 0.0, is_causal, **options)
    there = {**options, "attn_mask": None if mask is None else mask.to(place)}
    x, y, z, of_out = (t.to(place) for t in (q, k, v, grad))
    found = attention.forward(x, y, z, 0.0, is_causal, **there)
    compare(found, wanted, atol)
    compare(attention.backward(of_out, x, y, z, *found, 0.0, is_causal, **there), of_wanted, atol)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 9),
    columns=st.integers(1, 9),
    width=st.sampled_from([1, 3, 8]),
    kind=st.sampled_from(["none", "rows and columns", "all", "columns"]),
    is_causal=st.booleans(),
    scale=st.sampled_from([None, 0.3]),
    by_heads=st.booleans(),
)
def test_products_equal_the_processors_kernel(
    rows: int,
    columns: int,
    width: int,
    kind: str,
    is_causal: bool,
    scale: float | None,
    by_heads: bool,
) -> None:
    # The processor takes no other mask beside a causal one.
    mask = None if is_causal else masks(rows, columns, kind)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("is_for_flash", "is_for_efficient"):
            patch.setattr(attention.AttentionCall, name, property(lambda _: False))
        q, k, v, grad = operands(rows, columns, width, by_heads=by_heads)
        check(q, k, v, grad, "cpu", is_causal=is_causal, mask=mask, scale=scale)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("rows", "columns", "width"),
    [(64, 64, 64), (33, 33, 32), (7, 50, 16), (50, 7, 16), (5, 5, 3), (1, 1, 8)],
)
@pytest.mark.parametrize("kind", ["none", "causal", "rows and columns", "all", "columns"])
@pytest.mark.parametrize("by_heads", [False, True], ids=["by rows", "by heads"])
def test_kernels_of_a_gpu_equal_the_processors(
    rows: int, columns: int, width: int, kind: str, dtype: torch.dtype, by_heads: bool
) -> None:
    q, k, v, grad = operands(rows, columns, width, dtype=dtype, by_heads=by_heads)
    mask = None if kind == "causal" else masks(rows, columns, kind)
    mask = None if mask is None else mask.to(dtype)
    atol = 1e-3 if dtype == torch.float32 else 3e-2
    check(q, k, v, grad, "cuda", is_causal=kind == "causal", mask=mask, atol=atol)


@pytest.mark.gpu
def test_captured_ops_find_the_kernels() -> None:
    attention.install()
    q, k, v, grad = (x.cuda() for x in operands(16, 16, 16))
    forward, backward = _OF_CPU
    found = forward(q, k, v, 0.0, True)
    compare(tuple(x.cpu() for x in found), forward(q.cpu(), k.cpu(), v.cpu(), 0.0, True), 1e-3)
    assert len(backward(grad, q, k, v, *found, 0.0, True)) == 3


@pytest.mark.parametrize(
    ("dtype", "width", "mask", "is_causal", "columns", "flash", "efficient"),
    [
        (torch.bfloat16, 64, None, True, 8, True, True),
        (torch.bfloat16, 64, None, True, 9, False, True),
        (torch.bfloat16, 64, None, False, 9, True, True),
        (torch.bfloat16, 12, None, False, 8, False, False),
        (torch.float32, 12, None, False, 8, False, True),
        (torch.float32, 10, None, False, 8, False, False),
        (torch.float16, 512, None, False, 8, False, True),
        (torch.float64, 64, None, False, 8, False, False),
        (torch.bfloat16, 64, torch.zeros(8, 8), False, 8, False, True),
        (torch.float32, 8, None, False, 0, False, False),
    ],
)
def test_which_kernel_takes_the_operands(
    dtype: torch.dtype,
    width: int,
    mask: torch.Tensor | None,
    is_causal: bool,
    columns: int,
    flash: bool,
    efficient: bool,
) -> None:
    q, k, v, _ = operands(8, columns, width, dtype=dtype)
    call = attention.AttentionCall(q, k, v, is_causal, mask, 1.0)
    assert (call.is_for_flash, call.is_for_efficient) == (flash, efficient)


def test_rows_of_masks_are_aligned() -> None:
    q, k, v, _ = operands(3, 5, 8)
    mask = torch.randn(2, 1, 1, 5)
    bias = attention.AttentionCall(q, k, v, is_causal=False, mask=mask, scale=1.0).bias()
    assert bias is not None
    assert torch.equal(bias, mask.expand(2, 4, 3, 5))
    assert bias.stride(-1) == 1
    assert bias.stride(0) % 16 == 0


def test_masks_of_wider_types_stay_finite() -> None:
    q, k, v, _ = operands(2, 3, 8, dtype=torch.float16)
    mask = torch.tensor([[0.0, -3.4e38, -torch.inf], [-1e5, -1e5, -1e5]])
    bias = attention.AttentionCall(q, k, v, is_causal=False, mask=mask, scale=1.0).bias()
    assert bias is not None
    least = torch.finfo(torch.float16).min
    wanted = torch.tensor([[0.0, least, -torch.inf], [least] * 3], dtype=torch.float16)
    assert torch.equal(bias, wanted.expand(2, 4, 2, 3))
    assert bias.data_ptr() % 16 == 0


def test_masks_of_what_is_kept() -> None:
    q, k, v, _ = operands(3, 5, 3)
    kept = torch.rand(3, 5) < 0.6
    kept[:, 0] = True
    added = torch.zeros(3, 5).masked_fill(~kept, -torch.inf)
    found = attention.forward(q, k, v, attn_mask=kept)
    compare(found, _OF_CPU[0](q, k, v, attn_mask=added), 2e-5)


def test_efficient_attention_is_given_results_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    given_here: list[torch.Tensor] = []

    class Efficient:
        @staticmethod
        def _scaled_dot_product_efficient_attention_backward(*values: Any, **_: Any) -> Any:
            given_here.extend((values[0], values[5]))
            return *values[1:4], None

    monkeypatch.setattr(attention, "_aten", Efficient)
    q, k, v, grad = operands(8, 8, 16, dtype=torch.bfloat16, by_heads=True)
    mask = torch.zeros(8, 8)
    out = torch.randn_like(q)
    attention.backward(grad, q, k, v, out, torch.zeros(2, 4, 8), 0.0, False, attn_mask=mask)
    for found, wanted in zip(given_here, (grad, out), strict=True):
        assert torch.equal(found, wanted)
        assert found.transpose(1, 2).is_contiguous()


def test_a_part_of_wider_rows_has_strides_of_its_own() -> None:
    wide = torch.randn(2, 4, 32)
    found = attention._by_rows(wide[..., :1])
    assert found.stride() == (4, 1, 4)
    assert torch.equal(found, wide[..., :1])


def test_heads_that_share_keys() -> None:
    q, _, _, grad = operands(6, 6, 3)
    _, k, v, _ = operands(6, 6, 3, heads=2)
    wide = [x.repeat_interleave(2, 1) for x in (k, v)]
    out, sums = attention.forward(q, k, v)
    compare((out, sums), _OF_CPU[0](q, *wide), 2e-5)
    of_query, of_key, of_value = _OF_CPU[1](grad, q, *wide, out, sums, 0.0, False)
    found = attention.backward(grad, q, k, v, out, sums, 0.0, is_causal=False)
    shared = [x.unflatten(1, (2, 2)).sum(2) for x in (of_key, of_value)]
    for one, other in zip(found, (of_query, *shared), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5)


def test_dropout_is_refused() -> None:
    q, k, v, _ = operands(2, 2, 4)
    with pytest.raises(NotImplementedError, match="dropout"):
        attention.forward(q, k, v, 0.1)
