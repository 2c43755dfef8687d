"""The public functions: the reference in CPU memory, the kernels on a GPU, and what they refuse."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gascompile.formats.quantize import pack
from gascompile.runtime import kernels
from gascompile.runtime.kernels import launching, reference

X = torch.randn(2, 64)
PACKED = pack(torch.randn(5, 64), "int4", 32)

HERE = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("place", HERE)
def test_each_function_does_what_the_reference_does(place: str) -> None:
    x, packed = X.to(place), PACKED.to(place)
    out, expected = torch.empty(2, 64, device=place, dtype=torch.bfloat16), X.bfloat16()
    kernels.cast_copy(x, out)
    assert torch.equal(out.cpu(), expected)
    values, by_reference = torch.empty(5, 64, device=place), torch.empty(5, 64)
    kernels.unpack(packed, values, form="int4")
    reference.unpack(PACKED, by_reference, form="int4", group=32)
    assert torch.equal(values.cpu(), by_reference)
    result = kernels.linear(x, packed, form="int4")
    assert result.dtype == x.dtype
    assert torch.allclose(result.cpu(), X @ by_reference.T, atol=1e-4)
    bias = torch.ones(5, device=place)
    assert torch.allclose(kernels.linear(x, packed, bias, form="int4"), result + 1)


@pytest.mark.parametrize("place", HERE)
def test_empty_tensors_are_left_alone(place: str) -> None:
    kernels.cast_copy(torch.empty(0, 4, device=place), torch.empty(0, 4, device=place))
    none = torch.empty(0, PACKED.shape[1], dtype=torch.uint8, device=place)
    kernels.unpack(none, torch.empty(0, 64, device=place), form="int4")
    assert kernels.linear(X.to(place), none, form="int4").shape == (2, 0)


def refused(error: type[Exception], message: str, call: Callable[[], Any]) -> Any:
    return pytest.param(error, message, call, id=message)


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        refused(
            TypeError,
            "source is torch.int32",
            lambda: kernels.cast_copy(torch.ones(2, dtype=torch.int32), torch.empty(2)),
        ),
        refused(
            ValueError,
            "out has shape (3,)",
            lambda: kernels.cast_copy(torch.ones(2), torch.empty(3)),
        ),
        refused(
            ValueError,
            "source has strides (1, 4)",
            lambda: kernels.cast_copy(torch.ones(4, 4).T, torch.empty(4, 4)),
        ),
        refused(
            ValueError,
            "contiguous and of shape (4, 4)",
            lambda: kernels.cast_copy(torch.ones(4, 4), torch.empty(4, 4).T),
        ),
        refused(
            ValueError,
            "source is on cpu, the other tensors are on meta",
            lambda: kernels.cast_copy(torch.ones(4), torch.empty(4, device="meta")),
        ),
        refused(
            TypeError,
            "a packed weight is torch.uint8, not torch.int8",
            lambda: kernels.unpack(PACKED.view(torch.int8), torch.empty(5, 64), form="int4"),
        ),
        refused(
            ValueError,
            "96 columns as int4 need [rows, 64]",
            lambda: kernels.unpack(PACKED, torch.empty(5, 96), form="int4"),
        ),
        refused(
            ValueError,
            "contiguous and of shape (5, 64)",
            lambda: kernels.unpack(PACKED, torch.empty(4, 64), form="int4"),
        ),
        refused(
            ValueError,
            "unpacks to a matrix",
            lambda: kernels.unpack(PACKED, torch.empty(64), form="int4"),
        ),
        refused(
            ValueError,
            "'int2' is no packed form",
            lambda: kernels.unpack(PACKED, torch.empty(5, 64), form="int2"),
        ),
        refused(
            ValueError,
            "its scales need multiples of 4",
            lambda: kernels.unpack(
                torch.zeros(81, dtype=torch.uint8)[1:].view(1, 80), torch.empty(1, 64), form="int8"
            ),
        ),
        refused(
            ValueError,
            "x has 17 rows, the product takes 1 to 16",
            lambda: kernels.linear(torch.ones(17, 64), PACKED, form="int4"),
        ),
        refused(
            ValueError,
            "has to be a matrix of contiguous rows",
            lambda: kernels.linear(torch.ones(64, 2).T, PACKED, form="int4"),
        ),
        refused(
            TypeError,
            "a plain weight of torch.float32 does not fit x of torch.bfloat16",
            lambda: kernels.linear(X.bfloat16(), torch.ones(5, 64)),
        ),
        refused(
            ValueError,
            "x of 64 columns needs [outputs, 64]",
            lambda: kernels.linear(X, torch.ones(5, 63)),
        ),
        refused(
            ValueError,
            "bias has shape (4,), not (5,)",
            lambda: kernels.linear(X, PACKED, torch.ones(4), form="int4"),
        ),
        refused(
            ValueError,
            "contiguous and of shape (2, 5)",
            lambda: kernels.linear(X, PACKED, form="int4", out=torch.empty(5, 2)),
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    error: type[Exception], message: str, call: Callable[[], Any]
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        call()


def test_compiled_kernels_refuse_cpu_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "INTERPRETED", False)
    with pytest.raises(ValueError, match="cannot work on cpu"):
        launching.launch_device(X)
