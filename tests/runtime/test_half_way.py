"""Weights that wait half the way: results as eager, bytes as planned, and no missing order stays unseen."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from gascompile.core.errors import DeviceError, PlanVerificationError, RaceError, UnsupportedOpError
from gascompile.core.machine import Machine
from gascompile.core.plan import Plan
from gascompile.core.steps import Evict, Fetch, Step
from gascompile.passes.graph.insert import insert
from gascompile.passes.verify.walk import verify
from gascompile.runtime.debug.watched import WatchedDevice
from gascompile.runtime.devices.cuda import CudaDevice
from gascompile.runtime.devices.emulated import EmulatedDevice
from gascompile.runtime.devices.pacing import Disorder
from gascompile.runtime.memory.pinned import pinned_bytes
from gascompile.runtime.protocols import Ticket
from gascompile.runtime.run.executor import Executor
from gascompile.runtime.transfer.half_way import HalfWay
from tests.hop_plans import hop_plan, on_gpu
from tests.runtime.devices.fake_cuda import fake_cuda
from tests.runtime.devices.machines import accelerator
from tests.runtime.toys import Toy, mlp

WIDTH = 32
FAST = accelerator(up=1e11, down=1e11, nvme=1e10, latency_s=1e-6)
CUDA = dataclasses.replace(FAST, backend="cuda")


def toy_of(folder: Path, layers: int = 3) -> Toy:
    toy = mlp(folder, layers=layers, width=WIDTH)
    return dataclasses.replace(toy, workload=on_gpu(toy.workload, 1e-5))


def device_of(plan: Plan, seed: int) -> WatchedDevice:
    if plan.machine.backend == "cuda":
        return WatchedDevice(CudaDevice(api=fake_cuda()[0]))
    disorder = Disorder(seed=seed, longest_delay_s=1e-4)
    return WatchedDevice(EmulatedDevice(FAST, disorder=disorder, late=True))


def moved(link_bytes: Mapping[str, int]) -> dict[str, int]:
    return {link: count for link, count in link_bytes.items() if count}


@pytest.mark.parametrize("machine", [FAST, CUDA], ids=["emulated", "cuda"])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_weights_come_in_two_hops(
    tmp_path: Path, machine: Machine, overlap: bool, seed: int
) -> None:
    toy = toy_of(tmp_path)
    plan = hop_plan(toy.workload, machine, seed)
    verify(plan)
    assert plan.link_bytes["nvme->cpu"] > 0
    device = device_of(plan, seed)
    with toy.session(plan, device=device) as session:
        executor = Executor(
            session, insert(toy.program, plan), plan, paranoid=True, overlap=overlap
        )
        for run in range(8):
            x = torch.randn(4, WIDTH)
            for ours, eager in zip(executor.run(x), toy.eager(x), strict=True):
                assert torch.equal(ours, eager)
            report = executor.last_run
            assert report is not None
            if run:
                assert moved(report.link_bytes) == moved(plan.link_bytes)
            assert report.peak_bytes["cpu"] == session.pinned_bytes == pinned_bytes(plan)
            staging = plan.machine.io.staging_bytes
            # What is not in the arena in between rests in whole pages.
            assert report.peak_bytes["cpu"] - staging >= plan.peak_bytes["cpu"]
    assert device.races.num_checked > 0


def test_executors_take_turns_half_the_way(tmp_path: Path) -> None:
    toy = toy_of(tmp_path)
    plans = [hop_plan(toy.workload, FAST, seed, num_residents=0) for seed in (1, 2)]
    largest = max(plans, key=lambda plan: plan.arena_bytes["gpu"])
    with toy.session(largest, device=device_of(largest, 3)) as session:
        executors = [toy.executor(session, plan) for plan in plans]
        taken = session.pinned_bytes
        for i in (0, 0, 1, 0, 1, 1, 0):
            x = torch.randn(4, WIDTH)
            for ours, eager in zip(executors[i].run(x), toy.eager(x), strict=True):
                assert torch.equal(ours, eager)
        executors[1].mover.close()
        assert session.pinned_bytes == taken - plans[1].arena_bytes["cpu"]


def test_what_is_half_the_way_is_in_the_hosts_budget(tmp_path: Path) -> None:
    toy = toy_of(tmp_path)
    plan = hop_plan(toy.workload, FAST, 0)
    small = plan.with_accounts(budget_bytes={**plan.budget_bytes, "cpu": pinned_bytes(plan) - 1})
    with pytest.raises(DeviceError, match="pins"), toy.session(small) as session:
        toy.executor(session, small)


def test_another_place_in_between_is_refused(tmp_path: Path) -> None:
    toy = toy_of(tmp_path)
    plan = hop_plan(toy.workload, FAST, 0)

    def elsewhere(step: Step) -> Step:
        return dataclasses.replace(step, place="pool") if isinstance(step, Fetch) else step

    steps = tuple(map(elsewhere, plan.steps))
    with toy.session(plan) as session, pytest.raises(UnsupportedOpError, match="wait in 'pool'"):
        HalfWay.of(session, dataclasses.replace(plan, steps=steps))


# ---------------------------------------------------------------- what is missing is seen


def races(toy: Toy, plan: Plan, seed: int) -> bool:
    """Return whether runs of a plan, or their results, show that something is not ordered."""
    with toy.session(plan, device=device_of(plan, seed)) as session:
        executor = Executor(session, insert(toy.program, plan), plan, paranoid=True)
        for _ in range(3):
            x = torch.randn(4, WIDTH)
            try:
                found = executor.run(x)
            except RaceError:
                return True
            if any(not torch.equal(a, b) for a, b in zip(found, toy.eager(x), strict=True)):
                return True
    return False


@pytest.mark.parametrize("machine", [FAST, CUDA], ids=["emulated", "cuda"])
def test_a_read_that_does_not_wait_for_the_pushes_before_it_is_seen(
    tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy = toy_of(tmp_path)
    plans = [hop_plan(toy.workload, machine, seed, num_residents=0) for seed in range(4)]
    assert not any(races(toy, plan, 0) for plan in plans)
    evict = HalfWay.evict

    def forgetful(self: HalfWay, tensor: str, *, spoil: bool) -> None:
        evict(self, tensor, spoil=spoil)
        self._leaving.clear()

    monkeypatch.setattr(HalfWay, "evict", forgetful)
    assert any(races(toy, plan, 0) for plan in plans)


@pytest.mark.parametrize("machine", [FAST, CUDA], ids=["emulated", "cuda"])
def test_a_push_that_does_not_wait_for_its_read_is_seen(
    tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy = toy_of(tmp_path)
    plan = hop_plan(toy.workload, machine, 0, num_residents=0)
    push = HalfWay.push

    def hasty(self: HalfWay, tensor: str, *rest: Any) -> Ticket:
        self._waiting[tensor].arrived = True
        return push(self, tensor, *rest)

    monkeypatch.setattr(HalfWay, "push", hasty)
    assert races(toy, plan, 0)


@pytest.mark.parametrize("machine", [FAST, CUDA], ids=["emulated", "cuda"])
@pytest.mark.parametrize("kind", [Fetch, Evict])
def test_a_graph_without_a_step_half_the_way_does_not_run(
    tmp_path: Path, machine: Machine, kind: type
) -> None:
    toy = toy_of(tmp_path)
    plan = hop_plan(toy.workload, machine, 0, num_residents=0)
    missing = next(i for i, step in enumerate(plan.steps) if isinstance(step, kind))
    steps = (*plan.steps[:missing], *plan.steps[missing + 1 :])
    with pytest.raises(PlanVerificationError):
        verify(dataclasses.replace(plan, steps=steps))
