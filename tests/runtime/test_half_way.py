"""Weights that wait half the way: results as eager, bytes as planned, and no missing order stays unseen."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from gascompile.core.machine import Machine
from gascompile.core.plan import Plan
from gascompile.passes.graph.insert import insert
from gascompile.passes.verify.walk import verify
from gascompile.runtime.debug.watched import WatchedDevice
from gascompile.runtime.devices.cuda import CudaDevice
from gascompile.runtime.devices.emulated import EmulatedDevice
from gascompile.runtime.devices.pacing import Disorder
from gascompile.runtime.memory.pinned import pinned_bytes
from gascompile.runtime.run.executor import Executor
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
