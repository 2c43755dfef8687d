"""Updates by an optimizer's own class: torch's bits, range by range, whatever the layout and the options."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import fx
from transformers.optimization import Adafactor as TransformersAdafactor

from gascompile.core.errors import UnsupportedOpError
from gascompile.training.compile_step import compile_step
from gascompile.training.optimizers import (
    class_updates,
    known_classes,
    optimizers,
    rule_trials,
    update_ops,
)
from gascompile.training.optimizers.optimizers import Rules, require_rule
from tests.allocator import peak_growth_bytes

Make = Callable[[list[Any]], torch.optim.Optimizer]
o = torch.optim
_KINDS: dict[str, tuple[type, dict[str, Any]]] = {
    "adam": (o.Adam, {"amsgrad": True, "fused": True, "weight_decay": 0.1, "maximize": True}),
    "adamw": (o.AdamW, {"amsgrad": True, "fused": True}),
    "rmsprop": (o.RMSprop, {"lr": torch.tensor(0.01)}),
    "rmsprop, all": (
        o.RMSprop, {"momentum": 0.9, "centered": True, "weight_decay": 0.1, "maximize": True},
    ),
    "nadam": (o.NAdam, {"weight_decay": 0.1}),
    "nadamw": (o.NAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True, "maximize": True}),
    "radam": (o.RAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    "adagrad": (o.Adagrad, {"lr_decay": 0.1, "initial_accumulator_value": 0.1}),
    "adamax": (o.Adamax, {"weight_decay": 0.1}),
    "adadelta": (o.Adadelta, {"weight_decay": 0.1}),
    "muon": (o.Muon, {}),
    "muon, plain": (o.Muon, {"nesterov": False, "adjust_lr_fn": "match_rms_adamw", "ns_steps": 3}),
    "adafactor": (o.Adafactor, {"weight_decay": 0.1}),
    "adafactor, up": (o.Adafactor, {"maximize": True, "eps": (1e-7, 1e-2), "d": 1.5}),
    "transformers": (TransformersAdafactor, {"lr": None, "beta1": 0.9}),
    "transformers, set": (
        TransformersAdafactor,
        {"scale_parameter": False, "relative_step": False, "weight_decay": 0.1},
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers, "_TILE_BYTES", 8192)
    monkeypatch.setattr(update_ops, "PIECE", 1024)


def _made(kind: str, parameters: list[Any]) -> torch.optim.Optimizer:
    make, options = _KINDS[kind]
    made: torch.optim.Optimizer = make(parameters, **{"lr": 0.01, **options})
    return made


class _ByOps:
    """One parameter that the ops of a rule update, as a plan does."""

    def __init__(self, optimizer: torch.optim.Optimizer, scaled: bool) -> None:
        self.optimizer, self.count = optimizer, 0
        (self.parameter,) = optimizer.param_groups[0]["params"]
        self.rules = Rules(optimizer, {id(self.parameter): "p"}, ["p"])
        slot = self.rules.slots["p"]
        self.tiles = {tile.name: torch.zeros(tile.length) for t in slot.tiles for tile in t}
        graph = fx.Graph()
        nodes = [graph.placeholder(name) for name in ("p", "gradient", "hyper")]
        scale = graph.placeholder("scale") if scaled else None
        moments = {
            name: graph.placeholder(f"tile_{number}") for number, name in enumerate(self.tiles)
        }
        self.rules.insert(graph, slot, nodes, moments, scale)
        graph.output(None)
        self.scaled, self.module = scaled, fx.GraphModule({}, graph)

    def step(self, gradient: torch.Tensor) -> None:
        hyper = self.rules.hyper(0, {"p": self.count}, self.count + 1)
        scale = [torch.tensor(0.5)] if self.scaled else []
        self.module(self.parameter.detach(), gradient, hyper, *scale, *self.tiles.values())
        self.count += 1


def _gradients(shape: tuple[int, ...], count: int) -> Iterator[torch.Tensor]:
    for _ in range(count):
        yield torch.randn(shape)


@pytest.mark.parametrize("kind", _KINDS)
def test_ten_updates_have_the_bits_of_torch(kind: str) -> None:
    """With a rate that changes, a gradient that lies otherwise, and pieces and ranges of a parameter."""
    shapes: list[tuple[int, ...]] = [(37, 77)] if "muon" in kind else [(37, 77), (2500,), (5, 7, 6)]
    for shape in shapes:
        for turned, scaled in ((False, False), (True, True)):
            torch.manual_seed(3)
            start = torch.randn(shape)
            eager = torch.nn.Parameter(start.clone())
            theirs = _made(kind, [eager])
            ours = _ByOps(_made(kind, [torch.nn.Parameter(start.clone())]), scaled)
            for number, gradient in enumerate(_gradients(shape, 10)):
                for optimizer in (theirs, ours.optimizer):
                    if number == 5 and optimizer.param_groups[0]["lr"] is not None:
                        optimizer.param_groups[0]["lr"] = 0.003
                eager.grad = gradient * 0.5 if scaled else gradient.clone()
                theirs.step()
                lies = gradient.permute(*reversed(range(len(shape)))).contiguous()
                ours.step(lies.permute(*reversed(range(len(shape)))) if turned else gradient)
                assert torch.equal(ours.parameter, eager), (number, shape, turned)


@pytest.mark.parametrize("kind", _KINDS)
def test_updates_allocate_what_is_planned(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the first one, in which classes make their states."""
    monkeypatch.undo()
    others: list[tuple[int, ...]] = [(70000,), (64, 32, 3, 3)]
    others = [(500, 300), (96, 48)] if "muon" in kind else others
    for shape in ((300, 500), (7, 33000), *others):
        for scaled in (False, True):
            ours = _ByOps(_made(kind, [torch.nn.Parameter(torch.randn(shape))]), scaled)
            turned = torch.randn(shape[::-1]).permute(*reversed(range(len(shape))))
            for gradient in (torch.randn(shape), turned):
                ours.count = 0
                (node, *_) = (n for n in ours.module.graph.nodes if n.op == "call_function")
                begin, end, _ = node.args[-3:]
                planned = class_updates.workspace_bytes(
                    class_updates.RULE_OF[node.target],
                    ours.parameter,
                    gradient,
                    end - begin,
                    scaled=scaled,
                )
                for _ in range(2):
                    assert peak_growth_bytes(partial(ours.step, gradient)) <= planned


def test_a_class_that_differs_from_its_rule_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = _made("nadam", [torch.nn.Parameter(torch.ones(3))])
    optimizer.defaults["cautious"] = True
    with pytest.raises(UnsupportedOpError, match="the NAdam has the option 'cautious'"):
        require_rule(optimizer)
    monkeypatch.setattr(rule_trials, "_done", set())
    (nadam,) = (rule for rule in known_classes.RULES if rule.kind == "NAdam")
    for rule in (
        replace(nadam, keys=lambda _: ("exp_avg", "exp_avg_sq")),
        replace(nadam, lies={}),
        replace(nadam, counts=False),
    ):
        other = _made("nadam", [torch.nn.Parameter(torch.ones(3))])
        with pytest.raises(UnsupportedOpError, match=r"keeps .*mu_product.*unplanned_optimizer"):
            rule_trials.require_followed(rule, other)


def test_what_no_rule_is_for_is_refused() -> None:
    parameter = torch.nn.Parameter(torch.ones(2, 3))

    class Own(o.RMSprop):
        pass

    for make, said in (
        (Own, "no update rule for Own; use one of .*RMSprop.*Muon.*or pass unplanned_optimizer"),
        (o.ASGD, "no update rule for ASGD"),
    ):
        with pytest.raises(UnsupportedOpError, match=said):
            require_rule(make([parameter]))
    with pytest.raises(UnsupportedOpError, match="differentiable=True"):
        require_rule(o.NAdam([parameter], differentiable=True))
    with pytest.raises(UnsupportedOpError, match="states='8bit' is of AdamW, Adam and SGD"):
        require_rule(o.AdamW([parameter], amsgrad=True), "8bit")


def test_arguments_in_another_order_are_named() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = o.SGD(model.parameters())

    def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = model(batch).sum()
        return total

    step: Any = compile_step
    for given, said in (
        ((model, optimizer, loss), "a SGD was given as loss_fn; the order is"),
        ((loss, model, optimizer), "a function was given as model"),
        ((model, loss, model), "a Linear was given as optimizer"),
        ((model, loss, torch.optim.SGD), "a class SGD was given as optimizer; .* that is made"),
        ((model, loss, [optimizer]), "a list was given as optimizer; .* one optimizer"),
    ):
        with pytest.raises(UnsupportedOpError, match=said):
            step(*given, "1MiB")
