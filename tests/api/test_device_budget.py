"""What plans for a device leave free of its memory: inputs, and room for graphs where that is little."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import gascompile
from gascompile.api.device_budget import graphs_bytes, placed_bytes
from gascompile.core.checks.machine_files import preset
from gascompile.core.plan import Plan
from gascompile.core.sizes import KIB, MIB
from gascompile.core.workload import TensorKind
from gascompile.passes.model.rounding import rounding_bytes

GPU, WIDTH, LAYERS = "h200-gen5", 1024, 8
WEIGHTS_BYTES = LAYERS * WIDTH * WIDTH * 4


def planned(budget_bytes: int, cache: Path, *, machine: str = GPU, rows: int = 1) -> Plan:
    """Plan eight layers of 4 MiB; what they make of a row is 4 KiB each."""
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU()) for _ in range(LAYERS)]
    inputs = (torch.zeros(rows, WIDTH),)
    return gascompile.plan(nn.Sequential(*layers), budget_bytes, machine, inputs, cache_dir=cache)


def free_bytes(plan: Plan) -> int:
    """Return what a run op by op leaves of the budget."""
    machine = plan.machine
    taken_bytes = placed_bytes(plan.workload, machine) + machine.library_bytes("gpu")
    taken_bytes += rounding_bytes(plan.workload, machine)
    return plan.budget_bytes["gpu"] - plan.peak_bytes["gpu"] - taken_bytes


def test_room_for_graphs_is_for_gpus_alone(tmp_path: Path) -> None:
    workload = planned(64 * MIB, tmp_path).workload
    assert graphs_bytes(workload, preset("cpu-nvme")) == 0
    assert graphs_bytes(workload, preset("emulated")) == 0
    made = [t.size_bytes for t in workload.tensors if t.kind is not TensorKind.WEIGHT]
    assert sum(made) < graphs_bytes(workload, preset(GPU)) < 4 * sum(made)


@pytest.mark.parametrize("layers", [4, 6])
def test_a_plan_that_is_full_leaves_graphs_their_room(layers: int, tmp_path: Path) -> None:
    full = planned(WEIGHTS_BYTES * layers // LAYERS + 256 * KIB, tmp_path)
    room_bytes = graphs_bytes(full.workload, full.machine)
    assert full.peak_bytes["gpu"] < WEIGHTS_BYTES
    assert free_bytes(full) >= room_bytes > 0
    # One byte less, and the same plan would have to break into the room.
    budget_bytes = full.budget_bytes["gpu"] - free_bytes(full) + room_bytes - 1
    assert free_bytes(planned(budget_bytes, tmp_path)) >= room_bytes


def test_much_is_not_left_to_graphs(tmp_path: Path) -> None:
    """What a prompt of 256 rows makes is more than a sixty-fourth of the budget: there launches do not count."""
    plan = planned(24 * MIB, tmp_path, rows=256)
    assert graphs_bytes(plan.workload, plan.machine) > 24 * MIB // 64
    assert free_bytes(plan) < graphs_bytes(plan.workload, plan.machine)


def test_the_smallest_budget_is_as_small_as_without(tmp_path: Path) -> None:
    with pytest.raises(gascompile.InfeasiblePlanError) as caught:
        planned(64 * KIB, tmp_path)
    least_bytes = caught.value.required_bytes
    plan = planned(least_bytes, tmp_path)
    assert 0 <= free_bytes(plan) < graphs_bytes(plan.workload, plan.machine)
