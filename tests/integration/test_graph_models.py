"""Models of many kinds on the stand-in for CUDA with graphs: the bits of runs without, whatever comes next.

Pools of the stand-in hand memory out again at once, and nothing is done while capturing.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from gascompile.api.compile import make_job
from gascompile.api.device_budget import graphs_bytes, placed_bytes
from gascompile.api.unit import Unit
from gascompile.capture.calls import bind_call, normalize_call, positional_names
from gascompile.core.checks.machine_files import preset
from gascompile.core.config import CompileConfig
from gascompile.integrations.huggingface import register_pytrees
from gascompile.runtime.devices.cuda import CudaDevice
from gascompile.runtime.run.executor import Executor
from gascompile.runtime.run.session import Session
from tests import zoo
from tests.integration.test_device_states import Counting, images
from tests.integration.test_emulated_zoo import in_smallest_budget
from tests.runtime.devices.fake_cuda import FakeRuntime, fake_cuda
from tests.runtime.devices.fake_graphs import Counted

NUM_RUNS = 5
SURE = 4.0
"""Times what graphs really keep: what they may keep is known before a capture as three times that and a little more."""


@contextmanager
def executor_of(unit: Unit, *, graphs: bool) -> Iterator[tuple[Executor, FakeRuntime]]:
    """Open a session of its own on a stand-in."""
    api, cuda = fake_cuda()
    held = {name: tensor.detach().clone() for name, tensor in unit.bundle.held.items()}
    with Session.for_plan(
        unit.bundle.plan,
        sources=unit.bundle.weights.sources,
        stamps=unit.bundle.weights.stamps,
        states=held,
        device=CudaDevice(api=api),
    ) as session:
        yield Executor(session, unit.graph_module, unit.bundle.plan, graphs=graphs), cuda


def varied(leaves: Sequence[Any], run: int) -> list[Any]:
    """Return other inputs of the same shapes; masks stay what they are."""
    torch.manual_seed(run)

    def vary(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        if x.is_floating_point():
            return torch.randn_like(x)
        return x if x.max() <= 1 else x.flip(-1).roll(run, -1)

    return [vary(x) for x in leaves]


def resident(model: nn.Module, inputs: dict[str, Any], cache: Path) -> Unit:
    config = CompileConfig(cache_dir=cache, fuse="off")
    job = make_job(
        model, None, checkpoint=None, dynamic_shapes=None, machine="emulated", config=config
    )
    return job.prepare(*normalize_call(model, (), inputs))


def with_budget(unit: Unit, budget_bytes: int) -> Unit:
    plan = unit.bundle.plan
    budget = {**plan.budget_bytes, "gpu": budget_bytes}
    bundle = dataclasses.replace(unit.bundle, plan=plan.with_accounts(budget_bytes=budget))
    return dataclasses.replace(unit, bundle=bundle)


def peaks(unit: Unit, leaves: Sequence[Any], *, graphs: bool) -> tuple[list[int], bool]:
    """Return the peak of each run with all that ops return counted, and whether graphs were used to the end."""
    found = []
    with executor_of(unit, graphs=graphs) as (executor, cuda):
        for _ in range(NUM_RUNS):
            with Counted(cuda):
                executor.run(*leaves)
            assert executor.last_run is not None
            found.append(executor.last_run.peak_bytes["gpu"])
        return found, bool(cuda.captured)


@pytest.mark.parametrize("name", ["llama", "convnet", "tied"])
def test_the_budget_holds_or_graphs_are_given_up(name: str, cache: Path) -> None:
    register_pytrees()
    model, inputs = zoo.make(name)
    unit = in_smallest_budget(model, inputs, cache)
    leaves = pytree.tree_leaves(bind_call(positional_names(model), (), inputs))
    (alone, *_), _ = peaks(unit, leaves, graphs=False)
    most, used = peaks(with_budget(unit, 1 << 40), leaves, graphs=True)
    assert used
    assert most[1:] == [most[1]] * (NUM_RUNS - 1), "what the capture says is what replays take"
    assert alone == most[0] < most[1]
    planned_bytes = max(unit.bundle.plan.peak_bytes["gpu"] - alone, 0)
    for share in (0.0, 0.3, 0.6, 0.9, 1.0, SURE):
        # What is surely enough counts from the plan's own peak.
        budget_bytes = alone + int(share * (most[1] - alone)) + planned_bytes * (share == SURE)
        found, used = peaks(with_budget(unit, budget_bytes), leaves, graphs=True)
        assert max(found) <= budget_bytes
        assert used or share < SURE
        assert not used or share >= 1.0


@pytest.mark.parametrize("name", ["t5", "mamba2"])
def test_the_room_that_plans_leave_is_enough(name: str, cache: Path) -> None:
    register_pytrees()
    model, inputs = zoo.make(name)
    unit = in_smallest_budget(model, inputs, cache)
    leaves = pytree.tree_leaves(bind_call(positional_names(model), (), inputs))
    plan = unit.bundle.plan
    room_bytes = graphs_bytes(plan.workload, preset("h200-gen5"))
    budget_bytes = plan.peak_bytes["gpu"] + placed_bytes(plan.workload, plan.machine) + room_bytes
    found, used = peaks(with_budget(unit, budget_bytes), leaves, graphs=True)
    assert used
    assert max(found) <= budget_bytes


@pytest.mark.parametrize(
    ("name", "is_small"),
    [
        *(
            (name, True)
            for name in ("llama", "convnet", "tied", "t5", "mixtral", "modules", "whisper")
        ),
        *((name, False) for name in ("llama", "convnet", "tied", "whisper")),
    ],
)
def test_bits_are_those_of_runs_without_graphs(name: str, is_small: bool, cache: Path) -> None:
    register_pytrees()
    model, inputs = zoo.make(name)
    unit = (in_smallest_budget if is_small else resident)(model, inputs, cache)
    # Graphs take a little more than the smallest budget; another test is about that.
    unit = with_budget(unit, 1 << 40)
    leaves = pytree.tree_leaves(bind_call(positional_names(model), (), inputs))
    kept: list[tuple[Any, Any]] = []
    with executor_of(unit, graphs=True) as (ours, cuda), executor_of(unit, graphs=False) as other:
        for run in range(NUM_RUNS):
            given = varied(leaves, run)
            # One is another storage every time, the other the caller's own.
            found, wanted = ours.run(*copy.deepcopy(given)), other[0].run(*given)
            kept += zip(found, wanted, strict=True)
        graphs = ours.graph_report
        assert graphs is not None
        assert not graphs.reason
        assert graphs.num_ops > 0.5 * graphs.num_all_ops
        assert {graph.num_replays for graph in cuda.captured} == {NUM_RUNS - 1}
        if not is_small:
            assert graphs.num_graphs == 1
            assert graphs.num_ops == graphs.num_all_ops
    for value, wanted in kept:
        if isinstance(wanted, torch.Tensor):
            assert torch.equal(value, wanted)
        else:
            assert value == wanted
    assert not cuda.captured, "a session that is closed gives its graphs back"


class Turned(nn.Module):
    """Between two reads of rows nothing but a view, and a copy that looks like one."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Embedding(500, 16), nn.Embedding(500, 16)

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        x = self.left(left).transpose(1, 2).contiguous()
        found: torch.Tensor = x @ self.right(right)
        return found


def test_copies_that_look_like_views_are_made_in_each_run(cache: Path) -> None:
    torch.manual_seed(0)
    model = Turned().eval()
    inputs = {name: torch.randint(2, 500, (2, 6)) for name in ("left", "right")}
    unit = with_budget(in_smallest_budget(model, inputs, cache), 1 << 40)
    with executor_of(unit, graphs=True) as (executor, cuda):
        for run in range(NUM_RUNS):
            given = varied(list(inputs.values()), run)
            with torch.no_grad():
                wanted = model(*given)
            (found,) = executor.run(*copy.deepcopy(given))
            assert torch.equal(found, wanted), run
        assert cuda.captured


def test_states_change_once_a_run(cache: Path) -> None:
    model = Counting().train()
    eager = copy.deepcopy(model)
    unit = resident(model, {"image": images(0)}, cache)
    held = {name: tensor.clone() for name, tensor in unit.bundle.held.items()}
    unit.bundle = dataclasses.replace(unit.bundle, held=held)
    with executor_of(unit, graphs=True) as (executor, cuda):
        for seed in range(NUM_RUNS):
            (found,) = executor.run(images(seed))
            with torch.no_grad():
                torch.testing.assert_close(found, eager(images(seed)), rtol=0, atol=1e-5)
        assert cuda.captured
        states = executor._session.kept.tensors
        assert int(states["calls"]) == NUM_RUNS == int(eager.calls)
        torch.testing.assert_close(states["recent"], eager.recent)
