"""Segments of plans that are made of real captures: where a run ends, what it reads and makes, what is equal."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from gascompile.capture.export import capture
from gascompile.core import moves
from gascompile.core.budget import Budget
from gascompile.core.kernels import Segment
from gascompile.core.plan import Plan
from gascompile.machines.resolve import preset
from gascompile.passes.graph.annotate import annotate
from gascompile.passes.graph.insert import insert
from gascompile.passes.graph.segments import segments
from gascompile.passes.model.liveness import live_bytes
from gascompile.passes.plan.make_plan import make_plan

WIDTH = 64


def planned(
    model: nn.Module, *inputs: torch.Tensor, budget: Budget | None = None
) -> tuple[fx.GraphModule, Plan]:
    machine = preset("cpu-nvme")
    program = capture(model.eval(), inputs, {}).program
    workload = annotate(program, machine).workload
    plan = make_plan(workload, machine, budget or Budget(), fingerprint={}, time_limit_s=5.0)
    return insert(program, plan), plan


def found(model: nn.Module, *inputs: torch.Tensor) -> tuple[Segment, ...]:
    return segments(*planned(model, *inputs))


def targets(module: fx.GraphModule, names: tuple[str, ...]) -> list[str]:
    nodes = {node.name: node for node in module.graph.nodes}
    return [str(nodes[name].target) for name in names]


class Layer(nn.Module):
    def __init__(self, shift: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.shift = shift

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return torch.tanh(y * 2 + self.shift) + x


class Layers(nn.Module):
    def __init__(self, *shifts: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(shift) for shift in shifts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_products_stay_out_and_equal_layers_have_one_key() -> None:
    module, plan = planned(Layers(1.0, 1.0, 3.0), torch.randn(2, WIDTH))
    first, second, third = segments(module, plan)
    assert targets(module, first.ops) == [
        "aten.mul.Tensor",
        "aten.add.Tensor",
        "aten.tanh.default",
        "aten.add.Tensor",
    ]
    assert first.key == second.key != third.key
    assert len(first.inputs) == 2
    assert first.outputs == first.ops[-1:]


def test_other_shapes_and_strides_are_other_kernels() -> None:
    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(x * 2)

    keys = {
        found(Scaled(), x)[0].key
        for x in (
            torch.randn(4, 4),
            torch.randn(4, 5),
            torch.randn(4, 4).t(),
            torch.randn(4, 4).to(torch.bfloat16),
        )
    }
    assert len(keys) == 4


def test_a_move_ends_a_run() -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.randn(1 << 20))
            self.shift = nn.Parameter(torch.randn(1 << 20))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.tanh(x + 1) * self.scale
            return torch.sin(x * 2) + self.shift + 1

    x = torch.randn(1 << 20)
    whole = found(Weighted(), x)
    assert [len(s.ops) for s in whole] == [7]
    module, plan = planned(Weighted(), x, budget=Budget(cpu=13 << 20))
    number = {node.name: i for i, node in enumerate(module.graph.nodes)}
    steps = [
        number[n.name]
        for n in module.graph.nodes
        if n.target in moves.MOVES and n.target is not moves.resident
    ]
    assert steps
    for segment in segments(module, plan):
        first, last = number[segment.ops[0]], number[segment.ops[-1]]
        assert last - first == len(segment.ops) - 1
        assert not any(first < step < last for step in steps)


class Mixed(nn.Module):
    """Element-wise ops around one op that must stay eager."""

    count: torch.Tensor

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.register_buffer("count", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(x * 2)
        if self.name == "in place":
            self.count.add_(1)
        elif self.name == "random":
            x = x + torch.rand(WIDTH)
        elif self.name == "index":
            x = x[:, torch.arange(WIDTH, dtype=torch.int64).flip(0)]
        elif self.name == "integers":
            x = x + torch.floor_divide(x.to(torch.int64), 3)
        return torch.sin(x + 1)


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("in place", "aten.add_.Tensor"),
        ("random", "aten.rand.default"),
        ("index", "aten.index.Tensor"),
        ("integers", "aten.floor_divide.default"),
    ],
)
def test_what_has_effects_or_looks_up_stays_out(name: str, target: str) -> None:
    module, plan = planned(Mixed(name), torch.randn(2, WIDTH))
    inside = [t for s in segments(module, plan) for t in targets(module, s.ops)]
    assert target in [str(node.target) for node in module.graph.nodes]
    assert target not in inside
    assert "aten.tanh.default" in inside


def test_views_that_others_read_are_taken_beside_the_kernel() -> None:
    class Views(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            before = x.transpose(0, 1)
            inner = x.reshape(-1)
            y = torch.tanh(inner * 2)
            after = y.view(WIDTH, 2)
            z = torch.sin(after + before)
            return before, after, z

    (segment,) = found(Views(), torch.randn(2, WIDTH))
    assert len(segment.views_before) == 1
    assert len(segment.views_after) == 1
    assert len(segment.outputs) == 2
    assert set(segment.inputs) <= {"x", *segment.views_before}


def test_a_run_that_would_need_more_memory_is_cut() -> None:
    class Narrow(nn.Module):
        """The wide input is gone when the wider output comes; in one kernel they would meet."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, 4 * WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            wide: torch.Tensor = self.linear(x).view(4, WIDTH)
            return (wide * 2).sum(0).repeat(8)

    module, plan = planned(Narrow(), torch.randn(WIDTH))
    (segment,) = segments(module, plan)
    assert targets(module, segment.ops)[-1] == "aten.sum.dim_IntList"
    row_bytes = 4 * WIDTH
    # Op by op, the repetition is the most: the sum, eight rows, and a row that the kernel takes for itself.
    assert max(live_bytes(plan.workload)) == 10 * row_bytes
    assert segment.scratch_limit_bytes == 5 * row_bytes


def test_dynamic_shapes_have_no_segments() -> None:
    machine = preset("cpu-nvme")
    batch = torch.export.Dim("batch", min=2, max=8)
    program = capture(
        Layers(1.0).eval(), (torch.randn(4, WIDTH),), {}, dynamic_shapes={"x": {0: batch}}
    ).program
    workload = annotate(program, machine).workload
    plan = make_plan(workload, machine, Budget(), fingerprint={}, time_limit_s=5.0)
    assert segments(insert(program, plan), plan) == ()


def test_tensors_without_elements_and_of_other_types_stay_out() -> None:
    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            turned = torch.view_as_real(torch.complex(x, x * 2) * 2)
            none = torch.tanh(x[:0] * 2) + 1
            return torch.sin(turned * 2) + 1, none, torch.abs(x.to(torch.int8) * 2) + 1

    module, plan = planned(Odd(), torch.randn(2, WIDTH))
    values = {node.name: node.meta.get("val") for node in module.graph.nodes}
    seen = [
        values[name] for s in segments(module, plan) for name in (*s.ops, *s.inputs, *s.outputs)
    ]
    assert seen
    assert all(v.numel() and v.dtype == torch.float32 for v in seen)
