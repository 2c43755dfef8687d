"""Ops are told apart by what their seconds depend on, and called on values made up for them."""

from __future__ import annotations

import torch
from torch import nn

from gascompile.capture.export import capture
from gascompile.core.program import Program
from gascompile.cost_models.measure import ops as measure_ops


class Twins(nn.Module):
    """Two equal layers of 2 MiB, a smaller one, and an op that looks at values."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(1024, 512, bias=False)
        self.back = nn.Linear(512, 1024, bias=False)
        self.second = nn.Linear(1024, 512, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.second(self.back(self.first(x)).relu())
        return found


def program_of(model: nn.Module, *args: torch.Tensor) -> Program:
    return capture(model.eval(), args, {}).program


def test_equal_layers_are_timed_once() -> None:
    program = program_of(Twins(), torch.randn(2, 1024))
    names = {node.name: measure_ops.signature(node, program) for node in program.op_nodes()}
    linears = [name for op, name in names.items() if op.startswith("linear")]
    assert linears[0] == linears[2] != linears[1]
    found = measure_ops.measure_ops(program.op_nodes(), program, limit_s=10.0)
    assert set(found) == set(names.values())
    assert all(time_s > 0 for time_s in found.values())


def test_the_state_of_random_numbers_is_kept() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    program = capture(model.train(), (torch.randn(2, 8),), {}).program
    before = torch.get_rng_state()
    measure_ops.measure_ops(program.op_nodes(), program, limit_s=10.0)
    assert torch.equal(torch.get_rng_state(), before)


def test_nothing_is_measured_without_time() -> None:
    program = program_of(Twins(), torch.randn(2, 1024))
    assert measure_ops.measure_ops(program.op_nodes(), program, limit_s=-1.0) == {}


def test_an_op_that_refuses_made_up_values_is_left_out() -> None:
    class Inverse(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = torch.linalg.inv(x).relu()
            return found

    program = program_of(Inverse(), torch.eye(4))
    found = measure_ops.measure_ops(program.op_nodes(), program, limit_s=10.0)
    assert any("relu" in name for name in found)
    # A matrix of ones has no inverse.
    assert not any("inv" in name for name in found)


def test_a_weight_beyond_the_block_is_timed_by_part_of_its_rows() -> None:
    with torch.device("meta"):
        model = nn.Linear(2048, 100_000, bias=False).eval()
    program = capture(model, (torch.zeros(1, 2048),), {}).program
    (time_s,) = measure_ops.measure_ops(program.op_nodes(), program, limit_s=10.0).values()
    # 800 MB cannot pass through a processor in the time that a thirteenth of them takes from its caches.
    assert time_s > 800e6 / 1e12


def test_sizes_that_are_not_known_have_no_signature() -> None:
    batch = torch.export.Dim("batch", min=1, max=8)
    program = capture(
        nn.Linear(4, 4).eval(), (torch.randn(3, 4),), {}, dynamic_shapes=({0: batch},)
    ).program
    assert [measure_ops.signature(node, program) for node in program.op_nodes()] == [None]


def test_what_runs_in_the_place_of_an_op_is_timed() -> None:
    program, called = program_of(Twins(), torch.randn(2, 1024)), []

    def linear(*values: torch.Tensor) -> torch.Tensor:
        called.append(values[1].shape)
        return nn.functional.linear(*values)

    other = {torch.ops.aten.linear.default: linear}
    nodes = list(program.op_nodes())
    found = measure_ops.measure_ops(nodes, program, limit_s=10.0, in_place_of=other)
    assert set(found) == {measure_ops.signature(node, program) for node in nodes}
    assert {*called} == {(512, 1024), (1024, 512)}
