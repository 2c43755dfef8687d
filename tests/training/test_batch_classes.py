"""What a loss asks of a batch's own classes and objects beside their fields: eager's answer, or an error."""

from __future__ import annotations

import enum
from collections import UserDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gascompile.core.errors import CaptureError
from tests.training.trials import Trial

STEPS = 4
make_named: Any = namedtuple  # noqa: PYI024 - classes are made as tests run


def tensors(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 8, generator=generator), torch.randn(4, 8, generator=generator)


class Batches:
    """Makes each batch when it is asked for, as a loader does."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make

    def __getitem__(self, number: int) -> Any:
        if number == STEPS:
            raise IndexError
        return self.make(number)


def run(folder: Path, loss_fn: Any, make: Callable[[int], Any]) -> None:
    torch.manual_seed(0)
    batches: Any = Batches(make)
    trial = Trial(nn.Linear(8, 8), loss_fn, batches, folder)
    trial.planned().assert_equals(trial.eager())


def error(model: nn.Module, batch: Any) -> torch.Tensor:
    value: torch.Tensor = (model(batch.x) - batch.y).square().mean()
    return value


def named(number: int) -> Any:
    """A class that is made again with its fields in another order, as a notebook's cell may."""
    x, y = tensors(number)
    fields = ("x", "y") if number % 2 else ("y", "x")
    kind: Any = make_named("Batch", fields)
    return kind(x=x, y=y)


def local(number: int) -> Any:
    """A class of the same name and fields, whose code does something else."""
    x, y = tensors(number)
    if number % 2:

        @dataclass
        class Batch:
            x: torch.Tensor
            y: torch.Tensor

            @property
            def scale(self) -> float:
                return 2.0

    else:

        @dataclass
        class Batch:  # type: ignore[no-redef]
            x: torch.Tensor
            y: torch.Tensor

            @property
            def scale(self) -> float:
                return 3.0

    return Batch(x, y)


@dataclass
class Scaled:
    """Has a value that is no field."""

    x: torch.Tensor
    y: torch.Tensor
    scale = 1.0


def of_class(number: int) -> Any:
    Scaled.scale = 1.0 + number
    return Scaled(*tensors(number))


def of_object(number: int) -> Any:
    batch = Scaled(*tensors(number))
    batch.scale = 2.0 + number
    return batch


def tensor_of_object(number: int) -> Any:
    batch: Any = Scaled(*tensors(number))
    batch.scale = torch.tensor(2.0 + number)
    return batch


class Mapping(UserDict[str, torch.Tensor]):
    """As tokenizers return them."""

    def __init__(self, data: Any, scale: float = 1.0) -> None:
        super().__init__(data)
        self.kept, self.unknown = scale, object()

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["data"][name]
        except KeyError:
            raise AttributeError(name) from None

    @property
    def scale(self) -> float:
        return self.kept


def mapping(number: int) -> Any:
    x, y = tensors(number)
    return Mapping({"x": x, "y": y}, 1.0 + number)


def closed(number: int) -> Any:
    """A class whose method knows a number of where the class was made."""
    x, y = tensors(number)

    @dataclass(slots=True)
    class Batch:
        x: torch.Tensor
        y: torch.Tensor

        @property
        def scale(self) -> float:
            return 2.0 + number

    return Batch(x, y)


def tensor_of_mapping(number: int) -> Any:
    batch = mapping(number)
    batch.kept = torch.tensor(2.0 + number)
    return batch


class Slotted:
    """Has room for an attribute."""

    __slots__ = ("scale",)


@dataclass(slots=True)
class InSlots(Slotted):
    """Has an attribute that is no field."""

    x: torch.Tensor
    y: torch.Tensor


def slotted(number: int) -> Any:
    batch: Any = InSlots(*tensors(number))
    batch.scale = 2.0 + number
    return batch


@pytest.mark.parametrize(
    "make",
    [
        closed,
        tensor_of_mapping,
        slotted,
        named,
        local,
        of_class,
        of_object,
        tensor_of_object,
        mapping,
    ],
)
def test_losses_get_what_classes_and_objects_have(
    make: Callable[[int], Any], tmp_path: Path
) -> None:
    run(tmp_path, lambda model, batch: error(model, batch) * getattr(batch, "scale", 1.0), make)


class Text(str):
    """Says which language it is of."""

    __slots__ = ("__dict__",)

    def __repr__(self) -> str:
        return "a text"


class Number(float):
    """Has a unit."""


class Kind(enum.Enum):
    """Members have weights."""

    FIRST = 1
    SECOND = 2


def text(number: int) -> Any:
    value = Text("same")
    value.language = number  # type: ignore[attr-defined]
    return *tensors(number), value


def other_text(number: int) -> Any:
    value = Text(f"text {number}")
    value.language = len(value) - 6 + number  # type: ignore[attr-defined]
    return *tensors(number), value


def weighed(number: int) -> Any:
    Kind.FIRST.language = number  # type: ignore[attr-defined]
    return *tensors(number), Kind.FIRST


@pytest.mark.parametrize("make", [text, other_text, weighed])
def test_values_with_attributes_are_told_apart(make: Callable[[int], Any], tmp_path: Path) -> None:
    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        value: torch.Tensor = (model(batch[0]) - batch[1]).square().mean() * (1 + batch[2].language)
        return value

    run(tmp_path, loss_fn, make)


def with_unknown(batch: Any, number: int) -> Any:
    batch.unknown = [object()] if number % 2 else {number: object()}
    return batch


def test_attributes_that_no_plan_compares_are_there_and_not_read(tmp_path: Path) -> None:
    def scaled(model: nn.Module, batch: Any) -> torch.Tensor:
        return error(model, batch) * (2 if batch.unknown is not None else 1)

    def of_class(model: nn.Module, batch: Any) -> torch.Tensor:
        held = sum(isinstance(value, torch.Tensor) for value in vars(batch).values())
        return error(model, batch) * (2 if isinstance(batch.unknown, int | list) else 1 + held)

    run(tmp_path, scaled, mapping)
    run(tmp_path, of_class, mapping)
    run(tmp_path, of_class, lambda number: with_unknown(mapping(number), number))
    for read in (
        lambda b: 2 if b.unknown else 1,
        lambda b: b.unknown.value,
        lambda b: b.unknown == 3,
    ):
        with pytest.raises(CaptureError, match="reads the attribute 'unknown'"):
            run(
                tmp_path, lambda model, batch, read=read: error(model, batch) * read(batch), mapping
            )


def test_values_with_attributes_that_no_plan_compares_are_refused(tmp_path: Path) -> None:
    def make(number: int) -> Any:
        value: Any = Number(1.0)
        value.unit = object()
        return *tensors(number), value

    with pytest.raises(CaptureError, match="Number whose attribute 'unit' is a object"):
        run(tmp_path, lambda model, batch: model(batch[0]).sum() * batch[2], make)


def test_a_class_that_stays_is_one_kind(tmp_path: Path) -> None:
    Scaled.scale = 1.0
    torch.manual_seed(0)
    batches: Any = Batches(lambda number: Scaled(*tensors(number)))
    trial = Trial(nn.Linear(8, 8), error, batches, tmp_path)
    model = nn.Linear(8, 8)
    with trial.compiled(model, torch.optim.AdamW(model.parameters()), None) as step:
        for batch in batches:
            step(batch)
        assert len(list(step._units)) == 1
