"""Memory of parameters that others have, too: it stays readable while a step is open, and is the model's after."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gascompile import compile_step
from gascompile.core.sizes import SPILL_BUFFER_BYTES

WIDTH, LAYERS = 256, 12
BUDGET = 1_300_000 + 4 * SPILL_BUFFER_BYTES
"""In which a fraction of the weights of 3 MiB, of their momenta and of an update fits."""


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def batch(number: int, rows: int = 4) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(number))


def square(model: nn.Module, given: torch.Tensor) -> torch.Tensor:
    value: torch.Tensor = model(given).square().mean()
    return value


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def trained(model: nn.Module, loss_fn: Any, batches: list[torch.Tensor]) -> list[torch.Tensor]:
    optimizer, losses = sgd(model), []
    for given in batches:
        optimizer.zero_grad()
        losses.append(loss_fn(model, given))
        losses[-1].backward()
        optimizer.step()
    return [loss.detach() for loss in losses]


def opened(model: nn.Module, loss_fn: Any, folder: Path) -> Any:
    return compile_step(model, loss_fn, sgd(model), BUDGET, machine="cpu-nvme", cache_dir=folder)


def states_of(model: nn.Module) -> Any:
    return model.state_dict()


def flat(model: nn.Module) -> Any:
    return [weight.detach().view(-1)[5:] for weight in model.parameters()]


def datas(model: nn.Module) -> Any:
    return [weight.data for weight in model.parameters()]


def arrays(model: nn.Module) -> Any:
    return [weight.detach().numpy() for weight in model.parameters()]


def graph(model: nn.Module) -> Any:
    return square(model, batch(9))


def values_of(held: Any) -> list[torch.Tensor]:
    if isinstance(held, torch.Tensor):
        return [held.detach()]
    return [torch.as_tensor(value) for value in (held.values() if isinstance(held, dict) else held)]


@pytest.mark.parametrize("hold", [states_of, flat, datas, arrays, graph])
def test_what_others_have_keeps_its_values_until_the_step_is_closed(
    hold: Callable[[nn.Module], Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, twin = network(), network()
    batches = [batch(number) for number in range(3)]
    expected = trained(twin, square, batches)
    held = hold(model)
    before = [value.clone() for value in values_of(held)]
    with caplog.at_level(logging.WARNING), opened(model, square, tmp_path) as step:
        losses = [step(given).detach() for given in batches]
        assert all(map(torch.equal, values_of(held), before))
    assert "others have the memory of" in caplog.text
    assert losses == expected
    assert all(map(torch.equal, model.parameters(), twin.parameters()))
    if hold is not graph:
        assert all(map(torch.equal, values_of(held), values_of(hold(twin))))
        next(iter(model.parameters())).data.fill_(3.0)
        assert values_of(held)[0].eq(3.0).all()


def test_nobody_is_told_of_memory_that_no_other_has(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = network()
    cycle: list[Any] = [model.state_dict()]
    cycle.append(cycle)
    del cycle
    with caplog.at_level(logging.WARNING), opened(model, square, tmp_path) as step:
        step(batch(0))
    assert "others have the memory" not in caplog.text


def test_views_in_a_loss_follow_in_all_kinds_of_batches(tmp_path: Path) -> None:
    model, twin = network(), network()

    def of(model: nn.Module) -> Any:
        view = model[3].weight.detach()[:, 7]  # type: ignore[index]
        return lambda model, given: square(model, given) + (view * model[0].bias).sum()

    batches = [batch(number, rows) for number, rows in enumerate((4, 6, 4, 6))]
    expected = trained(twin, of(twin), batches)
    with opened(model, of(model), tmp_path) as step:
        losses = [step(given).detach() for given in batches]
    assert losses == expected
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


def test_views_among_parameters_are_views_again(tmp_path: Path) -> None:
    model: Any = network()
    model.register_buffer("part", model[2].weight.detach()[4:9])
    twin = copy.deepcopy(model)
    held = model.state_dict()
    expected = trained(twin, square, [batch(0)])
    with opened(model, square, tmp_path) as step:
        assert [step(batch(0)).detach()] == expected
    assert (
        model.part.data_ptr() == held["2.weight"][4:].data_ptr() == model[2].weight[4:].data_ptr()
    )
    assert torch.equal(held["2.weight"], twin[2].weight)
