"""Which steps a graph may hold, and how a run is divided."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import fx

from gascompile.core import moves
from gascompile.runtime.devices import graph_rules
from gascompile.runtime.devices.graph_groups import Group, divide
from gascompile.runtime.run.schedule import RunSchedule, RunStep

aten = torch.ops.aten


def node_of(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    return fx.Graph().create_node("call_function", target, args, kwargs)


@pytest.mark.parametrize(
    ("node", "reason"),
    [
        (node_of(aten.mm.default, 0, 0), ""),
        (node_of(aten.rsqrt.default, 0), ""),
        (node_of(aten.index.Tensor, 0, [0]), ""),
        (node_of(aten.scaled_dot_product_attention.default, 0, 0, 0), ""),
        (
            node_of(aten.scaled_dot_product_attention.default, 0, 0, 0, None, 0.1),
            graph_rules.RANDOM,
        ),
        (node_of(aten.dropout.default, 0, 0.5, False), ""),
        (node_of(aten.dropout.default, 0, 0.5, True), graph_rules.RANDOM),
        (node_of(aten.rand.default, [2]), graph_rules.RANDOM),
        (node_of(aten.nonzero.default, 0), graph_rules.VALUES),
        (node_of(aten._local_scalar_dense.default, 0), graph_rules.VALUES),
        (node_of(aten.linalg_qr.default, 0), graph_rules.WAITS),
        (node_of(aten._linalg_eigh.default, 0), graph_rules.WAITS),
        (node_of(moves.gather, 0, "w", 0), graph_rules.MOVE),
        (node_of(moves.linear_tile, None, 0, 0, None, 0, 4), ""),
        (node_of(dataclasses.replace, 0), graph_rules.FOREIGN),
        (node_of(torch.ops.higher_order.cond, 0, 0, 0, 0), graph_rules.FOREIGN),
    ],
    ids=str,
)
def test_which_ops_are_captured(node: fx.Node, reason: str) -> None:
    assert graph_rules.host_reason(node) == reason


def test_tensors_elsewhere_are_not_captured() -> None:
    here, there = torch.zeros(2, device="meta"), torch.zeros(2)
    trait, device = graph_rules.Trait(), torch.device("meta")
    reason = graph_rules.value_reason
    assert reason(trait, (here, [here]), here, device) == ""
    assert reason(trait, (here, [there]), here, device) == graph_rules.ELSEWHERE
    assert reason(trait, (here,), (here, there), device) == graph_rules.ELSEWHERE


def test_what_depends_on_values_stays_outside_with_all_that_reads_it() -> None:
    def step(result: int, reads: tuple[int, ...], host: str = "") -> RunStep:
        trait = graph_rules.Trait(reads, host, launches=True, name=f"op{result}", num_ops=1)
        return RunStep(_nothing, _nothing, result, None, (), result, trait)

    values, move, release = graph_rules.VALUES, graph_rules.MOVE, graph_rules.RELEASE
    steps = (
        step(1, (0,)),
        step(2, (1,), values),
        step(3, (2, 1)),
        step(4, (1,)),
        step(5, (), release),
        step(6, (4,)),
        step(7, (), move),
        step(8, (6, 7, 3)),
        step(9, (6, 7)),
    )
    schedule = RunSchedule(steps=steps, slots=(None,) * 10, inputs=(("x", 0),), outputs=(6, 9))
    parts = divide(schedule, {})
    shown = [[s.result for s in p.steps] if isinstance(p, Group) else p.result for p in parts]
    assert shown == [[1], 2, 3, [4, 6], 5, 7, 8, [9]]
    groups = [part for part in parts if isinstance(part, Group)]
    assert [group.entries for group in groups] == [[], [], [7]]
    assert [sorted(group.exits) for group in groups] == [[1], [6], [9]]
    assert [p.result for p in divide(schedule, {0: values}) if isinstance(p, RunStep)] == [
        1, 2, 3, 4, 5, 6, 7, 8, 9,
    ]  # fmt: skip


def _nothing(*_: Any) -> Any:
    return ()
