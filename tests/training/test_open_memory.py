"""While a step is open: assigned data, views of older data and copies of the optimizer are as in plain torch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gascompile import compile_step
from gascompile.core.errors import OpenStepError
from tests.training.open_steps import (
    Trained,
    assert_same,
    forward,
    saved,
    trained_and_open,
    trained_in_torch,
)
from tests.training.runs import MACHINE, batches, plain_step

Touch = Callable[[Trained], Any]


def autocast(trained: Trained) -> Any:
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        return trained.weight @ trained.weight.t()


def swapped(trained: Trained) -> Any:
    """Evaluate with other weights, and put the trained ones back."""
    parameters = list(trained.model.parameters())
    view, product = trained.weight.data[3], trained.weight.detach().t()
    backup = [p.data for p in parameters]
    others = [torch.full(p.shape, 0.25) for p in parameters]
    for parameter, other in zip(parameters, others, strict=True):
        parameter.data = other
    between = view.clone(), product.sum(), backup[0].norm(), forward(trained)
    view.add_(1)
    for parameter, kept in zip(parameters, backup, strict=True):
        parameter.data = kept
    backup[0].mul_(2)
    return between, trained.weight.detach().clone(), view.clone(), others[0]


def exchanged(trained: Trained) -> Any:
    other = torch.full((256, 64), 0.125)
    trained.weight.data, other = other, trained.weight.data
    trained.weight.data[0].fill_(3)
    return other.clone(), trained.weight.detach().clone()


def both_norms(trained: Trained) -> tuple[Any, Any]:
    names = ("blocks.0.norm.weight", "blocks.0.other_norm.weight")
    first, second = (trained.model.get_parameter(name) for name in names)
    return first, second


def exchanged_twice(trained: Trained) -> Any:
    first, second = both_norms(trained)
    kept = first.data.clone()
    first.data = second.data.clone()
    second.data = kept
    return first.detach().clone(), second.detach().clone()


def copied_optimizer(optimizer: torch.optim.Optimizer) -> Any:
    return copy.deepcopy(optimizer).state_dict(), saved({"o": optimizer})["o"].state_dict()


ALIKE: dict[str, Touch] = {
    "copies of the optimizer": lambda t: copied_optimizer(t.optimizer),
    "type": lambda t: t.weight.type(),
    "autocast": autocast,
    "data and back": swapped,
    "data for its own": exchanged,
    "data of two": exchanged_twice,
    "its own data": lambda t: setattr(t.weight, "data", t.weight.data),
}
REFUSED: dict[str, Touch] = {
    "data for another": lambda t: setattr(torch.ones(256, 64), "data", t.weight.data),
    "parameter for another": lambda t: setattr(torch.ones(256, 64), "data", t.weight),
    "buffer for another": lambda t: setattr(torch.ones_like(t.mean.clone()), "data", t.mean),
    "data of another parameter": lambda t: setattr(both_norms(t)[0], "data", both_norms(t)[1].data),
    "data of a view": lambda t: setattr(t.weight.data, "data", torch.ones(256, 64)),
    "another parameter of it": lambda t: nn.Parameter(t.weight),
    "parametrization": lambda t: nn.utils.parametrizations.weight_norm(
        t.model.get_submodule("blocks.0.up")
    ),
}


@pytest.fixture
def plain() -> Trained:
    return trained_in_torch()


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Trained]:
    with trained_and_open(tmp_path) as trained:
        yield trained


def test_memory_is_as_in_plain_torch(opened: Trained, plain: Trained) -> None:
    for name, touch in ALIKE.items():
        assert_same(touch(opened), touch(plain), name)
        assert_same(opened.model.state_dict(), plain.model.state_dict(), name)
    assert opened.step is not None
    torch.manual_seed(6)
    loss = opened.step(batches(2)[1])
    torch.manual_seed(6)
    assert float(loss) == plain_step(plain.model, plain.optimizer, batches(2)[1])
    opened.step.close()
    assert_same(opened.model.state_dict(), plain.model.state_dict(), "closed")
    assert_same(copied_optimizer(opened.optimizer), copied_optimizer(plain.optimizer), "closed")


def test_memory_that_no_step_can_share_is_refused(opened: Trained) -> None:
    assert opened.step is not None
    before = opened.step.state_dict()
    for name, touch in REFUSED.items():
        with pytest.raises(OpenStepError, match="close"):
            touch(opened)
        assert_same(opened.step.state_dict(), before, name)
    opened.step(batches(1)[0])


def test_views_of_older_data_outlive_the_step(opened: Trained, plain: Trained) -> None:
    views = [(trained.weight.data, trained.mean[1:]) for trained in (opened, plain)]
    assert opened.step is not None
    opened.step.close()
    for trained, (view, mean) in zip((opened, plain), views, strict=True):
        trained.weight.data = torch.ones(256, 64)
        mean.add_(1)
        view[0] = 2
    assert_same(views[0], views[1], "views")
    assert_same(opened.model.state_dict(), plain.model.state_dict(), "model")
    with pytest.raises(OpenStepError, match="close"):
        opened.weight.data = views[0][0]
    assert_same(copied_optimizer(opened.optimizer), copied_optimizer(plain.optimizer), "closed")
    assert "__getstate__" not in vars(opened.optimizer)


def test_data_that_is_written_to_elsewhere_is_not_overlooked(opened: Trained) -> None:
    other = torch.ones(256, 64)
    opened.weight.data = other
    assert opened.step is not None
    opened.step(batches(1)[0])
    other.mul_(2)
    for ask in (opened.step, lambda _: opened.weight.norm()):
        with pytest.raises(OpenStepError, match="Assign it to the data again"):
            ask(batches(1)[0])
    opened.weight.data = other
    assert torch.equal(opened.weight.detach(), other)
    opened.step(batches(1)[0])


def test_data_of_tensors_that_share_memory_is_refused(tmp_path: Path) -> None:
    class Turned(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.register_buffer("turned", self.weight.data.t())

    model = Turned()
    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with compile_step(
        model,
        lambda model, batch: model(batch).mean(),
        optimizer,
        "64MiB",
        torch.ones(2, 4),
        machine=MACHINE,
        cache_dir=tmp_path,
    ):
        for name in ("weight", "turned"):
            with pytest.raises(OpenStepError, match="shares its memory"):
                getattr(model, name).data = torch.zeros(4, 4)
        assert torch.equal(model.weight.detach(), before)
