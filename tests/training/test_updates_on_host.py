"""Updates on the host beside a device: eager's results, moments that never cross, and what goes wrong half way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gascompile import TrainingStep, compile_step
from gascompile.core.budget import Budget
from gascompile.core.machine import Machine
from gascompile.core.plan import Plan
from gascompile.core.steps import Offload, Reload
from gascompile.core.workload import TensorKind
from gascompile.cost_models.simulate.replay import replay_plan
from gascompile.cost_models.simulate.trace import trace
from gascompile.passes.explain.explain import explain
from gascompile.passes.verify.walk import verify
from gascompile.runtime.kernels import updates
from gascompile.runtime.memory.host_slots import HOST_BYTES
from gascompile.runtime.protocols import Device
from gascompile.training import units
from tests.training.devices import EMULATED, on_device
from tests.training.runs import adamw, batches, loss_fn, losses, new_model, plain_losses
from tests.training.test_devices import late_accelerator, late_cuda
from tests.training.trials import Trial

BOTH = replace(
    EMULATED,
    name="an accelerator by hand beside a processor",
    rates=(*EMULATED.rates, replace(EMULATED.rates[0], device="cpu")),
    memory=(*EMULATED.memory, replace(EMULATED.memory[0], device="cpu")),
)
ROOMY = Budget(gpu=850_000, cpu=HOST_BYTES + 4_000_000)
"""Less than the states of ``TinyGPT``, and a host that has room for all of them."""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in which plans are kept from test to test."""
    return tmp_path_factory.mktemp("updates")


def begun(folder: Path, **options: Any) -> tuple[TrainingStep, nn.Module]:
    model = new_model().train()
    options = {"machine": BOTH, "budget": ROOMY, "sites": "all", **options}
    step = on_device(model, adamw(model), folder, **options)
    torch.manual_seed(5)
    return step, model


def updated_there(plan: Plan) -> set[str]:
    """Return what ops on the host change."""
    pairs = zip(plan.workload.ops, plan.ops, strict=True)
    return {name for spec, op in pairs if op.site == "cpu" for name in spec.writes}


@pytest.mark.parametrize("device", [late_accelerator, late_cuda])
def test_losses_are_eagers_whatever_order_transfers_end_in(
    device: Callable[[Machine], Device], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(units, "device_for", device)
    step, model = begun(cache)
    with step:
        assert losses(step, 0, 4) == plain_losses(4)
        plan, report = step.plan, step.last_run
    assert plan is not None
    assert report is not None
    verify(plan)
    changed = updated_there(plan)
    kinds = {tensor.name: tensor.kind for tensor in plan.workload.tensors}
    moments = {name for name in changed if kinds[name] is TensorKind.STATE}
    assert moments
    moved = {s.tensor for s in plan.steps if isinstance(s, (Offload, Reload))}
    assert moments.isdisjoint(moved)
    assert {name: n for name, n in report.link_bytes.items() if n} == {
        name: n for name, n in plan.link_bytes.items() if n
    }
    assert report.peak_bytes["gpu"] <= plan.budget_bytes["gpu"]
    assert report.peak_bytes["cpu"] <= plan.peak_bytes["cpu"] <= plan.budget_bytes["cpu"]
    assert all(p.numel() and p.isfinite().all() for p in model.parameters())


def test_the_plan_is_no_slower_than_without_and_all_clocks_agree(cache: Path) -> None:
    found = {}
    for sites in ("one", "all"):
        step, _ = begun(cache, sites=sites)
        with step:
            assert step.plan is not None
            found[sites] = step.plan
    assert not updated_there(found["one"])
    assert found["all"].certificate.predicted_s < found["one"].certificate.predicted_s
    both = found["all"]
    shown = trace(both)
    assert shown.seconds == pytest.approx(replay_plan(both).seconds)
    assert max(span.ended_s for span in shown.ops) == pytest.approx(shown.seconds)
    assert shown.memory["gpu"].peak_bytes <= both.peak_bytes["gpu"]
    op = next(op for op in both.ops if op.site == "cpu")
    assert getattr(explain(both, op.name), "site", "") == "cpu"
    spec = next(spec for spec in both.workload.ops if spec.name == op.name)
    said = {name: getattr(explain(both, name), "reason", "") for name in spec.writes}
    assert all(
        f"it rests in cpu, where '{op.name}' changes it" in reason for reason in said.values()
    )


def test_states_are_eagers_and_a_run_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    trial = Trial(new_model().train(), loss_fn, batches(4), tmp_path)
    wanted = trial.eager()
    model = new_model().train()
    optimizer = trial.optimizer(model)
    options: dict[str, Any] = {"machine": BOTH, "budget": ROOMY, "sites": "all"}
    with on_device(model, optimizer, tmp_path, **options) as step:
        torch.manual_seed(7)
        found = [step(batch) for batch in batches(2)]
        assert step.plan is not None
        # What a parameter is in between is asked of where it rests.
        name = next(iter(updated_there(step.plan) & dict(model.named_parameters()).keys()))
        begun = model.get_parameter(name).detach().clone()
        found.append(step(batches(4)[2]))
        assert not torch.equal(model.get_parameter(name), begun)
        random = torch.get_rng_state()
        step.save(tmp_path / "kept")
    again = new_model(2).train()
    with on_device(again, trial.optimizer(again), tmp_path, **options) as step:
        step.load(tmp_path / "kept")
        torch.set_rng_state(random)
        found.append(step(batches(4)[3]))
    assert [float(x) for x in found] == [float(x) for x in wanted.losses]
    for name, value in again.state_dict().items():
        assert torch.equal(value, wanted.state[name]), name


def test_what_is_clipped_by_all_gradients_is_updated_on_the_device(cache: Path) -> None:
    step, _ = begun(cache, max_grad_norm=0.05)
    with step:
        assert step.plan is not None
        assert updated_there(step.plan) == set()


def test_gradients_are_added_up_where_their_sums_rest(tmp_path: Path) -> None:
    options: dict[str, Any] = {"accumulate": 2, "on_exceed": "warn"}
    trial = Trial(new_model().train(), loss_fn, batches(3), tmp_path, options=options)
    wanted = trial.eager()
    model = new_model().train()
    options |= {"machine": BOTH, "budget": ROOMY.with_size("gpu", 1_100_000), "sites": "all"}
    with on_device(model, trial.optimizer(model), tmp_path, **options) as step:
        torch.manual_seed(7)
        found = [step(batch) for batch in batches(3)]
        assert step.plan is not None
        assert all(":gradient" in name for name in updated_there(step.plan))
        assert updated_there(step.plan)
    assert [float(x) for x in found] == [float(x) for x in wanted.losses]
    for name, value in model.state_dict().items():
        assert torch.equal(value, wanted.state[name]), name


def test_a_kept_plan_updates_there_as_well(tmp_path: Path) -> None:
    step, _ = begun(tmp_path)
    with step:
        wanted = losses(step, 0, 2)
        plan = step.plan
        step.save_plan(tmp_path / "plans")
    model = new_model().train()
    torch.manual_seed(5)
    with compile_step(
        model,
        loss_fn,
        adamw(model),
        example_batch=batches(1)[0],
        plan=tmp_path / "plans",
        machine=BOTH,
        cache_dir=tmp_path / "other",
    ) as step:
        torch.manual_seed(5)
        assert losses(step, 0, 2) == wanted
        assert step.plan is not None
        assert plan is not None
        assert updated_there(step.plan) == updated_there(plan) != set()


def test_an_update_that_fails_on_the_host_ends_the_step_alone(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, _ = begun(cache)
    real = updates.adam

    def failing(parameter: torch.Tensor, *rest: Any, **options: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("no update today")
        real(parameter, *rest, **options)

    with step:
        found = losses(step, 0, 1)
        random = torch.get_rng_state()
        step.save(tmp_path)
        with monkeypatch.context() as patched:
            patched.setattr(updates, "adam", failing)
            with pytest.raises(ValueError, match="no update today"):
                step(batches(2)[1])
        step.load(tmp_path)
        torch.set_rng_state(random)
        assert found + losses(step, 1, 3) == plain_losses(3)
