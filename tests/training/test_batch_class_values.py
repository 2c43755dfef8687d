"""What classes of batches hold that no field and no plain value is: eager's answer at each step, or an error."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from tests.training.test_batch_classes import STEPS, Batches, Scaled, error, run, tensors
from tests.training.trials import Trial


class Meta(type):
    """Gives its classes an attribute of its own."""

    gain: Any = 1.0


class Settings:
    """Has a scale."""

    def __init__(self, scale: float) -> None:
        self.scale = scale


HELD: dict[str, Callable[[float], Any]] = {
    "tensor": torch.tensor,
    "set": lambda value: {value},
    "frozen set": lambda value: frozenset({value}),
    "array": np.array,
    "partial": lambda value: functools.partial(float, value),
    "object": Settings,
    "list of arrays": lambda value: [np.array(value)],
    "class": lambda value: type("Inner", (), {"scale": value}),
    "method": lambda value: lambda self: value,
}


def value_of(held: Any) -> Any:
    if isinstance(held, list):
        held = held[0]
    if isinstance(held, set | frozenset):
        return next(iter(held))
    held = held() if callable(held) and not isinstance(held, type) else held
    held = float(held) if isinstance(held, np.ndarray) else held
    return getattr(held, "scale", held)


def scaled(model: nn.Module, batch: Any) -> torch.Tensor:
    value: torch.Tensor = error(model, batch) * value_of(batch.held)
    return value


@pytest.mark.parametrize("held", HELD)
def test_values_of_classes_are_todays(held: str, tmp_path: Path) -> None:
    class Batch(Scaled):
        """Gets another value before each step."""

    def make(number: int) -> Any:
        Batch.held = HELD[held](1.0 + number // 2)  # type: ignore[attr-defined]
        return Batch(*tensors(number))

    run(tmp_path, scaled, make)


def test_what_classes_hold_is_changed_in_its_place(tmp_path: Path) -> None:
    class Batch(Scaled):
        """Holds what is changed before each step."""

        held = (torch.zeros(()), np.zeros(1), set[float](), Settings(0.0))

    def make(number: int) -> Any:
        tensor, array, numbers, settings = Batch.held
        tensor.fill_(number)
        array[0] = number
        numbers.clear()
        numbers.add(float(number))
        settings.scale = number
        return Batch(*tensors(number))

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        tensor, array, numbers, settings = batch.held
        scale = 1 + tensor + float(array[0]) + sum(numbers) + settings.scale
        value: torch.Tensor = error(model, batch) * scale
        return value

    run(tmp_path, loss_fn, make)


def test_values_of_metaclasses_are_todays(tmp_path: Path) -> None:
    class Batch(Scaled, metaclass=Meta):
        """Is made by a class of the program."""

    def make(number: int) -> Any:
        Meta.gain = torch.tensor(1.0 + number)
        return Batch(*tensors(number))

    run(tmp_path, lambda model, batch: error(model, batch) * type(batch).gain, make)


@pytest.mark.parametrize("held", HELD)
def test_classes_of_one_name_hold_what_they_hold(held: str, tmp_path: Path) -> None:
    def kind(value: float) -> type:
        class Batch(Scaled):
            """Is made twice."""

        Batch.held = HELD[held](value)  # type: ignore[attr-defined]
        return Batch

    kinds = kind(1.0), kind(2.0)
    run(tmp_path, scaled, lambda number: kinds[number % 2](*tensors(number)))


@pytest.mark.parametrize("held", HELD)
def test_kept_plans_know_what_classes_hold(held: str, tmp_path: Path) -> None:
    class Batch(Scaled):
        """Holds another value in the next job."""

    for value in (1.0, 1.0, 2.0):
        Batch.held = HELD[held](value)  # type: ignore[attr-defined]
        run(tmp_path, scaled, lambda number: Batch(*tensors(number)))


def test_what_no_loss_reads_of_a_class_makes_no_kind(tmp_path: Path) -> None:
    class Batch(Scaled):
        """Counts its objects in a dictionary."""

        seen: ClassVar[dict[str, int]] = {"objects": 0}
        log: ClassVar[list[object]] = [object()]

    def make(number: int) -> Any:
        Batch.log.append(object())
        return Batch(*tensors(number))

    model = nn.Linear(8, 8)
    trial = Trial(model, error, Batches(make), tmp_path)  # type: ignore[arg-type]
    with trial.compiled(model, torch.optim.AdamW(model.parameters()), None) as step:
        for number in range(2 * STEPS):
            step(make(number))
        assert len(list(step._units)) == 1
