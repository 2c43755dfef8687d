"""The inserted graph reads as the plan, computes what the program does, and belongs to one plan only."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gascompile.core import moves
from gascompile.core.errors import PlanMismatchError
from gascompile.core.plan import Plan
from gascompile.core.program import STEP, op_name
from gascompile.core.steps import (
    Compute,
    Offload,
    Prefetch,
    Recompute,
    Release,
    Reload,
    Step,
    Wait,
)
from gascompile.passes.graph.insert import insert
from tests.runtime.toys import LINK, Toy, make_plan, make_program, make_workload, mlp


class DictMover:
    """Hands out copies of the weights and spoils them at their release."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        self.weights = weights
        self.staged: dict[tuple[str, int], torch.Tensor] = {}
        self.calls: list[Step | str] = []

    def resident(self, tensor: str) -> torch.Tensor:
        self.calls.append(tensor)
        return self.weights[tensor]

    def prefetch(self, tensor: str, link: str, address: int) -> None:
        assert link == LINK
        self.calls.append(Prefetch(op=0, tensor=tensor, link=link, size_bytes=0, address=address))

    def wait(self, tensor: str, address: int) -> torch.Tensor:
        self.calls.append(Wait(op=0, tensor=tensor, address=address))
        self.staged[tensor, address] = self.weights[tensor].clone()
        return self.staged[tensor, address]

    def release(self, tensor: str, address: int) -> None:
        self.calls.append(Release(op=0, tensor=tensor, address=address))
        self.staged.pop((tensor, address)).fill_(float("nan"))


def nodes_of(module: torch.fx.GraphModule, target: Callable[..., object]) -> list[torch.fx.Node]:
    return [node for node in module.graph.nodes if node.target is target]


def anonymous(step: Step) -> Step:
    assert not isinstance(step, Compute)
    if isinstance(step, (Prefetch, Offload, Reload)):
        return dataclasses.replace(step, op=0, size_bytes=0)
    return dataclasses.replace(step, op=0)


@pytest.mark.parametrize("seed", range(10))
def test_moves_are_called_in_plan_order_and_results_are_equal(tmp_path: Path, seed: int) -> None:
    toy = mlp(tmp_path)
    residents = frozenset(["layers.1.weight", "layers.2.bias"])
    plan = make_plan(toy.workload, residents=residents, seed=seed)
    module = insert(toy.program, plan)
    # Dead code elimination must leave the moves alone.
    module.graph.eliminate_dead_code()
    module.recompile()
    mover = DictMover(toy.weights)
    x = torch.randn(4, 96)
    for ours, eager in zip(module(mover, x), toy.eager(x), strict=True):
        assert torch.equal(ours, eager)
    planned = [anonymous(step) for step in plan.steps if not isinstance(step, Compute)]
    assert mover.calls == ["layers.1.weight", "layers.2.bias", *planned]


def test_ops_stand_where_the_plan_has_them(tmp_path: Path) -> None:
    toy = mlp(tmp_path)
    plan = make_plan(toy.workload, seed=3, merge=1.0)
    module = insert(toy.program, plan)
    found: list[str] = []
    for node in module.graph.nodes:
        if node.op == "call_function":
            is_move = node.target in moves.MOVES
            found.append(node.target.__name__ if is_move else node.name)
    expected = [
        plan.ops[s.op].name if isinstance(s, Compute) else type(s).__name__.lower()
        for s in plan.steps
    ]
    assert found == expected


def test_the_program_is_left_alone(tmp_path: Path) -> None:
    toy = mlp(tmp_path)
    before = toy.program.graph_module.code
    insert(toy.program, make_plan(toy.workload))
    assert toy.program.graph_module.code == before


def test_placeholders_are_the_mover_and_the_inputs(tmp_path: Path) -> None:
    toy = mlp(tmp_path)
    module = insert(toy.program, make_plan(toy.workload))
    names = [node.name for node in module.graph.nodes if node.op == "placeholder"]
    assert names == ["mover", "x0"]


def test_all_resident_has_no_moves(tmp_path: Path) -> None:
    toy = mlp(tmp_path)
    module = insert(toy.program, make_plan(toy.workload, residents=frozenset(toy.weights)))
    assert len(nodes_of(module, moves.resident)) == len(toy.weights)
    assert not any(nodes_of(module, m) for m in (moves.prefetch, moves.wait, moves.release))


def test_a_view_is_taken_again_in_a_later_staged_copy_only(tmp_path: Path) -> None:
    toy = mlp(tmp_path)
    transpose = torch.ops.aten.t.default
    apart = insert(toy.program, make_plan(toy.workload, merge=0.0))
    together = insert(toy.program, make_plan(toy.workload, merge=1.0))
    assert len(nodes_of(apart, transpose)) == 2
    assert len(nodes_of(together, transpose)) == 1


def test_the_code_reads_as_a_schedule(tmp_path: Path) -> None:
    toy = mlp(tmp_path, layers=2)
    code = insert(toy.program, make_plan(toy.workload)).code
    for move in ("prefetch", "wait", "release"):
        assert f"gascompile_core_moves_{move}(mover, 'layers.1.weight'" in code


def without(plan: Plan, kind: type[Step], tensor: str) -> Plan:
    steps = tuple(
        s
        for s in plan.steps
        if not (
            isinstance(s, (Prefetch, Wait, Release)) and isinstance(s, kind) and s.tensor == tensor
        )
    )
    return dataclasses.replace(plan, steps=steps)


def mismatches(toy: Toy) -> dict[str, tuple[Plan, str]]:
    plan = make_plan(toy.workload)
    renamed = (*plan.ops[:2], dataclasses.replace(plan.ops[2], name="other"), *plan.ops[3:])
    tensors = {n: t for n, t in plan.tensors.items() if n != "layers.1.bias"}
    computes = [s for s in plan.steps if isinstance(s, Compute)]
    no_last = tuple(s for s in plan.steps if s != computes[-1])
    stray = Wait(op=0, tensor="nobody", address=0)
    return {
        "op": (dataclasses.replace(plan, ops=renamed), "op 2 is 'add_tensor' in the program"),
        "shorter": (dataclasses.replace(plan, ops=plan.ops[:-1]), "longer than the other"),
        "order": (dataclasses.replace(plan, steps=no_last), "each op once"),
        "wait": (without(plan, Wait, "layers.1.weight"), r"'layers\.1\.weight' is used"),
        "tensor": (dataclasses.replace(plan, tensors=tensors), r"'layers\.1\.bias'"),
        "stray": (dataclasses.replace(plan, steps=(stray, *plan.steps)), "'nobody'"),
    }


@pytest.mark.parametrize("case", ["op", "shorter", "order", "wait", "tensor", "stray"])
def test_plans_of_another_program_are_refused(tmp_path: Path, case: str) -> None:
    toy = mlp(tmp_path)
    plan, message = mismatches(toy)[case]
    with pytest.raises(PlanMismatchError, match=message):
        insert(toy.program, plan)


class HeapMover(DictMover):
    """Moves what lies on the heap: what is dropped has no memory until it is read back."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        super().__init__(weights)
        self.outside: dict[str, list[float]] = {}

    def offload(self, tensor: str, link: str, value: torch.Tensor) -> None:
        self.calls.append(Offload(op=0, tensor=tensor, link=link, size_bytes=0))
        self.outside[tensor] = value.untyped_storage().tolist()

    def reload(self, tensor: str, link: str, value: torch.Tensor) -> None:
        self.calls.append(Reload(op=0, tensor=tensor, link=link, size_bytes=0))
        kept, storage = self.outside.pop(tensor), value.untyped_storage()
        storage.resize_(len(kept))
        torch.empty(0, dtype=torch.uint8).set_(storage).copy_(torch.tensor(kept))

    def settle(self, tensor: str) -> None:
        self.calls.append(Wait(op=0, tensor=tensor))

    def drop(self, tensor: str, value: torch.Tensor) -> None:
        self.calls.append(Release(op=0, tensor=tensor))
        value.untyped_storage().resize_(0)


def test_states_elements_and_recomputed_ops_are_nodes() -> None:
    aten = torch.ops.aten
    scale = torch.randn(8)
    x = torch.randn(8, 8)

    def body(w: dict[str, torch.fx.Proxy], x: torch.fx.Proxy) -> list[torch.fx.Proxy]:
        def call(target: Callable[..., object], *args: object) -> torch.fx.Proxy:
            return x.tracer.create_proxy("call_function", target, args, {})

        normed = call(aten.native_layer_norm.default, x, [8], None, None, 1e-5)
        y = call(operator.getitem, normed, 0)
        product = call(aten.mul.Tensor, y, w["scale"])
        turned = call(aten.t.default, product)
        first = call(aten.mm.default, product, turned)
        second = call(aten.mm.default, first, turned)
        return [call(aten.add.Tensor, second, y)]

    program = make_program({"scale": scale}, [x], body, states=frozenset({"scale"}))
    workload = make_workload(program)
    normed, _, product, _, first, *_ = (op.name for op in workload.ops)
    element = f"%{normed}.0"

    def out(name: str, op: int) -> list[Step]:
        return [
            Offload(op=op, tensor=name, link=LINK, size_bytes=256),
            Wait(op=op, tensor=name),
            Release(op=op, tensor=name),
        ]

    def back(name: str, op: int) -> list[Step]:
        return [Reload(op=op, tensor=name, link=LINK, size_bytes=256), Wait(op=op, tensor=name)]

    steps: list[Step] = [
        *(Compute(op=op) for op in range(5)),
        *out(element, 5),
        *out("scale", 5),
        Release(op=5, tensor=f"%{product}"),
        *back(element, 5),
        *back("scale", 5),
        Recompute(op=5, source=2),
        *(Compute(op=op) for op in range(5, 7)),
    ]
    plan = dataclasses.replace(make_plan(workload), steps=tuple(steps))
    module = insert(program, plan)
    mover = HeapMover({"scale": scale.clone()})
    (found,) = module(mover, x)
    (expected,) = program.graph_module(scale, x)
    assert torch.equal(found, expected)
    made = [anonymous(s) for s in steps if not isinstance(s, (Compute, Recompute))]
    assert [call for call in mover.calls if not isinstance(call, str)] == made
    lines = [line.strip() for line in module.code.splitlines()]
    (again,) = (i for i, line in enumerate(lines) if line.startswith(f"{product}_1 = "))
    assert f"{product}_1" in lines[again + 1] and "aten.t" in lines[again + 1]
    # The op is there twice, the view is taken twice, and nothing else is.
    assert module.code.count("aten.mul.Tensor") == module.code.count("aten.t.default") == 2
    assert [op_name(n) for n in module.graph.nodes if STEP in n.meta].count(first) == 1


def test_a_move_of_what_nobody_has_made_is_refused(tmp_path: Path) -> None:
    toy = mlp(tmp_path)
    plan = make_plan(toy.workload)
    early = Offload(op=0, tensor=f"%{toy.workload.ops[3].name}", link=LINK, size_bytes=4)
    with pytest.raises(PlanMismatchError, match="not a result of an op before op 0"):
        insert(toy.program, dataclasses.replace(plan, steps=(early, *plan.steps)))
