"""Models of each kind in the smallest budget of an accelerator that is late, out of order and watched.

Runs are paranoid: what has been released or has not arrived is poison, and every access to the arena has to be
ordered by an event.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from gascompile.api.compile import Job, make_job
from gascompile.api.unit import Unit
from gascompile.bundles.reuse import CachedPlan
from gascompile.capture.calls import bind_call, normalize_call, positional_names
from gascompile.capture.to_program import Capture
from gascompile.core.budget import Budget
from gascompile.core.config import CompileConfig
from gascompile.core.errors import InfeasiblePlanError
from gascompile.integrations.huggingface import register_pytrees
from gascompile.runtime.debug.watched import WatchedDevice
from gascompile.runtime.devices.emulated import EmulatedDevice
from gascompile.runtime.devices.pacing import Disorder
from gascompile.runtime.memory.pinned import pinned_bytes
from gascompile.runtime.run.executor import Executor
from gascompile.runtime.run.session import Session
from tests import zoo

NUM_RUNS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class OnceCaptured(Job):
    """A job that traces its model once for several budgets."""

    captures: list[Capture] = field(default_factory=list)

    def capture(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], entry: CachedPlan | None = None
    ) -> Capture:
        if not self.captures:
            self.captures.append(Job.capture(self, args, kwargs, entry))
        return self.captures[0]


def in_smallest_budget(model: nn.Module, inputs: dict[str, Any], cache: Path) -> Unit:
    """Return the plan for the emulated accelerator that needs least of its memory."""
    config = CompileConfig(cache_dir=cache, fuse="off")
    made = make_job(
        model, 0, checkpoint=None, dynamic_shapes=None, machine="emulated", config=config
    )
    job = OnceCaptured(**made.parts())
    call = normalize_call(model, (), inputs)
    with pytest.raises(InfeasiblePlanError) as error:
        job.prepare(*call)
    assert error.value.tier == "gpu"
    return dataclasses.replace(job, budget=Budget(gpu=error.value.required_bytes)).prepare(*call)


# One of each: a decoder, an encoder-decoder, experts, states, tied tables, a scan, buffers of a module, reduced types.
@pytest.mark.parametrize(
    "name", ["llama", "t5", "mixtral", "convnet", "tied", "mamba2", "modules", "reduced"]
)
def test_equal_to_eager_whatever_comes_late(name: str, cache: Path) -> None:
    register_pytrees()
    model, inputs = zoo.make(name)
    with torch.no_grad():
        expected = pytree.tree_leaves(model(**inputs))
    unit = in_smallest_budget(model, inputs, cache)
    plan, weights = unit.bundle.plan, unit.bundle.weights
    disorder = Disorder(seed=len(name), longest_delay_s=1e-4)
    device = WatchedDevice(EmulatedDevice(plan.machine, disorder=disorder, late=True))
    leaves = pytree.tree_leaves(bind_call(positional_names(model), (), inputs))
    with Session.for_plan(
        plan,
        sources=weights.sources,
        stamps=weights.stamps,
        states=unit.bundle.held,
        device=device,
    ) as session:
        executor = Executor(session, unit.graph_module, plan, paranoid=True)
        for _ in range(NUM_RUNS):
            outputs = pytree.tree_leaves(
                pytree.tree_unflatten(executor.run(*leaves), unit.out_spec)
            )
            assert len(outputs) == len(expected)
            for value, wanted in zip(outputs, expected, strict=True):
                if isinstance(wanted, torch.Tensor):
                    torch.testing.assert_close(value, wanted, rtol=0, atol=1e-5)
                else:
                    assert value == wanted
        report = executor.last_run
    assert report is not None
    moved = {link: count for link, count in report.link_bytes.items() if count}
    assert moved == {link: count for link, count in plan.link_bytes.items() if count}
    assert moved
    assert 0 < report.peak_bytes["gpu"] <= plan.budget_bytes["gpu"]
    assert report.peak_bytes["cpu"] == pinned_bytes(plan) <= plan.budget_bytes["cpu"]
    assert device.races.num_checked > NUM_RUNS * len(plan.ops)
