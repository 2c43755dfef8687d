"""Sums of gradients that go on beside ops: what they compute, what is exchanged in which order, and what they take."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from gascompile.core.checks.machine_files import preset
from gascompile.core.errors import RankError
from gascompile.core.machine import Interference
from gascompile.core.ranks import RankLayout
from gascompile.runtime.collectives import exchange
from gascompile.runtime.collectives.exchange import Exchange, exchanging
from gascompile.training.capture.joint import capture_joint
from gascompile.training.capture.rank_loss import RankLoss
from gascompile.training.optimizers import rank_ops
from gascompile.training.planning.rank_overlap import (
    Network,
    flying_bytes,
    overlapped,
    waits_s,
    with_flying,
    with_moves,
)
from gascompile.training.planning.step_program import StepOptions, StepProgram, step_program
from gascompile.training.planning.step_workload import step_workload
from gascompile.training.settings import Settings
from gascompile.training.state.aliasing import Storages
from gascompile.training.step_cache import rules_of
from tests.distributed.jobs import Tied, loss_fn, normed, wide

MACHINE = preset("cpu-nvme")
LAYOUT = RankLayout(rank=0, size=2)


_FLY = (*rank_ops.BEGINS, *rank_ops.ENDS)
hyper: list[torch.Tensor] = []
"""Of the newest step."""


def step_of(model: nn.Module, *, accumulates: bool = False) -> StepProgram:
    settings = Settings(layout=LAYOUT, accumulate=1 + accumulates)
    batch = [torch.randn(4, 48), torch.randint(0, 3, (4,))]
    storages, optimizer = Storages(model), torch.optim.AdamW(model.parameters())
    joint = capture_joint(model, RankLoss(loss_fn, 2), batch, storages)
    rules = rules_of(optimizer, joint.tensors, storages, list(joint.gradients), settings)
    options = StepOptions(layout=LAYOUT, accumulates=accumulates)
    hyper.append(rules.hyper(0, dict.fromkeys(rules.slots, 0), 1))
    return step_program(joint, rules, name="step", options=options)


def is_exchange(node: fx.Node) -> bool:
    return rank_ops.exchanges(node.target)


class Alone:
    """Stands for the exchange of the first of two ranks, the other of which has the same."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []
        self._begun: deque[torch.Tensor] = deque()
        self._gathers: deque[int] = deque()

    def add(self, values: torch.Tensor) -> None:
        self.told.append(("add", values.numel()))
        values.mul_(2)

    def add_part(self, values: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        self.told.append(("part", values.numel()))
        return values[: sizes[0]] * 2

    def begin_part(self, values: torch.Tensor, sizes: Sequence[int]) -> None:
        self._begun.append(self.add_part(values, sizes))

    def end_part(self) -> torch.Tensor:
        return self._begun.popleft()

    def gather(self, values: torch.Tensor, sizes: Sequence[int], part: Any = None) -> None:
        self.told.append(("gather", values.numel()))
        values[sizes[0] :] = 0.5

    def begin_gather(self, values: torch.Tensor, sizes: Sequence[int]) -> None:
        self.told.append(("gather", values.numel()))
        self._gathers.append(sizes[0])

    def end_gather(self, values: torch.Tensor) -> None:
        values[self._gathers.popleft() :] = 0.5

    def abandon(self) -> None:
        assert not self._begun
        assert not self._gathers


def run(step: StepProgram) -> tuple[list[torch.Tensor], list[tuple[str, int]]]:
    """Run a step on made-up values; return what it has computed and changed, and what was exchanged."""
    generator = torch.Generator().manual_seed(2)
    env: dict[fx.Node, Any] = {}
    held = []
    alone: Any = Alone()
    with exchanging(alone), torch.no_grad():
        for node in step.program.graph_module.graph.nodes:
            if node.op == "placeholder":
                like = node.meta["val"]
                value = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
                is_index = not like.is_floating_point()
                if node.name.startswith("hyper"):
                    env[node] = hyper[-1]
                    continue
                env[node] = (
                    value.zero_() if is_index else value.uniform_(0.0, 0.05, generator=generator)
                )
                held.append(env[node])
            elif node.op == "call_function":
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
                env[node] = node.target(*args, **kwargs)
            else:
                held += pytree.tree_leaves(fx.node.map_arg(node.args, env.__getitem__))
    return held, alone.told


@pytest.mark.parametrize(("model", "accumulates"), [(wide, False), (Tied, True), (normed, False)])
def test_the_same_is_computed_and_exchanged_in_the_same_order(
    model: Any, accumulates: bool
) -> None:
    torch.manual_seed(0)
    step = step_of(model(), accumulates=accumulates)
    beside = overlapped(step)
    assert beside is not None
    (found, told), (wanted, wanted_told) = run(beside), run(step)
    assert told == wanted_told
    for own, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(own, other, rtol=0.0, atol=0.0, equal_nan=True)
    assert not any(value.isnan().any() for value in wanted)
    targets: list[object] = [node.target for node in beside.program.op_nodes()]
    for begin, end in zip(rank_ops.BEGINS, rank_ops.ENDS, strict=True):
        assert targets.count(begin) == targets.count(end) > 0
        assert rank_ops.BEGINS[begin] not in targets


def test_what_is_under_way_is_memory_of_the_ops_beside_it() -> None:
    step = step_of(wide())
    beside = overlapped(step)
    assert beside is not None
    workload = step_workload(beside, MACHINE)
    counted = with_flying(workload, beside)
    nodes = beside.program.op_nodes()
    for number, (before, after) in enumerate(zip(workload.ops, counted.ops, strict=True)):
        begun = [n for n in nodes[:number] if n.target in rank_ops.BEGINS]
        ended = sum(n.target in rank_ops.ENDS for n in nodes[:number])
        flying = sum(map(flying_bytes, begun[ended:]))
        assert after.workspace_bytes - before.workspace_bytes == flying
    assert counted != workload
    assert with_flying(step_workload(step, MACHINE), step) == step_workload(step, MACHINE)


def test_an_exchange_takes_what_ops_leave_of_it() -> None:
    step = step_of(wide())
    beside = overlapped(step)
    assert beside is not None
    nodes = beside.program.op_nodes()
    begin = next(i for i, n in enumerate(nodes) if n.target is rank_ops.begin_part)
    end = next(i for i, n in enumerate(nodes) if n.target is rank_ops.end_part)
    names = [node.name for node in nodes[begin + 1 : end]]
    assert names
    network = {nodes[begin].name: 1.0, nodes[end].name: 1.0}
    for each_s, wanted in ((0.0, 1.0), (0.5 / len(names), 0.5 + 0.2 * 0.5), (9.0, 0.2)):
        times = dict.fromkeys(names, each_s)
        found = waits_s(beside, times, Network(time_s=network, busy=0.2))
        assert found[nodes[end].name] == pytest.approx(wanted)
        assert found[nodes[begin].name] == 0.0
    # An exchange that waits for its end waits for those before it, too.
    other = next(n.name for n in nodes[end:] if n.target not in _FLY and is_exchange(n))
    found = waits_s(beside, {}, Network(time_s={**network, other: 0.25}, busy=0.2))
    assert found[other] == pytest.approx(0.25)


def test_ranks_wait_for_who_comes_last_by_the_ops_since_they_met() -> None:
    step = step_of(wide())
    nodes = step.program.op_nodes()
    meetings = [i for i, node in enumerate(nodes) if rank_ops.exchanges(node.target)]
    times = {node.name: 1.0 for i, node in enumerate(nodes) if i not in meetings}
    found = waits_s(step, times, Network(time_s={}, busy=0.0, late=0.1))
    assert len(meetings) > 2
    for before, here in pairwise([-1, *meetings]):
        assert found[nodes[here].name] == pytest.approx(0.1 * (here - before - 1))
    # Who waits for a sum that went on beside ops has met the others.
    beside = overlapped(step)
    assert beside is not None
    nodes = beside.program.op_nodes()
    begin = next(i for i, node in enumerate(nodes) if node.target is rank_ops.begin_part)
    begun, own = nodes[begin].name, {nodes[begin + 1].name: 1.0}
    waiting = [n for n in nodes[begin:] if is_exchange(n) and n.target not in _FLY]
    last = waiting[0]
    for sum_s, wanted in ((0.0, 0.1), (9.0, 0.0)):
        found = waits_s(beside, own, Network(time_s={begun: sum_s}, busy=0.0, late=0.1))
        assert found[last.name] == pytest.approx(wanted)


def test_what_begins_while_another_is_under_way_takes_less() -> None:
    beside = overlapped(step_of(wide()))
    assert beside is not None
    nodes = beside.program.op_nodes()
    begins = [node.name for node in nodes if node.target in rank_ops.BEGINS]
    alone, beside_others = dict.fromkeys(begins, 1.0), dict.fromkeys(begins, 0.25)
    found = waits_s(beside, {}, Network(time_s=alone, flow_s=beside_others, busy=0.0))
    # Nothing else takes any time.
    now_s = free_s = 0.0
    done_s, num_short = deque[float](), 0
    for node in nodes:
        if node.target in rank_ops.BEGINS:
            num_short += free_s > now_s
            free_s = max(free_s, now_s) + (0.25 if free_s > now_s else 1.0)
            done_s.append(free_s)
        elif node.target in rank_ops.ENDS:
            now_s = max(now_s, done_s.popleft())
    assert num_short > 1
    assert sum(found.values()) == pytest.approx(now_s)
    assert now_s == pytest.approx(len(begins) - 0.75 * num_short)


def test_ops_lose_to_moves_unless_they_wait_for_other_ranks() -> None:
    step = step_of(wide())
    workload = step_workload(step, MACHINE)
    exchanges = {node.name for node in step.program.op_nodes() if is_exchange(node)}
    tier, size_of = MACHINE.compute_tier, len(workload.ops)
    ops = tuple(replace(op, time_s={**op.time_s, tier: 1.0}) for op in workload.ops)
    timed = replace(workload, ops=ops)
    network: Any = SimpleNamespace(moves_s_per_byte=1e-9, busy=0.25)
    found = with_moves(MACHINE, timed, step, network)
    share = 1 - 0.75 * len(exchanges) / size_of
    assert 0 < share < 1
    assert found.interference.op_s_per_byte == pytest.approx(1e-9 * share)
    assert replace(found, interference=MACHINE.interference) == MACHINE
    # Of a machine that was found to lose more without other ranks that is what counts.
    worse = replace(MACHINE, interference=Interference(op_s_per_byte=1e-8))
    assert with_moves(worse, timed, step, network) is worse
    unknown: Any = SimpleNamespace(moves_s_per_byte=None, busy=0.25)
    assert with_moves(MACHINE, timed, step, unknown) is MACHINE


def test_what_is_under_way_when_a_run_ends_is_waited_for_by_nobody() -> None:
    found = Exchange.__new__(Exchange)
    found.is_hung = False
    values = [torch.zeros(4), torch.ones(4)]
    found._begun = deque([exchange._Begun(SimpleNamespace(), values[0], values[1], (2, 2))])  # type: ignore[arg-type]
    kept = len(exchange._kept)
    with pytest.raises(RankError), exchanging(found):
        raise RankError("another rank", rank=1)
    assert found.is_hung
    assert not found._begun
    assert [id(value) for value in exchange._kept[kept:]] == [id(value) for value in values]
    del exchange._kept[kept:]


def test_a_parameter_in_several_parts_takes_as_many_gathers() -> None:
    bounds, parts = [0, 2, 5, 5, 8, 12], [torch.ones(2), torch.ones(3)]
    graph, alone = fx.Graph(), Alone()
    nodes = [graph.placeholder(name) for name in "ab"]
    node = graph.call_function(rank_ops.whole, (nodes, [3, 4], [4, 1], bounds))
    with exchanging(alone):  # type: ignore[arg-type]
        node.meta["val"] = rank_ops.whole(parts, [3, 4], [4, 1], bounds)
    told = [("gather", size_bytes // 4) for size_bytes in rank_ops.gathered(node)]
    assert told == alone.told == [("gather", 5), ("gather", 7)]
