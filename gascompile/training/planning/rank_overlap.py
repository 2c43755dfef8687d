"""Rank overlap: sums of gradients over the ranks, and gathers of what they update, that go on beside other ops.

A sum begins where the gradient is whole, and its end, with the update that waits for it, moves to where the next one
begins. What is updated is on its way to the other ranks until those sums end, as no rank waits for another then that
is a little late. Ranks begin the same exchanges in the same order whether they wait for each or not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import fx

from gascompile.core.machine import Machine
from gascompile.core.program import add_node, copied_graph, graph_module_of
from gascompile.core.workload import Workload
from gascompile.distributed.ladder import Ladder
from gascompile.training.optimizers import rank_ops
from gascompile.training.planning.step_program import StepProgram

if TYPE_CHECKING:
    from gascompile.training.step_cache import PlannedStep

_MOST_BYTES = 64 << 20
"""Of exchanges under way at a time: what is sent and what is received. [Empirical] Four ranges of 16 MiB, of which a
network of 1 GB/s has 60 ms to bring, about as long as a processor takes for the layer of a billion parameters."""
_MOVES = "what ops lose to moves, measured with the ops and moves of all ranks at work"
forced: bool | None = None
"""Takes the place of the choice, for tests."""
_FOLLOWS = ("gascompile_updates", "gascompile_ranks")
_PLAIN = (torch.ops.aten.linalg_vector_norm.default, torch.ops.aten.zero_.default)


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """What exchanges take."""

    time_s: Mapping[str, float]
    """By the name of the op, without anything beside it."""
    busy: float
    """Share of that which ops beside it lose to it."""
    flow_s: Mapping[str, float] = field(default_factory=dict)
    """By the name of the op, with other exchanges under way; as long as without, where it is not there."""
    begin_s: Mapping[str, float] = field(default_factory=dict)
    """What ops wait for those to begin that go on beside them."""
    late: float = 0.0
    """What ranks wait for whoever comes last to one that is waited for, as a share of the ops since the one before."""


def overlapped(step: StepProgram) -> StepProgram | None:
    """Return a step whose sums of gradients go on beside ops; ``None`` where it has none that could."""
    graph = copied_graph(step.program.graph_module.graph)
    blocks = _blocks(graph)
    if not blocks:
        return None
    place = {node: number for number, node in enumerate(graph.nodes)}
    moves = [(block, _next_exchange(block[-1])) for block in blocks]
    gathers = _Gathers(graph)
    for block, before in moves:
        # Of a user's own op between them something might be read before.
        if all(u in block or place[u] >= place[before] for node in block for u in node.users):
            late = _begun(graph, block)
            gathers.end_all(before)
            for node in late:
                before.prepend(node)
                if node.target is rank_ops.gather:
                    gathers.begin(node)
    gathers.end_all(graph.output_node())
    graph.lint()
    module = graph_module_of(step.program.graph_module, graph)
    return replace(step, program=replace(step.program, graph_module=module))


class _Gathers:
    """Gathers that have begun and not ended."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._begun: deque[fx.Node] = deque()

    def begin(self, node: fx.Node) -> None:
        """Let a gather begin only, unless something reads the parameter after it, or it is too large."""
        parameter, bounds = node.args
        assert isinstance(parameter, fx.Node), "it gathers a parameter"
        if any(node < user and user.target is not rank_ops.gather for user in parameter.users):
            return
        size_bytes = flying_bytes(node)
        if size_bytes > _MOST_BYTES:
            return
        while sum(map(flying_bytes, self._begun)) + size_bytes > _MOST_BYTES:
            self._end(node)
        with self._graph.inserting_before(node):
            begun = add_node(self._graph, rank_ops.begin_gather, (parameter, bounds))
        begun.meta["val"] = parameter.meta["val"].new_empty(())
        self._graph.erase_node(node)
        self._begun.append(begun)

    def end_all(self, before: fx.Node) -> None:
        """End all that have begun."""
        while self._begun:
            self._end(before)

    def _end(self, before: fx.Node) -> None:
        begun = self._begun.popleft()
        with self._graph.inserting_before(before):
            args = (begun.args[0], begun, begun.args[1])
            add_node(self._graph, rank_ops.end_gather, args).meta["val"] = None


def is_wanted(chosen: bool) -> bool:
    """Return whether gradients are to be summed beside ops, as ranks have chosen."""
    return chosen if forced is None else forced


def gains_beside_ops(step: PlannedStep, *, busy: float, late: float, gap: float) -> bool:
    """Return whether a step may become faster by more than ``gap`` of it, as its sums go on beside ops.

    Args:
        step: whose sums and gathers wait for the other ranks.
        busy: share of an exchange that ops beside it lose.
        late: share of its ops that ranks wait for each other where they wait.
        gap: to which its seconds are known.
    """
    if forced is not None:
        return False
    plan = step.plan
    nodes = list(zip(step.program.program.op_nodes(), plan.ops, strict=True))
    beside = rank_ops.BEGINS.values()
    moved_s = sum(op.time_s for node, op in nodes if node.target in beside)
    own_s = sum(op.time_s for node, op in nodes if not rank_ops.exchanges(node.target))
    return (1 - busy) * moved_s + late * own_s > gap * plan.certificate.predicted_s


def _blocks(graph: fx.Graph) -> list[list[fx.Node]]:
    """Return the sums of a parameter's gradient with what follows from them, each as they stand side by side."""
    blocks: list[list[fx.Node]] = []
    block: list[fx.Node] = []
    for node in graph.nodes:
        if node.target is rank_ops.add_part and (not block or _ends(block)):
            block = [node]
            blocks.append(block)
        elif block and _follows(node):
            block.append(node)
        elif block:
            block = []
    return blocks


def _ends(block: Sequence[fx.Node]) -> bool:
    """Return whether the next sum is of another parameter."""
    return any(node.target is not rank_ops.add_part for node in block)


def _follows(node: fx.Node) -> bool:
    target = node.target
    is_ours = isinstance(target, torch._ops.OpOverload) and target.namespace in _FOLLOWS
    return (is_ours and target is not rank_ops.add) or target in _PLAIN


def _next_exchange(node: fx.Node) -> fx.Node:
    """Return where a sum ends: before the next exchange, so that ranks begin them in one order, or with the step."""
    node = node.next
    while node.op != "output" and not rank_ops.exchanges(node.target):
        node = node.next
    return node


def _begun(graph: fx.Graph, block: list[fx.Node]) -> list[fx.Node]:
    """Let the last sums of a block begin only, as many as may be under way; return what is to come later, in order."""
    sums = [node for node in block if node.target is rank_ops.add_part]
    size_bytes, count = 0, 0
    for node in reversed(sums):
        size_bytes += flying_bytes(node)
        count += size_bytes <= _MOST_BYTES
    if not count:
        return []
    for node in sums[len(sums) - count :]:
        with graph.inserting_before(node):
            begun = add_node(graph, rank_ops.begin_part, node.args)
        begun.meta["val"] = node.meta["val"].new_empty(())
        node.target = rank_ops.end_part
        node.args = (begun, node.args[3], node.args[4])
    # What takes earlier sums stands behind all of them.
    first = sums[len(sums) - count]
    return block[block.index(first) :]


def flying_bytes(node: fx.Node) -> int:
    """Return what an exchange has in memory until its end."""
    return 2 * rank_ops.exchanged(node)[0]


def with_flying(workload: Workload, step: StepProgram) -> Workload:
    """Return a workload whose ops have the memory of the exchanges that go on beside them."""
    flying: list[int] = []
    held: dict[str, int] = {}
    for node in step.program.op_nodes():
        held[node.name] = sum(flying)
        if node.target in rank_ops.BEGINS:
            flying.append(flying_bytes(node))
        elif node.target in rank_ops.ENDS:
            flying.pop(0)
    ops = tuple(
        replace(op, workspace_bytes=op.workspace_bytes + held.get(op.name, 0))
        for op in workload.ops
    )
    return replace(workload, ops=ops)


def network_of(step: StepProgram, ladder: Ladder) -> Network:
    """Return what the exchanges of a step take by a network's ladder."""
    time_s, flow_s, begin_s = {}, {}, {}
    for node in step.program.op_nodes():
        if not rank_ops.waits(node.target):
            continue
        size_bytes, divided = rank_ops.exchanged(node)
        if node.target in (rank_ops.gather, rank_ops.begin_gather, rank_ops.whole):
            time_s[node.name] = sum(map(ladder.gather_s, rank_ops.gathered(node)))
        else:
            time_s[node.name] = ladder.seconds(size_bytes, divided=divided)
        if node.target in rank_ops.BEGINS:
            begin_s[node.name] = ladder.begin_s(size_bytes)
            flow_s[node.name] = min(ladder.flow_s(size_bytes), time_s[node.name])
    return Network(
        time_s=time_s, busy=ladder.busy, flow_s=flow_s, begin_s=begin_s, late=ladder.late
    )


def waits_s(step: StepProgram, times_s: Mapping[str, float], network: Network) -> dict[str, float]:
    """Return what exchanges take of the processor's time, beside ops or not.

    Exchanges go on one after the other, and take less each where one begins before the last has ended. While ops run
    beside them they give up the share that these keep the processor busy.
    Ranks come to the ones that they wait for at times that differ by what the same ops take now and then.

    Args:
        step: the program.
        times_s: what other ops take.
        network: what exchanges take by themselves.
    """
    wait_of: dict[str, float] = {}
    now_s = free_s = since_s = 0.0
    flying: list[tuple[float, float]] = []
    for node in step.program.op_nodes():
        alone_s = network.time_s.get(node.name, 0.0)
        if node.target in rank_ops.BEGINS:
            wait_of[node.name] = network.begin_s.get(node.name, 0.0)
            begun_s = now_s + wait_of[node.name]
            if free_s > begun_s:
                alone_s = network.flow_s.get(node.name, alone_s)
            free_s = max(free_s, begun_s) + alone_s
            flying.append((free_s, alone_s))
        elif node.target in rank_ops.ENDS:
            done_s, alone_s = flying.pop(0)
            waited_s = min(max(done_s - now_s, 0.0), alone_s)
            wait_of[node.name] = waited_s + network.busy * (alone_s - waited_s)
            # Here ranks meet, and the network has taken longer than they differ by.
            since_s = 0.0 if waited_s > 0.0 else since_s
        elif rank_ops.exchanges(node.target):
            # It waits for those before it.
            wait_of[node.name] = max(free_s - now_s, 0.0) + alone_s + network.late * since_s
            since_s = 0.0
        else:
            since_s += times_s.get(node.name, 0.0)
        now_s += wait_of.get(node.name, times_s.get(node.name, 0.0))
    return wait_of


def with_moves(machine: Machine, workload: Workload, step: StepProgram, ladder: Ladder) -> Machine:
    """Return a machine whose ops lose what they were found to lose to the rank's own moves.

    What moves while ranks wait for each other takes nothing from ops; moves are taken to be spread over the step.
    """
    if not ladder.moves_s_per_byte:
        return machine
    waits = {node.name for node in step.program.op_nodes() if rank_ops.waits(node.target)}
    times_s = {op.name: op.time_s[machine.compute_tier] for op in workload.ops}
    all_s = sum(times_s.values())
    idle_s = (1 - ladder.busy) * sum(times_s[name] for name in waits if name in times_s)
    lost_s = ladder.moves_s_per_byte * (1 - idle_s / all_s if all_s else 1.0)
    before = machine.interference
    if before.op_s_per_byte >= lost_s:
        return machine
    source = f"{before.source}; {_MOVES}" if before.source else _MOVES
    return replace(machine, interference=replace(before, op_s_per_byte=lost_s, source=source))
