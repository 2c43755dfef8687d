"""Arguments that compare equal and are not the same to code: each call gets the plan of its own kind, or is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gascompile
from gascompile.core.errors import UnsupportedOpError

X = torch.arange(24.0).reshape(4, 6)


class ByKey(nn.Module):
    """Looks at what its keys are."""

    def forward(self, given: dict[Any, torch.Tensor]) -> torch.Tensor:
        ((key, value),) = given.items()
        return value * (3 if key is True else 1 if isinstance(key, int) else 2)


class Scaled(nn.Module):
    """Looks at an attribute of a number or text, where there is one."""

    def forward(self, x: torch.Tensor, by: Any) -> torch.Tensor:
        return x * (100 if getattr(by, "unit", "m") == "cm" else 1)


class Reshaped(nn.Module):
    def forward(self, x: torch.Tensor, size: Any) -> torch.Tensor:
        return x.reshape(size)


def _with_unit(kind: type, value: Any, unit: str) -> Any:
    made = type("Own", (kind,), {})(value)
    made.unit = unit
    return made


@pytest.mark.parametrize("keys", [(1, True, 1.0), (True, 1, True), (1.0, 1, True), ("a", "b")])
def test_keys_of_other_types(keys: tuple[Any, ...], tmp_path: Path) -> None:
    model = ByKey()
    with gascompile.compile(model, "1MiB", cache_dir=tmp_path) as compiled:
        for key in keys:
            assert torch.equal(compiled({key: X}), model({key: X}))
            assert torch.equal(compiled(given={key: X}), model({key: X}))


@pytest.mark.parametrize(("kind", "value"), [(int, 2), (float, 2.5), (str, "a")])
def test_attributes_of_numbers_and_text_are_refused(kind: type, value: Any, tmp_path: Path) -> None:
    model = Scaled()
    with gascompile.compile(model, "1MiB", cache_dir=tmp_path) as compiled:
        assert torch.equal(compiled(X, value), model(X, value))
        for unit in ("m", "cm"):
            with pytest.raises(UnsupportedOpError, match="attribute 'unit'"):
                compiled(X, _with_unit(kind, value, unit))
        assert torch.equal(compiled(X, value), model(X, value))


def test_a_size_is_as_good_as_a_tuple(tmp_path: Path) -> None:
    model = Reshaped()
    with gascompile.compile(model, "1MiB", cache_dir=tmp_path) as compiled:
        for size in (torch.Size([2, 12]), (2, 12), X.shape, torch.Size([24])):
            assert torch.equal(compiled(X, size), model(X, size))
            assert torch.equal(compiled(X, size=size), model(X, size))
