"""Programs captured on the processor run on another device: nothing in them names the old one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from gascompile.capture.export import capture
from gascompile.core.errors import UnsupportedOpError
from gascompile.core.program import Program
from gascompile.integrations.huggingface import register_pytrees
from gascompile.passes.graph.to_device import to_device
from tests import zoo

ELSEWHERE = torch.device("cuda:0")
NEED_CUDA = {"hubert", "mamba2", "modules", "reduced"}
"""Fake convolutions and recurrences on that device ask a build of torch that has it."""
SLOW = {"gemma3"}
"""Captured four times over for a list that it keeps; its ops are those of other decoders."""


class MakesTensors(nn.Module):
    """Everything that makes a tensor without being given one, and casts that name a device."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 8))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        positions = torch.arange(8, device=x.device) + torch.arange(0, 16, 2)
        mask = torch.full((8, 8), -1.0, device=x.device).triu(1) + torch.zeros(8, 8)
        table = torch.tensor([1.0, 2.0, 3.0])
        scale = torch.scalar_tensor(2.0) + torch.ones(()) + torch.eye(8).sum() + table.sum()
        moved = x.to(device="cpu", dtype=torch.float64).to(torch.float32)
        steps = torch.linspace(0, 1, 8) + torch.empty(8, device="cpu").zero_()
        self.count.add_(1)
        y = nn.functional.linear(moved, self.weight) + mask * scale + positions + steps
        return y, self.count + 1


def captured(model: nn.Module, kwargs: dict[str, Any]) -> Program:
    register_pytrees()
    return capture(model.eval(), (), kwargs).program


def devices_after(program: Program, device: torch.device) -> set[torch.device]:
    """Run the program on fake tensors of a device; return where everything that ops make lies."""
    mode = FakeTensorMode(allow_non_fake_inputs=False)
    found: set[torch.device] = set()

    class Watching(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            value = super().run_node(n)
            tensors = [v for v in pytree.tree_leaves(value) if isinstance(v, torch.Tensor)]
            found.update(tensor.device for tensor in tensors)
            return value

    inputs: list[torch.Tensor | None] = []
    specs = {spec.name: spec for spec in program.inputs}
    for node in program.graph_module.graph.nodes:
        if node.op != "placeholder":
            continue
        bound = program.bound.get(program.bindings.get(node.name, ""))
        spec = specs.get(node.name)
        dtype, shape = (
            (bound.dtype, bound.shape) if bound else (spec.dtype, spec.upper_shape())  # type: ignore[union-attr]
        )
        if dtype is None:
            inputs.append(None)
            continue
        with mode:
            inputs.append(torch.empty(shape, dtype=getattr(torch, dtype), device=device))
    with mode, torch.no_grad():
        Watching(program.graph_module).run(*inputs)
    return found


def test_it_is_the_same_program_on_the_processor() -> None:
    program = captured(MakesTensors(), {"x": torch.ones(8, 8)})
    assert to_device(program, "cpu") is program


def test_everything_is_made_on_the_new_device() -> None:
    program = captured(MakesTensors(), {"x": torch.ones(8, 8)})
    assert devices_after(to_device(program, ELSEWHERE), ELSEWHERE) == {ELSEWHERE}
    # Without the pass the same run meets tensors of two devices.
    with pytest.raises(RuntimeError, match="device"):
        devices_after(program, ELSEWHERE)


def test_the_program_it_was_given_stays_as_it_is() -> None:
    program = captured(MakesTensors(), {"x": torch.ones(8, 8)})
    before = program.graph_module.code
    moved = to_device(program, ELSEWHERE)
    assert program.graph_module.code == before
    assert [node.name for node in moved.op_nodes()] == [node.name for node in program.op_nodes()]
    assert moved.bindings == program.bindings


@pytest.mark.parametrize("name", sorted(zoo.CASES.keys() - NEED_CUDA - SLOW)[::3])
def test_models_run_on_the_new_device(name: str) -> None:
    model, kwargs = zoo.make(name)
    program = captured(model, kwargs)
    assert devices_after(to_device(program, ELSEWHERE), ELSEWHERE) <= {ELSEWHERE}


def test_an_op_for_the_processor_alone_is_refused() -> None:
    program = captured(MakesTensors(), {"x": torch.ones(8, 8)})
    graph = program.graph_module.graph
    first = program.op_nodes()[0]
    with graph.inserting_before(first):
        (x,) = (node for node in graph.nodes if node.name == program.inputs[0].name)
        graph.call_function(torch.ops.aten._weight_int4pack_mm_for_cpu.default, (x, x, 8, x))
    with pytest.raises(UnsupportedOpError, match=r"_for_cpu.*processor alone"):
        to_device(program, ELSEWHERE)
