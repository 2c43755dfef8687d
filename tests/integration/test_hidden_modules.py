"""Modules that are no part of the model, and attributes of tables and tensors: eager's results, or refused."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from torch import nn

import gascompile
from gascompile.core.errors import CaptureError, UnsupportedOpError
from tests.training.runs import MACHINE


class Hiding(nn.Module):
    """Has a module that ``parameters()`` does not find."""

    def __init__(self, hide: Callable[[nn.Module], Any], show: Callable[[Any], nn.Module]) -> None:
        super().__init__()
        self.layer, self.hidden, self.show = nn.Linear(8, 8), hide(nn.Linear(8, 8)), show

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.show(self.hidden)(self.layer(x))
        return out


PLACES: dict[str, tuple[Callable[[nn.Module], Any], Callable[[Any], nn.Module]]] = {
    "list": (lambda module: [module], lambda held: held[0]),
    "object": (lambda module: SimpleNamespace(of=module), lambda held: held.of),
}


def _replace(module: nn.Module) -> None:
    module.weight = nn.Parameter(torch.randn(8, 8))


def _write(module: nn.Module) -> None:
    with torch.no_grad():
        module.get_parameter("weight").mul_(2)


def _write_data(module: nn.Module) -> None:
    module.get_parameter("weight").data.mul_(2)


def _set_data(module: nn.Module) -> None:
    module.get_parameter("weight").data = torch.randn(8, 8)


def _load(module: nn.Module) -> None:
    module.load_state_dict({k: 3 * v for k, v in module.state_dict().items()})


def _load_others(module: nn.Module) -> None:
    module.load_state_dict({k: 3 * v for k, v in module.state_dict().items()}, assign=True)


def _drop(module: nn.Module) -> None:
    module.register_parameter("bias", None)


CHANGES = [_replace, _write, _write_data, _set_data, _load, _load_others, _drop]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("place", PLACES)
def test_changes_of_hidden_modules_are_seen(
    place: str, change: Callable[[nn.Module], None], cache: Path
) -> None:
    hide, show = PLACES[place]
    model = Hiding(hide, show).eval()
    x = torch.randn(2, 8)
    with (
        gascompile.compile(model, "1MiB", (x,), machine=MACHINE, cache_dir=cache) as compiled,
        torch.no_grad(),
    ):
        torch.testing.assert_close(compiled(x), model(x))
        change(show(model.hidden))
        torch.testing.assert_close(compiled(x), model(x))


class Table(dict[str, int]):
    """Has attributes beside its entries."""

    factor = 1.0


class Owner:
    def __init__(self) -> None:
        self.factor = 1.0


class Reading(nn.Module):
    """Multiplies by what it finds in a place."""

    def __init__(self, place: Any, find: Callable[[Any], float]) -> None:
        super().__init__()
        self.layer, self.place, self.find = nn.Linear(8, 8), place, find

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x) * self.find(self.place)
        return out


OWNER = Owner()


@pytest.mark.parametrize(
    ("place", "find", "owner"),
    [
        (table := Table(), lambda held: held.factor, table),
        (weakref.ref(OWNER), lambda held: held().factor, OWNER),
    ],
    ids=["table", "weak reference"],
)
def test_attributes_behind_tables_and_weak_references_are_seen(
    place: Any, find: Callable[[Any], float], owner: Any, cache: Path
) -> None:
    model, x = Reading(place, find).eval(), torch.randn(2, 8)
    held = owner if isinstance(owner, Owner) else None
    with (
        gascompile.compile(model, "1MiB", (x,), machine=MACHINE, cache_dir=cache) as compiled,
        torch.no_grad(),
    ):
        for factor in (1.0, 2.0, 3.0):
            owner.factor = factor
            torch.testing.assert_close(compiled(x), model(x))
    assert held is None or held is OWNER


def _write_tensor(path: Path, value: float) -> None:
    save_file({"factor": np.array(value)}, path)


@pytest.mark.parametrize(
    ("write", "read"),
    [
        (lambda path, value: path.write_text(str(value)), lambda path: float(path.read_text())),
        (lambda path, value: torch.save(value, path), torch.load),
        (
            lambda path, value: np.save(path.with_suffix(".npy"), value),
            lambda path: float(np.load(path.with_suffix(".npy"))),
        ),
        (_write_tensor, lambda path: float(load_file(path)["factor"])),
        (
            lambda path, value: path.write_text(str(value)),
            lambda path: float(SourceFileLoader("factor", str(path)).get_data(str(path))),
        ),
    ],
    ids=["text", "torch.load", "numpy", "load_file", "of a package"],
)
def test_a_file_that_is_read_at_each_call_is_seen(
    tmp_path: Path,
    cache: Path,
    write: Callable[[Path, float], None],
    read: Callable[[Path], float],
) -> None:
    path = tmp_path / "factor"
    write(path, 1.0)
    model, x = Reading(path, read), torch.randn(2, 8)
    with (
        gascompile.compile(
            model.eval(), "1MiB", (x,), machine=MACHINE, cache_dir=cache
        ) as compiled,
        torch.no_grad(),
    ):
        for factor in (1, 22, 333):
            write(path, float(factor))
            torch.testing.assert_close(compiled(x), model(x))


def test_a_file_whose_name_nobody_tells_is_refused(tmp_path: Path, cache: Path) -> None:
    def by_tensors(path: Path) -> float:
        with safe_open(path, "np") as file:
            return float(file.get_tensor("factor"))

    _write_tensor(tmp_path / "factor", 1.0)
    model, x = Reading(tmp_path / "factor", by_tensors).eval(), torch.randn(2, 8)
    with pytest.raises(CaptureError, match="reads an open file"):
        gascompile.compile(model, "1MiB", (x,), machine=MACHINE, cache_dir=cache)


@pytest.mark.parametrize("name", ["tag", "_tag"])
def test_attributes_of_inputs_are_refused(name: str, cache: Path) -> None:
    model = Reading(None, lambda _: 1.0).eval()
    x = torch.randn(2, 8)
    with gascompile.compile(model, "1MiB", (x,), machine=MACHINE, cache_dir=cache) as compiled:
        compiled(x)
        marked = x.clone()
        setattr(marked, name, 3)
        with pytest.raises(UnsupportedOpError, match=rf"attribute '{name}'.*detach"):
            compiled(marked)
        compiled(marked.detach())


@pytest.fixture
def criteria() -> tuple[nn.CrossEntropyLoss, nn.CrossEntropyLoss]:
    return nn.CrossEntropyLoss(torch.ones(8)), nn.CrossEntropyLoss(torch.ones(8))


@pytest.mark.parametrize("way", ["set", "assign", "write"])
def test_other_weights_of_a_criterion_are_seen(
    way: str, criteria: tuple[nn.CrossEntropyLoss, nn.CrossEntropyLoss], cache: Path
) -> None:
    model = nn.Linear(8, 8)
    other = copy.deepcopy(model)
    x, y = torch.randn(4, 8), torch.randint(0, 8, (4,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def loss_fn(of: nn.Module, batch: Any) -> torch.Tensor:
        out: torch.Tensor = criteria[0](of(batch[0]), batch[1])
        return out

    with gascompile.compile_step(
        model, loss_fn, optimizer, "8MiB", (x, y), machine=MACHINE, cache_dir=cache
    ) as step:
        for _ in range(3):
            loss = criteria[1](other(x), y)
            torch.testing.assert_close(step((x, y)), loss.detach())
            values = torch.rand(8)
            for criterion in criteria:
                if way == "set":
                    criterion.weight = values.clone()
                elif way == "assign":
                    criterion.load_state_dict({"weight": values.clone()}, assign=True)
                else:
                    assert criterion.weight is not None
                    criterion.weight.copy_(values)


def test_attributes_of_a_batch_are_refused(cache: Path) -> None:
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gascompile.compile_step(
        model, lambda of, b: of(b).mean(), optimizer, "8MiB", x, machine=MACHINE, cache_dir=cache
    ) as step:
        step(x)
        marked = x.clone()
        vars(marked)["weight"] = 2.0
        with pytest.raises(UnsupportedOpError, match="attribute 'weight'"):
            step(marked)
        step(x)
