"""Whatever a loop does between its steps, it gets eager's bits, or an error that says what to do instead.

A run takes a sample of the cases and fewer steps; ``GASCOMPILE_LOOPS=all`` takes all of them, 20 steps each.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gascompile.core.errors import GASCompileError
from tests.training.loops import Case, Loop, eager, planned

ALL = os.environ.get("GASCOMPILE_LOOPS") == "all"
UNPLANNED = {"unplanned_optimizer": True}


class Branches(nn.Module):
    """A trunk and two heads, of which a batch uses those that it names."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(8, 16), nn.Tanh())
        self.heads = nn.ModuleList(nn.Linear(16, 4) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor, heads: tuple[int, ...] = (0, 1)) -> torch.Tensor:
        hidden = self.trunk(x)
        total: torch.Tensor = sum((self.heads[i](hidden) for i in heads), torch.zeros(4))
        return total * self.scale


def batch(number: int) -> torch.Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(number))


def square(model: nn.Module, batch: Any) -> torch.Tensor:
    value: torch.Tensor = model(batch).pow(2).mean()
    return value


def of_heads(model: nn.Module, batch: tuple[torch.Tensor, tuple[int, ...]]) -> torch.Tensor:
    value: torch.Tensor = model(*batch).pow(2).mean()
    return value


def in_turn(number: int) -> tuple[torch.Tensor, tuple[int, ...]]:
    return batch(number), ((0, 1), (0,), (1,))[number % 3]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, weight_decay=0.1)


def rmsprop(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.9, weight_decay=0.1)


def freezing(first: int, last: int) -> Callable[[Loop, int], None]:
    """Return a change that freezes a head from one step to another."""

    def change(loop: Loop, number: int) -> None:
        for parameter in loop.model.get_submodule("heads.1").parameters():
            parameter.requires_grad_(not first <= number < last)

    return change


def grouped(**changes: Callable[[int], Any]) -> Callable[[Loop, int], None]:
    """Return a change of options in the optimizer's groups."""

    def change(loop: Loop, number: int) -> None:
        for group in loop.optimizer.param_groups:
            group.update({key: value(number) for key, value in changes.items()})

    return change


class Deep(nn.Module):
    """Layers that the loss, or chance, leaves out; what Python decides is in attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.dropout = nn.Dropout(0.1)
        self.norm = nn.BatchNorm1d(8)
        self.num_layers, self.calls, self.draws = 3, 0, ""
        self.register_buffer("strength", torch.zeros(()))
        self.strength: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[: self.num_layers]:
            kept = self._kept(x)
            x = x + torch.tanh(layer(self.dropout(x))) * kept
        return torch.as_tensor(self.norm(x)) * (1 + self.strength)

    def _kept(self, x: torch.Tensor) -> Any:
        match self.draws:
            case "python":
                return float(random.random() < 0.5)
            case "torch":
                return (torch.rand(len(x), 1) < 0.5).to(x.dtype)
            case "count":
                self.calls += 1
                return 1 / self.calls
        return 1.0


class DeepByNumPy(Deep):
    """Leaves layers out by a generator of NumPy's."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.default_rng(0)

    def _kept(self, x: torch.Tensor) -> float:
        return float(self.generator.random() < 0.5) + 0 * len(x)


class Shared(nn.Module):
    """A layer that is used three times over."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = torch.tanh(self.layer(x))
        return torch.as_tensor(self.out(x))


class Pair(nn.Module):
    """A generator and a critic, of which a batch trains one."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.critic = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def of_pair(model: nn.Module, batch: tuple[torch.Tensor, str]) -> torch.Tensor:
    made = model.get_submodule("generator")(batch[0])
    critic = model.get_submodule("critic")
    if batch[1] == "critic":
        value: torch.Tensor = critic(made.detach()).mean() - critic(batch[0]).mean()
        return value
    frozen = {name: p.detach() for name, p in critic.named_parameters()}
    found: torch.Tensor = -torch.func.functional_call(critic, frozen, made).mean()
    return found


def drawing(kind: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = Deep()
        model.draws = kind
        return model

    return make


def set_on_model(name: str, value: Callable[[int], Any]) -> Callable[[Loop, int], None]:
    """Return a change of an attribute within the model."""
    where, _, leaf = name.rpartition(".")

    def change(loop: Loop, number: int) -> None:
        setattr(loop.model.get_submodule(where), leaf, value(number))

    return change


def average(loop: Loop, number: int) -> None:
    """Keep an average of the weights, and go back to it in the end."""
    if not number:
        loop.kept["average"] = torch.optim.swa_utils.AveragedModel(
            loop.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
    loop.kept["average"].update_parameters(loop.model)
    if number == 8:
        loop.model.load_state_dict(loop.kept["average"].module.state_dict())


def clamp(loop: Loop, _: int) -> None:
    for parameter in loop.model.parameters():
        parameter.data.clamp_(-0.2, 0.2)


def warm(loop: Loop, number: int) -> None:
    loop.model.get_buffer("strength").fill_(number / 10)


def renewed(loop: Loop, number: int) -> None:
    if number == 5:
        with torch.no_grad():
            nn.init.normal_(loop.model.get_parameter("heads.0.weight"))
        state = loop.optimizer.state_dict()
        for entry in state["state"].values():
            entry["exp_avg"].zero_()
        loop.optimizer.load_state_dict(state)


def outside_of_it(loop: Loop, _: int) -> None:
    loss = sum(p.pow(2).sum() for p in loop.model.parameters())
    assert isinstance(loss, torch.Tensor)
    loss.backward()


def in_bf16(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        value: torch.Tensor = model(batch).float().pow(2).mean()
    return value


class Weighted:
    """A loss with a weight that Python knows."""

    weight = 1.0

    def __call__(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return square(model, batch) * self.weight


weighted = Weighted()


def set_weight(value: Callable[[int], float]) -> Callable[[Loop, int], None]:
    def change(_: Loop, number: int) -> None:
        weighted.weight = value(number)

    return change


def two_optimizers(loop: Loop, number: int) -> None:
    other = loop.kept.setdefault(
        "rest", torch.optim.SGD(loop.model.get_submodule("heads").parameters(), lr=0.1)
    )
    if number:
        other.step()


def of_trunk(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.get_submodule("trunk").parameters(), lr=1e-2, fused=True)


def one_more_group(loop: Loop, number: int) -> None:
    if number == 3:
        loop.optimizer.add_param_group({"params": loop.model.get_submodule("heads").parameters()})


def case(name: str, **options: Any) -> Case:
    fields: dict[str, Any] = {
        "model": Branches,
        "loss_fn": square,
        "batches": batch,
        "optimizer": adamw,
    }
    return Case(name, **{**fields, **options})


CASES = [
    case("frozen during the run, AdamW", change=freezing(3, 9)),
    case("frozen during the run, momentum", change=freezing(3, 9), optimizer=sgd),
    case(
        "frozen during the run, RMSprop",
        change=freezing(3, 9),
        optimizer=rmsprop,
        options=UNPLANNED,
    ),
    case("unfrozen later, AdamW", change=freezing(0, 5)),
    case("unfrozen later, momentum", change=freezing(0, 5), optimizer=sgd),
    case("unfrozen later, RMSprop", change=freezing(0, 5), optimizer=rmsprop, options=UNPLANNED),
    case("partial batches, AdamW", loss_fn=of_heads, batches=in_turn),
    case("partial batches, momentum", loss_fn=of_heads, batches=in_turn, optimizer=sgd),
    case(
        "partial batches, RMSprop",
        loss_fn=of_heads,
        batches=in_turn,
        optimizer=rmsprop,
        options=UNPLANNED,
    ),
    case(
        "partial batches, summed and clipped",
        loss_fn=of_heads,
        batches=in_turn,
        options={"accumulate": 2, "max_grad_norm": 0.1},
    ),
    case(
        "partial batches, summed for RMSprop",
        loss_fn=of_heads,
        batches=in_turn,
        optimizer=rmsprop,
        options={"accumulate": 2, **UNPLANNED},
    ),
    case(
        "annealed betas, eps, decay and rate",
        change=grouped(
            betas=lambda n: (0.8 + n / 200, 0.9 + n / 250),
            eps=lambda n: 1e-8 * (n + 1),
            weight_decay=lambda n: n / 100,
            lr=lambda n: 0.01 / (n + 1),
        ),
    ),
    case(
        "annealed momentum and dampening",
        optimizer=sgd,
        change=grouped(momentum=lambda n: 0.5 + n / 50, dampening=lambda n: n / 100),
    ),
    case(
        "maximised every other step", optimizer=sgd, change=grouped(maximize=lambda n: n % 2 == 1)
    ),
    case(
        "dropout annealed in four stages",
        model=Deep,
        change=set_on_model("dropout.p", lambda n: n // 5 / 10),
    ),
    case(
        "dropout annealed at each step",
        model=Deep,
        change=set_on_model("dropout.p", lambda n: n / 100),
        refused="in a buffer of the model, or pass it in the batch",
        num_steps=20,
    ),
    case(
        "depth changed and changed back",
        model=Deep,
        change=set_on_model("num_layers", lambda n: 2 + n % 2),
    ),
    case("a strength in a buffer", model=Deep, change=warm),
    case("depth by torch.rand", model=drawing("torch")),
    case("depth by random", model=drawing("python"), refused="draw by torch.rand"),
    case("depth by NumPy", model=DeepByNumPy, refused="draw by torch.rand"),
    case("a count of calls", model=drawing("count"), refused="keep what changes in a buffer"),
    case(
        "the loss's weight in two stages",
        loss_fn=weighted,
        change=set_weight(lambda n: 1.0 + n // 6),
    ),
    case(
        "the loss's weight at each step",
        loss_fn=weighted,
        change=set_weight(lambda n: 1.0 + n),
        refused="pass it in the batch as a tensor",
        num_steps=20,
    ),
    case("an average that is taken back", model=Deep, change=average),
    case("weights clamped", change=clamp),
    case("a layer and its moments begun anew", change=renewed),
    case(
        "a generator and a critic",
        model=Pair,
        loss_fn=of_pair,
        batches=lambda n: (batch(n), ("critic", "generator")[n % 2]),
    ),
    case("a layer used often under autocast", model=Shared, loss_fn=in_bf16),
    case("gradients from outside", change=outside_of_it, refused="put what it is of into loss_fn"),
    case(
        "a second optimizer",
        optimizer=of_trunk,
        change=two_optimizers,
        refused="groups of one optimizer",
    ),
    case(
        "a group added",
        optimizer=of_trunk,
        change=one_more_group,
        refused="close the step and compile a new one",
    ),
]
SAMPLE = CASES if ALL else CASES[::4]


@pytest.mark.parametrize("case", SAMPLE, ids=[case.name for case in SAMPLE])
def test_a_loop_is_eager_or_refused(case: Case, tmp_path: Path) -> None:
    if not ALL and not case.refused:
        case = replace(case, num_steps=10)
    if case.refused:
        with pytest.raises(GASCompileError, match=case.refused):
            planned(case, tmp_path)
        return
    found, wanted = planned(case, tmp_path), eager(case)
    for number, (ours, theirs) in enumerate(zip(found.losses, wanted.losses, strict=True)):
        assert torch.equal(ours, theirs), f"loss {number}: {ours} and {theirs}"
    assert found.values.keys() == wanted.values.keys()
    for name, value in wanted.values.items():
        assert torch.equal(found.values[name], value), name
