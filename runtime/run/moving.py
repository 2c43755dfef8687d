"""Which nodes of an inserted graph have memory that comes and goes, or holds what outlives runs and is changed.

A graph of the device finds its values at the addresses of its capture. What leaves memory comes back to another
address, and what the store holds is told of every change: ops that touch such values run on the host each time.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from collections.abc import Set as AbstractSet

from torch import fx

from gascompile.core import moves
from gascompile.core.plan import Plan
from gascompile.core.program import op_name
from gascompile.runtime.devices.graph_rules import MOVES, Trait
from gascompile.runtime.run.calls import may_return_its_input


def moving(graph: fx.Graph, plan: Plan, stored: Collection[str]) -> frozenset[fx.Node]:
    """Return the nodes whose memory moves, those that may look at it, and ops that change what is ``stored``.

    Args:
        graph: with the moves of ``plan``.
        plan: which was inserted.
        stored: names of what the session's store holds.
    """
    if not stored:
        return frozenset()
    moved = {
        value
        for node in graph.nodes
        if node.target in moves.HEAP_MOVES
        for value in node.all_input_nodes
        if value.op != "placeholder" or node.args[0] is not value
    }
    neighbours: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "call_function" and node.target not in moves.MOVES and _may_look(node):
            for read in node.all_input_nodes:
                neighbours.setdefault(read, []).append(node)
                neighbours.setdefault(node, []).append(read)
    pending = list(moved)
    while pending:
        fresh = [n for n in neighbours.get(pending.pop(), ()) if n not in moved]
        moved.update(fresh)
        pending += fresh
    changing = {op.name for op in plan.workload.ops if not set(op.writes).isdisjoint(stored)}
    moved.update(n for n in graph.nodes if n.op == "call_function" and op_name(n) in changing)
    return frozenset(moved)


def steady(nodes: Sequence[fx.Node], trait: Trait, moving: AbstractSet[fx.Node]) -> Trait:
    """Return the trait of a step of ``nodes``, which no graph holds where one of their values is ``moving``."""
    touched = (value for node in nodes for value in (node, *node.all_input_nodes))
    is_steady = not moving or not any(value in moving for value in touched)
    return trait if is_steady or trait.host else trait._replace(host=MOVES)


def _may_look(node: fx.Node) -> bool:
    target = node.target
    return getattr(target, "__name__", "") == "getitem" or may_return_its_input(target)
