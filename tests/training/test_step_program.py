"""The program of a step: what is planned is what is allocated, and no op finds a value of another time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from gascompile.core.errors import PlanVerificationError
from gascompile.core.plan import Plan
from gascompile.core.steps import Compute, Recompute
from gascompile.machines.resolve import resolve_machine
from gascompile.passes.verify.walk import verify
from gascompile.runtime.transfer.engine import read_blocks
from gascompile.training.capture.joint import capture_joint
from gascompile.training.optimizers import optimizers, update_ops
from gascompile.training.optimizers.optimizers import Rules
from gascompile.training.planning.step_program import StepOptions, StepProgram, step_program
from gascompile.training.planning.step_workload import step_workload
from tests.allocator import peak_growth_bytes
from tests.training.trials import MACHINE, Trial, adamw


def _program(model: nn.Module, batch: Any, **options: Any) -> StepProgram:
    joint = capture_joint(model, lambda m, b: m(b).square().mean(), batch)
    names = {id(tensor): name for name, tensor in joint.tensors.items()}
    rules = Rules(adamw(model), names, list(joint.gradients))
    return step_program(joint, rules, name="step", options=StepOptions(**options))


def test_a_parameter_is_updated_after_its_last_reader_and_before_the_end() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    program = _program(model, torch.randn(2, 8)).program
    ops = program.op_nodes()
    bound = {name: node for node, name in program.bindings.items()}
    updates = [i for i, op in enumerate(ops) if op.target is update_ops.adam]
    for name in ("0.weight", "3.weight"):
        (node,) = (n for n in program.graph_module.graph.nodes if n.name == bound[name])
        (update,) = (i for i in updates if ops[i].args[0] is node)
        readers = [ops.index(user) for user in node.users]
        assert max(readers) == update
    assert min(updates) < max(
        i for i, op in enumerate(ops) if op.target is torch.ops.aten.mm.default
    )


def test_no_op_reads_what_an_update_has_changed(tmp_path: Path) -> None:
    """Not even one that runs again: such a plan is refused."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))
    trial = Trial(
        model, lambda m, b: m(b).square().mean(), [torch.randn(2, 8) for _ in range(2)], tmp_path
    )
    plan = trial.planned().plan
    assert plan is not None
    verify(plan)
    ops = plan.workload.ops
    changed = {name: i for i, op in enumerate(ops) for name in op.writes if name in op.reads}
    first = next(i for i, op in enumerate(ops) if "2.weight" in op.reads and op.writes)
    assert first < changed["2.weight"] < len(ops) - 1
    with pytest.raises(PlanVerificationError, match=r"another value of '2\.(weight|bias)'"):
        verify(_again(plan, first, len(ops) - 1, keep="2.weight"))
    drawing = next(i for i, op in enumerate(ops) if "random numbers" in op.writes)
    with pytest.raises(PlanVerificationError, match="does not make 'random numbers' as it is now"):
        verify(_again(plan, drawing, drawing + 1, keep=""))


def _again(plan: Plan, source: int, before: int, keep: str) -> Plan:
    """Return ``plan`` with an op run again, its inputs being there but for what updates have changed."""
    steps: list[Any] = list(plan.steps)
    at = next(i for i, s in enumerate(steps) if isinstance(s, Compute) and s.op == before)
    steps.insert(at, Recompute(op=before, source=source))
    ops = list(plan.workload.ops)
    if keep:
        # All else that it reads is read by the last op as well, so that it is still there.
        others = tuple(name for name in ops[source].reads if name != keep)
        ops[before] = replace(ops[before], reads=(*ops[before].reads, *others))
    return replace(plan, steps=tuple(steps), workload=replace(plan.workload, ops=tuple(ops)))


def test_the_graph_is_not_read_once_per_parameter() -> None:
    """That would take minutes with thousands of ops."""

    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(torch.randn(4) for _ in range(60))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for weight in self.weights:
                x = torch.tanh(x * weight) + weight
            return x

    visited = 0
    graph = torch.fx.Graph
    iterate = vars(graph)["nodes"].fget

    def counted(self: torch.fx.Graph) -> Any:
        nonlocal visited
        visited += 1
        return iterate(self)

    joint = capture_joint(Many(), lambda m, b: m(b).sum(), torch.randn(4))
    names = {id(tensor): name for name, tensor in joint.tensors.items()}
    model = nn.ParameterList(joint.tensors.values())
    rules = Rules(adamw(model), names, list(joint.gradients))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph, "nodes", property(counted))
        step_program(joint, rules, name="step", options=StepOptions())
    assert visited < 50


@pytest.mark.parametrize(
    ("shape", "turned"),
    [((300, 500), False), ((300, 500), True), ((64, 32, 3, 3), True), ((3, 70000), True)],
)
@pytest.mark.parametrize("kind", ["adam", "scaled adam", "sgd", "accumulate"])
def test_updates_allocate_what_is_planned(
    shape: tuple[int, ...], turned: bool, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a gradient does not lie in memory as its parameter does."""
    parameter = torch.randn(shape)
    gradient = torch.randn(shape[::-1]).permute(*reversed(range(len(shape)))) if turned else None
    gradient = torch.randn(shape) if gradient is None else gradient
    numel, hyper = parameter.numel(), torch.tensor([0.1, 0.9, 0.99, 1e-8, 0.1, 1.0, 2.0]).double()
    begin, end = update_ops.tiles(numel, numel // 2)[1]
    kept = [torch.zeros(end - begin) for _ in range(2)]
    scale = torch.tensor(0.5) if kind == "scaled adam" else None

    def call() -> None:
        if kind == "sgd":
            update_ops.sgd(parameter, gradient, kept[0], hyper, torch.tensor(0.5), begin, end)
        elif kind == "accumulate":
            layout = list(parameter.shape), list(parameter.stride())
            update_ops.accumulate(kept[0], gradient, *layout, begin)
        else:
            update_ops.adam(parameter, gradient, *kept, hyper, scale, begin, True)

    scaled = kind in ("scaled adam", "sgd")
    planned = update_ops.workspace_bytes(parameter, gradient, end - begin, scaled=scaled)
    assert peak_growth_bytes(call) <= planned + 1024
    if kind == "accumulate":
        assert torch.equal(kept[0], gradient.reshape(-1)[begin:end])


def test_layouts_do_not_matter_to_updates() -> None:
    hyper = torch.tensor([0.1, 0.9, 0.99, 1e-8, 0.1, 0.0, 1.0]).double()
    layouts: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda v: v.permute(3, 2, 0, 1).contiguous().permute(2, 3, 1, 0),
        lambda v: v.contiguous(memory_format=torch.channels_last),
    ]
    for strange in layouts:
        start, gradient = torch.randn(6, 5, 4, 3), torch.randn(6, 5, 4, 3)
        found = []
        for parameter, slope in (
            (start.clone(), gradient),
            (start.clone(), strange(gradient)),
            (strange(start).clone(), gradient),
        ):
            moments = [torch.zeros(360) for _ in range(2)]
            update_ops.adam(parameter, slope, *moments, hyper, None, 0, True)
            found.append(parameter)
        for other in found[1:]:
            torch.testing.assert_close(other, found[0], rtol=1e-6, atol=1e-7)


class _Everything(nn.Module):
    """Backward kernels of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 24, 3, padding=1)
        self.grouped = nn.Conv2d(24, 24, 3, groups=4, stride=2)
        self.up = nn.ConvTranspose2d(24, 8, 2, stride=2)
        self.norms = nn.ModuleList([nn.BatchNorm2d(24), nn.GroupNorm(4, 24), nn.LayerNorm(14)])
        self.linear = nn.Linear(14, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.gelu(self.norms[0](self.conv(x)))
        x = self.up(self.norms[1](self.grouped(functional.avg_pool2d(x, 2) + 1)))
        y = self.linear(self.norms[2](functional.max_pool2d(x, 1)))
        z = functional.scaled_dot_product_attention(y, y.clone(), torch.tanh(y))
        return functional.log_softmax(z, -1)


def test_a_step_allocates_no_more_than_is_planned(tmp_path: Path) -> None:
    """By torch's own record of allocations, kernels' buffers included."""
    batches = [torch.randn(4, 3, 32, 32) for _ in range(2)]
    model = _Everything()
    trial = Trial(model, lambda m, b: m(b).square().mean(), batches, tmp_path)
    eager = trial.eager()
    trial.planned(trial.smallest_budget()).assert_equals(eager)
    twin = copy.deepcopy(model)
    # Without moves: those end on other threads, where the record does not see memory given back.
    with trial.compiled(twin, adamw(twin), None) as step:
        step(batches[0])
        before = step._open_states().persistent.resident_bytes
        grown = peak_growth_bytes(lambda: step(batches[1]))
        assert step.plan is not None
        assert before + grown <= step.plan.peak_bytes["cpu"] + (16 << 10)


def test_workspace_of_updates_is_part_of_the_workload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = resolve_machine(MACHINE, cache_dir=tmp_path, read=read_blocks)
    monkeypatch.setattr(optimizers, "_TILE_BYTES", 1 << 14)
    for options, least in (({}, 0), ({"max_grad_norm": 1.0}, 1 << 14)):
        program = _program(nn.Linear(128, 96), torch.randn(2, 128), **options)
        ops = [op for op in step_workload(program, machine).ops if op.name.startswith("adam")]
        assert len(ops) == 4
        assert all(least <= op.workspace_bytes <= least + 2048 for op in ops[:3])
