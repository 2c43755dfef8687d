"""What a planned step would leave out or get wrong is refused by name, and what changes a plan makes a new one."""

from __future__ import annotations

import copy
import pickle
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import gascompile
from gascompile.core.errors import CaptureError, ClosedStepError, OpenStepError, UnsupportedOpError
from gascompile.training.step import TrainingStep
from tests.training.trials import MACHINE

BATCH = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
Compiler = Callable[..., TrainingStep]


def square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    found = model(batch)
    value: torch.Tensor = (found[0] if isinstance(found, tuple) else found).pow(2).mean()
    return value


@pytest.fixture
def step_of(tmp_path: Path) -> Compiler:
    def compiled(model: nn.Module, optimizer: torch.optim.Optimizer) -> TrainingStep:
        return gascompile.compile_step(
            model, square, optimizer, "64MiB", BATCH, machine=MACHINE, cache_dir=tmp_path
        )

    return compiled


def linear() -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(8, 8)


def test_hooks_on_saved_tensors_are_refused_but_for_torchs_own(step_of: Compiler) -> None:
    hooks = torch.autograd.graph

    class Halving(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with hooks.saved_tensors_hooks(lambda t: t, lambda t: t / 2):
                return super().forward(x).sin()

    class OnCpu(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with hooks.save_on_cpu():
                return super().forward(x).sin()

    for kind in (Halving, OnCpu):
        model = kind(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        refusal = pytest.raises(UnsupportedOpError, match="forward sets hooks on saved tensors")
        with refusal if kind is Halving else nullcontext():
            step_of(model, optimizer).close()


def test_random_numbers_that_a_step_would_not_draw_so_are_refused(step_of: Compiler) -> None:
    class Draws(nn.Linear):
        generator: torch.Generator | None = torch.default_generator

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.generator is None:
                torch.manual_seed(1)
            return super().forward(x) * torch.rand(8, generator=self.generator)

    model = Draws(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UnsupportedOpError, match="leave generator= out"):
        step_of(model, optimizer)
    model.generator = None
    with pytest.raises(CaptureError, match="forward sets torch's random numbers to come"):
        step_of(model, optimizer)


def test_hooks_are_refused(step_of: Compiler) -> None:
    model = linear()
    handle = model.weight.register_hook(lambda gradient: gradient * 0)
    with pytest.raises(UnsupportedOpError, match="'weight' has a gradient hook"):
        step_of(model, torch.optim.SGD(model.parameters(), lr=0.1))
    handle.remove()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(UnsupportedOpError, match="step hooks"):
        step_of(model, optimizer)


def test_momentum_that_comes_later_is_refused(step_of: Compiler) -> None:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with step_of(model, optimizer) as step:
        step(BATCH)
        optimizer.param_groups[0]["momentum"] = 0.9
        with pytest.raises(UnsupportedOpError, match="groups"):
            step(BATCH)
        optimizer.param_groups[0]["momentum"] = 0.0
        step(BATCH)


def test_a_parameter_that_is_frozen_later_stays_what_it_is(step_of: Compiler) -> None:
    model = linear()
    with step_of(model, torch.optim.SGD(model.parameters(), lr=0.1)) as step:
        step(BATCH)
        before = step.state_dict()["model"]
        model.bias.requires_grad_(False)
        step(BATCH)
        after = step.state_dict()["model"]
    assert torch.equal(before["bias"], after["bias"])
    assert not torch.equal(before["weight"], after["weight"])


def test_a_second_step_over_an_open_model_is_refused(step_of: Compiler) -> None:
    model = linear()
    with step_of(model, torch.optim.SGD(model.parameters(), lr=0.1)) as step:
        step(BATCH)
        with pytest.raises(ValueError, match="belongs to another training step"):
            step_of(model, torch.optim.SGD(model.parameters(), lr=0.1))
        step(BATCH)
    with step_of(model, torch.optim.SGD(model.parameters(), lr=0.1)) as again:
        again(BATCH)


def test_a_closed_step_refuses_calls(step_of: Compiler, tmp_path: Path) -> None:
    model = linear()
    step = step_of(model, torch.optim.SGD(model.parameters(), lr=0.1))
    step(BATCH)
    step.close()
    step.close()
    values = copy.deepcopy(model.state_dict())
    for call in (
        lambda: step(BATCH),
        lambda: step.eval(BATCH),
        lambda: step.prepare(BATCH),
        lambda: step.save(tmp_path / "run"),
        lambda: step.load(tmp_path / "run"),
        step.state_dict,
        lambda: step.load_state_dict({}),
    ):
        with pytest.raises(ClosedStepError, match="compile a new step"):
            call()
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    with step_of(model, torch.optim.SGD(model.parameters(), lr=0.1)) as again:
        again(BATCH)


class _Twice(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {})) * (2 if func is torch.Tensor.pow else 1)


def test_a_step_within_what_no_plan_follows_is_refused_before_anything_changes(
    step_of: Compiler,
) -> None:
    model = linear()
    with step_of(model, torch.optim.SGD(model.parameters(), lr=0.1)) as step:
        step(BATCH)
        before = step.state_dict()["model"]
        for around, named in ((torch.inference_mode, "inference_mode"), (_Twice, "mode _Twice")):
            with around(), pytest.raises(UnsupportedOpError, match=f"{named}.* is active"):
                step(BATCH)
        torch.testing.assert_close(step.state_dict()["model"], before, rtol=0, atol=0)
        with torch.inference_mode():
            found = step.eval(BATCH)
        assert torch.equal(found, step.eval(BATCH))
        step(BATCH)


def test_what_is_set_on_a_parameter_is_part_of_the_loss(tmp_path: Path) -> None:
    def scaled(model: Any, batch: torch.Tensor) -> torch.Tensor:
        return square(model, batch) * getattr(model.weight, "scale", 1.0)

    model, plain = linear(), linear()
    options: dict[str, Any] = {"machine": MACHINE, "cache_dir": tmp_path}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gascompile.compile_step(model, scaled, optimizer, "64MiB", BATCH, **options) as step:
        for scale in (1.0, 3.0, 5.0):
            if scale > 1:
                vars(plain.weight)["scale"] = vars(model.weight)["scale"] = scale
            wanted = scaled(plain, BATCH)
            gradients = torch.autograd.grad(wanted, [*plain.parameters()])
            with torch.no_grad():
                torch._foreach_add_([*plain.parameters()], gradients, alpha=-0.1)
            torch.testing.assert_close(step(BATCH), wanted.detach())
    torch.testing.assert_close(model.state_dict(), plain.state_dict())


def test_steps_from_several_threads_take_turns(step_of: Compiler) -> None:
    model, plain = linear(), linear()
    options: dict[str, Any] = {"lr": 0.01, "momentum": 0.9, "fused": True}
    optimizer, plain_optimizer = (
        torch.optim.SGD(m.parameters(), **options) for m in (model, plain)
    )
    with step_of(model, optimizer) as step, ThreadPoolExecutor(3) as pool:
        found = [float(loss) for loss in pool.map(step, [BATCH] * 30)]
    wanted = []
    for _ in range(30):
        plain_optimizer.zero_grad()
        loss = square(plain, BATCH)
        loss.backward()
        plain_optimizer.step()
        wanted.append(float(loss.detach()))
    assert sorted(found) == sorted(wanted)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=0)


def test_who_reads_on_another_thread_waits_for_the_step(step_of: Compiler) -> None:
    model, begun = linear(), threading.Event()
    done: list[bool] = []

    def reads() -> tuple[torch.Tensor, bool]:
        begun.set()
        return model.weight.detach().clone(), bool(done)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with step_of(model, optimizer) as step, ThreadPoolExecutor(1) as pool:
        step(BATCH)

        def within() -> Future[tuple[torch.Tensor, bool]]:
            reading = pool.submit(reads)
            begun.wait()
            time.sleep(0.05)  # in which one that does not wait is over
            step(BATCH)
            done.append(True)
            return reading

        value, was_done = step._turn.take(within).result()
        assert was_done and torch.equal(value, step.state_dict()["model"]["weight"])


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_steps_are_not_copied(step_of: Compiler, copied: Callable[[Any], Any]) -> None:
    model = linear()
    with step_of(model, torch.optim.SGD(model.parameters(), lr=0.1)) as step:
        step(BATCH)
        with pytest.raises(OpenStepError, match="cannot be copied or pickled"):
            copied(step)
        assert copied(model)
        step(BATCH)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_have_no_sizes_to_plan_for(tmp_path: Path) -> None:
    model = linear()
    nested = torch.nested.nested_tensor([torch.ones(2, 8), torch.ones(3, 8)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UnsupportedOpError, match="to_padded_tensor"):
        gascompile.compile_step(
            model,
            lambda m, b: m(b.to_padded_tensor(0.0)).mean(),
            optimizer,
            "64MiB",
            nested,
            machine=MACHINE,
            cache_dir=tmp_path,
        )


@pytest.mark.parametrize("part", [slice(None), slice(None, None, 2)])
def test_a_loss_that_changes_its_batch_is_refused(part: slice, tmp_path: Path) -> None:
    def changes(model: nn.Module, batch: Any) -> torch.Tensor:
        batch[0].mul_(2)
        loss: torch.Tensor = model(batch[0]).mean() + batch[1].mean()
        return loss

    model, x = nn.Linear(8, 2), BATCH.clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(CaptureError, match=r"in place.*let it change a clone"):
        gascompile.compile_step(
            model, changes, optimizer, "64MiB", (x, x[:, part]), machine=MACHINE, cache_dir=tmp_path
        )
    assert torch.equal(x, BATCH)
