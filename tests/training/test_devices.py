"""Training steps on an emulated accelerator: eager's results from values that move between all of its tiers."""

from __future__ import annotations

import errno
import logging
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from benchmarks import training_emulated
from gascompile import TrainingStep, compile_step
from gascompile.core.budget import Budget
from gascompile.core.checks.machine_files import preset
from gascompile.core.errors import (
    BudgetExceededError,
    DeviceError,
    InfeasiblePlanError,
    StorageError,
    UnsupportedOpError,
)
from gascompile.core.machine import Machine
from gascompile.core.sizes import PAGE_BYTES
from gascompile.core.steps import Offload, Reload
from gascompile.machines.emulated import emulated_machine
from gascompile.passes.verify.walk import verify
from gascompile.runtime.devices.cuda import CudaDevice
from gascompile.runtime.devices.emulated import EmulatedDevice
from gascompile.runtime.devices.pacing import Disorder
from gascompile.runtime.memory.host_slots import HOST_BYTES
from gascompile.runtime.protocols import Device
from gascompile.runtime.run.executor import Executor
from gascompile.training import units
from gascompile.training.capture.joint import capture_joint
from gascompile.training.timeline import record
from tests.runtime.devices.fake_cuda import FakeApi
from tests.training.devices import EMULATED, SMALL, on_device
from tests.training.runs import adamw, batches, loss_fn, losses, new_model, plain_losses, plain_step
from tests.training.trials import Trial


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in which plans are kept from test to test."""
    return tmp_path_factory.mktemp("devices")


def mean_square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch).square().mean()
    return loss


def late_accelerator(machine: Machine) -> Device:
    """Return a device whose copies spoil their target, end late and overtake those of other links."""
    disorder = Disorder(seed=3, longest_delay_s=2e-3)
    return EmulatedDevice(machine, disorder=disorder, late=True)


def late_cuda(machine: Machine) -> Device:
    """Return a stand-in for a GPU that copies nothing before somebody waits for it."""
    return CudaDevice(api=FakeApi())


def require_equal(one: Any, other: Any) -> None:
    """Compare two states to the bit."""
    for a, b in zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def begun(cache: Path, **options: Any) -> tuple[TrainingStep, nn.Module]:
    model = new_model().train()
    step = on_device(model, adamw(model), cache, **options)
    torch.manual_seed(5)
    return step, model


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
    moved = {s.link for s in plan.steps if isinstance(s, (Offload, Reload))}
    assert moved == {link.name for link in EMULATED.links}
    assert {name: n for name, n in report.link_bytes.items() if n} == {
        name: n for name, n in plan.link_bytes.items() if n
    }
    assert report.peak_source == ("allocator" if device is late_accelerator else "device")
    assert report.peak_bytes["gpu"] <= plan.budget_bytes["gpu"]
    assert report.peak_bytes["cpu"] == plan.peak_bytes["cpu"] <= plan.budget_bytes["cpu"]
    assert all("pinned memory" in path for path in report.paths.values())
    assert all(p.numel() and p.isfinite().all() for p in model.parameters())


def test_blocks_of_the_emulated_memory_are_within_the_budget(cache: Path) -> None:
    step, _ = begun(cache)
    with step:
        losses(step, 0, 1)
        assert step.pages is not None
        assert SMALL.gpu is not None
        assert step._states is not None
        begun_bytes = step.pages.mark()
        held_bytes = step._states.persistent.resident_bytes
        losses(step, 1, 2)
        # Of other steps in this process something may be in use, too; blocks are whole pages.
        peak_bytes = held_bytes + step.pages.peak_bytes - begun_bytes
        assert int(SMALL.gpu) / 2 < peak_bytes <= int(SMALL.gpu) + 8 * PAGE_BYTES


@pytest.mark.parametrize(
    "options", [{"max_grad_norm": 0.05}, {"accumulate": 2}], ids=["clipped", "accumulated"]
)
def test_options_do_what_they_do_in_eager(options: dict[str, Any], tmp_path: Path) -> None:
    trial = Trial(new_model().train(), loss_fn, batches(4), tmp_path, options=options)
    wanted = trial.eager()
    model = new_model().train()
    optimizer = trial.optimizer(model)
    budget = Budget(gpu=1_100_000, cpu=HOST_BYTES + 700_000)
    with on_device(model, optimizer, tmp_path, budget=budget, **options) as step:
        torch.manual_seed(7)
        found = [step(batch) for batch in batches(4)]
    assert [float(x) for x in found] == [float(x) for x in wanted.losses]
    for name, value in model.state_dict().items():
        assert torch.equal(value, wanted.state[name]), name


def test_moments_in_8_bits_are_those_of_the_processor(tmp_path: Path) -> None:
    found = []
    budget = Budget(gpu=1_200_000, cpu=HOST_BYTES + 400_000)
    for options in ({"budget": budget}, {"machine": "cpu-nvme", "budget": None}):
        model = new_model().train()
        with on_device(model, adamw(model), tmp_path, states="8bit", **options) as step:
            torch.manual_seed(5)
            losses(step, 0, 3)
            found.append(step.state_dict())
    require_equal(*found)


def test_evaluations_take_turns_with_steps(cache: Path) -> None:
    reference = plain_losses(3)
    step, model = begun(cache)
    with step:
        found = losses(step, 0, 1)
        before = float(step.eval(batches(1)[0]))
        assert float(step.eval(batches(1)[0])) == before
        found += losses(step, 1, 3)
        after = float(step.eval(batches(1)[0]))
    assert found == reference
    with torch.no_grad():
        assert float(loss_fn(model.eval(), batches(1)[0])) == after != before


def test_a_run_goes_on_from_a_checkpoint_and_in_plain_torch(cache: Path, tmp_path: Path) -> None:
    reference = plain_losses(4)
    step, _ = begun(cache)
    with step:
        assert losses(step, 0, 2) == reference[:2]
        step.save(tmp_path / "run")
        losses(step, 2, 3)
        state = step.state_dict()
    other, model = begun(cache)
    with other:
        other.load(tmp_path / "run")
        assert losses(other, 2, 3) == reference[2:3]
        found = other.state_dict()
        require_equal(found, state)
        random = torch.get_rng_state()
        other.load_state_dict(state)
    torch.set_rng_state(random)
    assert plain_step(model.train(), other.optimizer, batches(4)[3]) == reference[3]


def test_an_open_tensor_shows_and_takes_values(cache: Path) -> None:
    step, model = begun(cache)
    with step:
        losses(step, 0, 1)
        weight = model.get_parameter("head.weight")
        value = weight.detach().clone()
        with torch.no_grad():
            weight.mul_(2)
        assert torch.equal(weight.detach(), value * 2)
        kept = model.state_dict()["head.weight"].clone()
    assert torch.equal(weight.detach(), value * 2)
    assert torch.equal(kept, value * 2)


def test_a_model_comes_from_its_files(tmp_path: Path) -> None:
    from safetensors.torch import save_model

    save_model(new_model(), str(tmp_path / "model.safetensors"))
    with torch.device("meta"):
        model = new_model().train()
    step = on_device(model, adamw(model), tmp_path, checkpoint=tmp_path / "model.safetensors")
    with step:
        torch.manual_seed(5)
        assert losses(step, 0, 2) == plain_losses(2)


def test_a_kept_plan_serves_the_same_machine_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    captures = Mock(wraps=capture_joint)
    monkeypatch.setattr("gascompile.training.capture.joint.capture_joint", captures)
    slower = replace(EMULATED, links=tuple(replace(x, latency_s=2e-5) for x in EMULATED.links))
    with caplog.at_level(logging.WARNING):
        plans = []
        for machine in (EMULATED, EMULATED, slower):
            step, _ = begun(tmp_path, machine=machine)
            with step:
                assert losses(step, 0, 1) == plain_losses(1)
                assert step.plan is not None
                plans.append(step.plan)
            assert captures.call_count == 1
        assert plans[0] == plans[1] and plans[2].machine == slower
    assert not caplog.records


def test_a_recorded_step_knows_when_transfers_ran(cache: Path) -> None:
    step, _ = begun(cache)
    with step:
        losses(step, 0, 2)
        found = record(step, batches(3)[2])
        assert float(found.loss) == plain_losses(3)[2]
    assert {t.link for t in found.measured.transfers} == {link.name for link in EMULATED.links}
    for transfer in found.measured.transfers:
        assert transfer.begun_s <= transfer.arrived_s
        assert transfer.arrived_s - transfer.begun_s >= transfer.size_bytes / 8e9 - 1e-9


@pytest.mark.parametrize("direction", ["write", "read"])
def test_a_failed_transfer_ends_the_run_until_a_checkpoint_is_loaded(
    direction: str, cache: Path, tmp_path: Path
) -> None:
    reference = plain_losses(4)
    step, _ = begun(cache)
    with step:
        assert losses(step, 0, 2) == reference[:2]
        step.save(tmp_path / "run")
        assert step._states is not None
        staged = step._states.persistent._moves.staged  # type: ignore[attr-defined]
        server = staged._outward if direction == "write" else staged._inward
        real = server.move_bytes
        count = 0

        def fault(*args: Any) -> int:
            nonlocal count
            count += 1
            if count > 2:
                raise OSError(errno.EIO, "the drive has failed")
            return int(real(*args))

        server.move_bytes = fault
        with pytest.raises(StorageError, match="the drive has failed"):
            losses(step, 2, 4)
        server.move_bytes = real
        with pytest.raises(StorageError, match="restore the last checkpoint"):
            step(batches(1)[0])
        step.load(tmp_path / "run")
        assert losses(step, 2, 4) == reference[2:]


def test_an_interrupt_before_anything_has_changed_does_not_end_the_run(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = plain_losses(3)
    step, _ = begun(cache)
    with step:
        assert losses(step, 0, 1) == reference[:1]
        random = torch.get_rng_state()
        with monkeypatch.context() as patch:
            patch.setattr(Executor, "_interpret", lambda *_: signal.raise_signal(signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):
                losses(step, 1, 2)
        torch.set_rng_state(random)
        assert losses(step, 1, 3) == reference[1:]


def test_an_op_beyond_the_budget_is_stopped(cache: Path) -> None:
    step, _ = begun(cache)
    with step:
        (unit,) = step._units
        unit.executor._session._reserved_bytes += 100_000
        with pytest.raises(BudgetExceededError, match="gpu"):
            unit.run([batches(1)[0], *unit_hyper(step)])


def unit_hyper(step: TrainingStep) -> list[torch.Tensor]:
    states = step._states
    assert states is not None
    return [states.rules.hyper(0, states.counts, 1)]


def test_what_a_device_does_not_do_is_refused(tmp_path: Path) -> None:
    def refused(error: type[Exception], match: str, **options: Any) -> None:
        model = new_model()
        with pytest.raises(error, match=match):
            on_device(model, adamw(model), tmp_path, **options)
        assert model.get_parameter("head.weight").numel()

    refused(UnsupportedOpError, "computes on 'gpu'", unplanned_optimizer=True)
    refused(DeviceError, "larger tier", budget="1GiB")
    refused(InfeasiblePlanError, "'cpu'", budget=Budget(gpu="4MiB", cpu=HOST_BYTES - 1))
    refused(InfeasiblePlanError, "'gpu'", budget=Budget(gpu="100KiB"))
    places = tuple(place for place in EMULATED.places if place.name != "nvme")
    links = tuple(x for x in EMULATED.links if "nvme" not in x.name)
    refused(
        UnsupportedOpError, "no tier 'nvme'", machine=replace(EMULATED, places=places, links=links)
    )


def test_without_room_on_the_host_all_goes_to_files(tmp_path: Path) -> None:
    step, _ = begun(tmp_path, budget=Budget(gpu=SMALL.gpu, cpu=HOST_BYTES))
    with step:
        assert losses(step, 0, 2) == plain_losses(2)
        assert step.last_run is not None
        assert {n for n, moved in step.last_run.link_bytes.items() if moved} == {
            "gpu->nvme",
            "nvme->gpu",
        }
        assert step.last_run.peak_bytes["cpu"] == HOST_BYTES


def test_a_step_runs_on_the_preset(tmp_path: Path) -> None:
    model, eager = nn.Linear(8, 8), nn.Linear(8, 8)
    eager.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.ones(2, 8)
    machine = emulated_machine(preset("cpu-nvme"))
    with compile_step(
        model, mean_square, optimizer, "1MiB", batch, machine=machine, cache_dir=tmp_path
    ) as step:
        assert torch.equal(step(batch), mean_square(eager, batch).detach())


def test_the_benchmark_finds_eagers_losses_and_what_was_planned(tmp_path: Path) -> None:
    gpu_bytes, (_, cpu_bytes) = training_emulated.CASES["toy"]
    wanted, _ = training_emulated.eager("toy", 3)
    budget = Budget(gpu=gpu_bytes, cpu=cpu_bytes)
    row = training_emulated.planned("toy", EMULATED, budget, tmp_path, wanted)
    assert row["losses_hold"]
    assert row["bytes_hold"]
    assert row["peak_holds"]
    assert row["link_bytes"]
    assert len(row["times_s"]) == 3
