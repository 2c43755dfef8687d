"""One thread: what is trained here is small, and other tests have the other cores. One plan for what is the same."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gascompile import TrainingStep
from gascompile.core import serial
from gascompile.core.budget import Budget
from gascompile.core.config import CompileConfig
from gascompile.core.errors import InfeasiblePlanError
from gascompile.core.machine import Machine
from gascompile.core.plan import Plan
from gascompile.core.workload import Workload
from gascompile.training.planning.step_plan import step_plan
from tests.training.runs import adamw, compiled, new_model


@pytest.fixture(autouse=True, scope="package")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


_OWN_CACHE = {
    f"test_{name}"
    for name in (
        "budget_exceeded",
        "capture_step",
        "crash",
        "devices",
        "from_checkpoint",
        "fused_steps",
        "refusals",
        "saved_plans",
        "step_cache",
        "step_costs",
        "step_graphs",
        "step_program",
        "updates_on_host",
    )
}
"""Files whose tests look at captures, at what is measured for a plan, or at the cache itself."""


@pytest.fixture(autouse=True)
def _captured_once(request: pytest.FixtureRequest) -> None:
    """Capture once what many tests train: the same model, loss and optimizer in the same budget."""
    if request.path.stem not in _OWN_CACHE:
        request.getfixturevalue("_kept_plans")


@pytest.fixture(autouse=True, scope="package")
def _planned_once() -> Iterator[None]:
    """Look once for the plan of a workload in a budget: many tests train the same small model."""
    known: dict[tuple[object, ...], Plan | InfeasiblePlanError] = {}

    def once(
        workload: Workload,
        machine: Machine,
        budget: Budget,
        config: CompileConfig,
        *,
        fingerprint: Mapping[str, str],
        reserved_bytes: int,
    ) -> Plan:
        asked = (serial.digest(x) for x in (workload, machine, budget.limits_bytes(machine)))
        key = (*asked, config.time_limit_s, config.mip_gap, reserved_bytes)
        if key not in known:
            try:
                known[key] = step_plan(
                    workload,
                    machine,
                    budget,
                    config,
                    fingerprint=fingerprint,
                    reserved_bytes=reserved_bytes,
                )
            except InfeasiblePlanError as error:
                known[key] = copy.copy(error)
        found = known[key]
        if isinstance(found, InfeasiblePlanError):
            raise copy.copy(found)
        return replace(found, fingerprint=dict(fingerprint))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gascompile.training.planning.step_plan.step_plan", once)
        yield


@pytest.fixture
def step(tmp_path: Path) -> Iterator[TrainingStep]:
    """Return a step whose states do not fit."""
    model = new_model().train()
    with compiled(model, adamw(model), tmp_path) as found:
        torch.manual_seed(5)
        yield found
