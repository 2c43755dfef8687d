"""Measured costs of ops reach the plan, are remembered, and are had within little memory."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from gascompile import compile_step
from gascompile.codegen.allocator_library import page_memory
from gascompile.codegen.build import has_compiler
from gascompile.core.machine import Machine
from gascompile.machines.resolve import resolve_machine, this_machine_name
from gascompile.runtime.transfer.engine import read_blocks
from gascompile.training.planning import step_costs as costs
from gascompile.training.step import TrainingStep
from tests.training.runs import PLANNING_S
from tests.training.trials import MACHINE, adamw

_BUDGET = 64 << 20
_library = torch.library.Library("gascompile_test_costs", "FRAGMENT")


def _backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
    return gradient * 2


def _define() -> None:
    """Define an op that takes three times its operand for itself, and counts its calls."""
    if hasattr(torch.ops.gascompile_test_costs, "hungry"):
        return
    _library.define("hungry(Tensor x) -> Tensor")

    def hungry(x: torch.Tensor) -> torch.Tensor:
        if not isinstance(x, torch._subclasses.FakeTensor):
            CALLS.append(x.numel())
            for error in REFUSE:
                raise error("made-up values")
        scratch = x.new_empty((3 * x.numel(),))
        scratch[0] = 1.0
        return x * 2

    _library.impl("hungry", hungry, "CPU")
    _library.impl("hungry", torch.empty_like, "Meta")

    torch.library.register_autograd("gascompile_test_costs::hungry", _backward, lib=_library)


CALLS: list[int] = []
REFUSE: list[type[Exception]] = []
"""What the op raises."""


class Hungry(nn.Module):
    """Layers with the op between them."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.ops.gascompile_test_costs.hungry(functional.gelu(layer(x)))
        return x


@pytest.fixture(autouse=True)
def _set_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    _define()
    CALLS.clear()
    monkeypatch.setattr(costs, "_WORTH_S", 0.0)
    yield
    CALLS.clear()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    found = resolve_machine(MACHINE, cache_dir=tmp_path, read=read_blocks)
    return replace(found, name=this_machine_name())


BATCH = torch.randn(512, 128, generator=torch.Generator().manual_seed(0))
OPERAND_BYTES = BATCH.nbytes


def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch).pow(2).mean()
    return loss


def compiled(machine: Machine, cache: Path, depth: int = 8) -> TrainingStep:
    torch.manual_seed(0)
    model = Hungry(depth)
    return compile_step(
        model,
        loss_fn,
        adamw(model),
        _BUDGET,
        BATCH,
        machine=machine,
        cache_dir=cache,
        time_limit_s=PLANNING_S,
    )


@pytest.mark.skipif(not has_compiler(), reason="scratch is seen in page memory")
def test_scratch_is_planned_for_and_kinds_are_run_a_few_times(
    machine: Machine, tmp_path: Path
) -> None:
    with compiled(machine, tmp_path) as step:
        assert step.plan is not None
        hungry = [op for op in step.plan.workload.ops if "hungry" in op.name]
        assert len(hungry) == 8
        assert {op.workspace_bytes for op in hungry} == {3 * OPERAND_BYTES}
        assert len({op.time_s["cpu"] for op in hungry}) == 1
        assert [BATCH.numel()] * 4 == CALLS


def test_a_second_plan_measures_nothing(machine: Machine, tmp_path: Path) -> None:
    with compiled(machine, tmp_path) as step:
        assert step.plan is not None
        first = step.plan.workload
    CALLS.clear()
    with compiled(machine, tmp_path) as step:
        assert step.plan is not None
        assert step.plan.workload == first
    assert CALLS == []


def test_figures_of_a_damaged_file_are_measured_again(
    machine: Machine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compiled(machine, tmp_path).close()
    (path,) = tmp_path.rglob("*.steps.json")
    path.write_text(path.read_text()[:100])
    # The plan that is kept asks for no figures.
    shutil.rmtree(tmp_path / "plans")
    CALLS.clear()
    compiled(machine, tmp_path).close()
    assert "damaged" in caplog.text
    assert len(CALLS) == 4
    assert json.loads(path.read_text())["costs"]


def test_another_machine_is_planned_for_by_its_file(machine: Machine, tmp_path: Path) -> None:
    compiled(replace(machine, name="another"), tmp_path).close()
    assert CALLS == []
    assert not list(tmp_path.rglob("*.steps.json"))


def test_random_numbers_and_results_are_as_if_nothing_had_been_measured(
    machine: Machine, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    wanted = Hungry(8)
    with compiled(machine, tmp_path) as step:
        state = torch.get_rng_state()
        found = [float(step(BATCH)) for _ in range(3)]
    theirs = adamw(wanted)
    for loss in found:
        theirs.zero_grad()
        value = loss_fn(wanted, BATCH)
        value.backward()
        theirs.step()
        assert value.item() == loss
    torch.manual_seed(0)
    Hungry(8)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("error", [AssertionError, KeyError, TypeError, ZeroDivisionError])
def test_ops_that_refuse_made_up_values_are_planned_by_formulas(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "REFUSE", [error])
    with compiled(machine, tmp_path) as step:
        monkeypatch.setattr(sys.modules[__name__], "REFUSE", [])
        assert step(BATCH).isfinite()
    (path,) = tmp_path.rglob("*.steps.json")
    kinds = json.loads(path.read_text())["costs"]
    assert kinds
    assert not any("hungry" in kind for kind in kinds)


def test_a_loss_that_is_nan_for_made_up_values_alone_is_planned(
    machine: Machine, tmp_path: Path
) -> None:
    model = nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 20))
    tokens = torch.randint(1, 20, (4, 9))

    def padded(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        # Made-up tokens are all zeros, which leaves none to take a mean of.
        return functional.cross_entropy(
            model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten(), ignore_index=0
        )

    wanted = padded(model, tokens).detach()
    with compile_step(
        model, padded, adamw(model), _BUDGET, tokens, machine=machine, cache_dir=tmp_path
    ) as step:
        assert torch.equal(step(tokens), wanted)


@pytest.mark.skipif(not has_compiler(), reason="needs a C++ compiler")
def test_made_up_values_keep_to_a_third_of_the_room(machine: Machine, tmp_path: Path) -> None:
    pages = page_memory(tmp_path, _BUDGET)
    assert pages is not None
    room_bytes = 12 * OPERAND_BYTES
    with compiled(replace(machine, name="another"), tmp_path, depth=16) as step:
        (unit,) = step._units
        pages.trim()
        pages.mark()
        before = pages.live_bytes
        found = costs.step_costs(
            unit.program.program,
            unit.plan.workload,
            machine,
            cache_dir=tmp_path,
            room_bytes=room_bytes,
            pages=pages,
        )
        assert len(found) > 0.9 * len(unit.plan.workload.ops)
    # The hungriest op has its operand, its result and its scratch beside what is kept.
    assert pages.peak_bytes - before <= room_bytes // 3 + 5 * OPERAND_BYTES


def test_a_users_own_op_is_not_run_on_made_up_values(machine: Machine, tmp_path: Path) -> None:
    library = torch.library.Library("users_own_ops", "FRAGMENT")
    library.define("twice(Tensor x) -> Tensor")
    seen: list[torch.Tensor] = []

    def twice(x: torch.Tensor) -> torch.Tensor:
        seen.append(x)
        return x * 2

    library.impl("twice", twice, "CPU")
    library.impl("twice", torch.empty_like, "Meta")
    torch.library.register_autograd(
        "users_own_ops::twice", lambda context, gradient: gradient * 2, lib=library
    )
    model = nn.Linear(128, 128)
    with compile_step(
        model,
        lambda model, batch: torch.ops.users_own_ops.twice(model(batch)).pow(2).mean(),
        adamw(model),
        _BUDGET,
        BATCH,
        machine=machine,
        cache_dir=tmp_path,
        time_limit_s=PLANNING_S,
    ) as step:
        assert seen == []
        assert list(tmp_path.rglob("*.steps.json"))
        step(BATCH)
        assert len(seen) == 1
