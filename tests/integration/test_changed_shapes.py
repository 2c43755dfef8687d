"""Tensors of one memory whose shapes differ, what is changed in place of them, and sizes that are returned."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import gascompile
from gascompile.core.errors import CaptureError, UnsupportedOpError
from tests.training.runs import MACHINE

Code = Callable[[nn.Module, torch.Tensor], Any]


class By(nn.Module):
    """Computes by a function of the model and its input."""

    def __init__(self, code: Code) -> None:
        super().__init__()
        self.code = code
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Any:
        return self.code(self, x)


def _detached(_: Any, x: torch.Tensor) -> Any:
    z = x.detach()
    z.t_()
    return x * 2, z


def _between(_: Any, x: torch.Tensor) -> Any:
    h = x + 1
    z = h.detach()
    z.unsqueeze_(0)
    return h * 2, z + 0


def _alias(_: Any, x: torch.Tensor) -> Any:
    h = x + 1
    z = torch.ops.aten.alias(h)
    z.t_()
    return h * 2, z + 0


def _of_weight(model: Any, x: torch.Tensor) -> Any:
    weight = model.layer.weight.detach()
    weight.t_()
    return functional.linear(x, weight), functional.linear(x, model.layer.weight)


def _two_of_one(_: Any, x: torch.Tensor) -> Any:
    h = x + 1
    z = h.detach()
    z.relu_()
    return h, z


def _cast(_: Any, x: torch.Tensor) -> Any:
    h = x + 1
    return h, h.detach().to(h.dtype)


def _dropped(_: Any, x: torch.Tensor) -> Any:
    h = x + 1
    return h, functional.dropout(h.detach(), training=False)


def _contiguous(_: Any, x: torch.Tensor) -> Any:
    h = x + 1
    return h, h.detach().contiguous(), h.float()


def _sizes(_: Any, x: torch.Tensor) -> Any:
    return x * 2, x.shape, {"of": [x.size()[1:]]}


def _input(_: Any, x: torch.Tensor) -> Any:
    x.t_()
    x.mul_(2)
    return x, x + 1


def _rows() -> torch.Tensor:
    return torch.arange(32.0).reshape(4, 8)


def _odd_row() -> torch.Tensor:
    """Return a row with a stride that no element depends on."""
    return torch.empty_strided((1, 8), (3, 1)).copy_(torch.arange(8.0))


CASES: dict[str, tuple[Code, Callable[[], torch.Tensor]]] = {
    "a detached input": (_detached, _rows),
    "a detached value": (_between, _rows),
    "an alias": (_alias, _rows),
    "a detached weight": (_of_weight, _rows),
    "two tensors of one memory": (_two_of_one, _rows),
    "a cast that changes nothing": (_cast, _rows),
    "a dropout that drops nothing": (_dropped, _rows),
    "what is contiguous": (_contiguous, _rows),
    "sizes": (_sizes, _rows),
    "an input": (_input, _rows),
    "an input of one row": (_input, _odd_row),
}


def _facts(values: Any) -> list[Any]:
    """Return what is compared of results: types, values, shapes and which tensors are one."""
    flat: list[Any] = []

    def add(value: Any) -> None:
        if isinstance(value, dict):
            value = list(value.values())
        flat.append(type(value))
        if isinstance(value, (list, tuple)):
            for part in value:
                add(part)
        else:
            flat.append(value)

    add(values)
    tensors = [value for value in flat if isinstance(value, torch.Tensor)]
    shared = [[a is b, a.data_ptr() == b.data_ptr()] for a in tensors for b in tensors]
    return [shared, *(v.tolist() if isinstance(v, torch.Tensor) else v for v in flat)]


@pytest.mark.parametrize("name", CASES)
def test_results_and_what_is_left_are_eagers(name: str, tmp_path: Path) -> None:
    code, made = CASES[name]
    torch.manual_seed(0)
    model = By(code).eval()
    twin = copy.deepcopy(model)
    for _ in range(2):  # the second one from the cache
        with (
            gascompile.compile(model, "1MiB", machine=MACHINE, cache_dir=tmp_path) as compiled,
            torch.no_grad(),
        ):
            for _ in range(3):
                own, others = made(), made()
                assert _facts(compiled(own)) == _facts(twin(others))
                assert own.shape == others.shape and torch.equal(own, others)
            assert model.layer.weight.stride() == twin.layer.weight.stride()


def test_one_row_twice(tmp_path: Path) -> None:
    def turned(_: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.t_()
        return x + y

    class Two(By):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:  # type: ignore[override]
            return turned(self, x, y)

    own, others = _odd_row(), _odd_row()
    with gascompile.compile(Two(_sizes), "1MiB", machine=MACHINE, cache_dir=tmp_path) as compiled:
        assert torch.equal(compiled(own, own), Two(_sizes)(others, others))
    assert own.shape == others.shape == (8, 1)


def test_a_weight_in_another_type_is_no_state(tmp_path: Path) -> None:
    def added(model: Any, x: torch.Tensor) -> Any:
        weight = model.layer.weight.to(torch.float64)
        weight.add_(1)
        return x + weight.sum(), weight, weight.view(-1)

    model = By(added).eval()
    twin, x = copy.deepcopy(model), _rows()
    with (
        gascompile.compile(model, "1MiB", (x,), machine=MACHINE, cache_dir=tmp_path) as compiled,
        torch.no_grad(),
    ):
        assert not compiled.states
        for _ in range(2):
            assert _facts(compiled(x)) == _facts(twin(x))


def _ranged(_: Any, x: torch.Tensor) -> Any:
    return (x + 1).random_(1, 5)


def _ranged_within(_: Any, x: torch.Tensor) -> Any:
    with torch.autocast("cpu", enabled=False):
        return (x + 1).random_(1, 5)


@pytest.mark.filterwarnings(
    "ignore:Unable to execute the generated:UserWarning"
)  # torch's, which cannot
@pytest.mark.parametrize("by", [_ranged, _ranged_within])
def test_an_op_without_a_name_is_refused(by: Code, tmp_path: Path) -> None:
    model = By(by)
    with pytest.raises(UnsupportedOpError, match=r"torch\.randint"):
        gascompile.compile(model, "1MiB", (_rows(),), machine=MACHINE, cache_dir=tmp_path)


def _wider(_: Any, x: torch.Tensor) -> Any:
    x.unsqueeze_(0)
    return x + 1


def test_what_torch_cannot_follow_is_told_what_to_write(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"x = x\.unsqueeze\(0\)"):
        gascompile.compile(By(_wider), "1MiB", (_rows(),), machine=MACHINE, cache_dir=tmp_path)
