"""Late updates: ops that change what lasts, and might as well run once all others of a run have.

An optimizer updates each parameter as soon as nobody reads it any more, so that its gradient can go. Small ones take
less than their calls do: where there is room for their gradients, all of them run in one call at the end.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable

import torch
from torch import fx

from gascompile.core import moves
from gascompile.core.plan import Plan
from gascompile.runtime.run.calls import direct, joined, may_return_its_input

_MOST_BYTES = 4 << 20
"""[Empirical] Of gradients that wait: updates of more take milliseconds, of which their calls are a few percent."""
_COPIES = 3
"""Of these gradients that an update of all takes, and leaves, for itself."""
Root = fx.Node | str
"""Whose memory a value lies in: an op's own, or by name what lasts, or any input's."""
_WRITE_MORE = ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
"""Ops that write to arguments of which their schema does not say so."""


def late_updates(graph: fx.Graph, plan: Plan, fixed_bytes: int) -> frozenset[fx.Node]:
    """Return the updates of an inserted graph that may run after all other ops; none where anything moves.

    Nothing between touches what such an update changes, or changes what it reads, and memory for all gradients that
    wait is within the budget.

    Args:
        graph: with the moves of ``plan``.
        plan: of a run on the processor.
        fixed_bytes: of the budget, what is not for ops.
    """
    tier = plan.machine.compute_tier
    budget_bytes = plan.budget_bytes.get(tier)
    still = all(n.target is moves.resident or n.target not in moves.MOVES for n in graph.nodes)
    if not still or budget_bytes is None:
        return frozenset()
    room_bytes = min(
        _MOST_BYTES, (budget_bytes - fixed_bytes - plan.peak_bytes.get(tier, 0)) // _COPIES
    )
    sizes = _made_bytes(plan)
    roots = _roots(graph)
    read: set[Root] = set()
    written: set[Root] = set()
    # Of updates found so far: they may run in any order.
    late_touched: set[Root] = set()
    late_written: set[Root] = set()
    late = []
    for node in reversed(graph.nodes):
        if node.op != "call_function" or node.target is moves.resident:
            continue
        touched, changes = _of(roots, node.all_input_nodes), _of(roots, _written(node))
        is_free = not (
            changes & (read | written | late_touched) or touched & (written | late_written)
        )
        if is_free and joined(direct(node.target)) is not None:
            size_bytes = sum(sizes[root.name] for root in touched if isinstance(root, fx.Node))
            if size_bytes <= room_bytes:
                room_bytes -= size_bytes
                late.append(node)
                late_touched |= touched
                late_written |= changes
                continue
        read |= touched
        written |= changes
    return frozenset(late)


def _made_bytes(plan: Plan) -> Counter[str]:
    """Return what each op's results take, by its name; of views nothing."""
    made_bytes = Counter[str]()
    for tensor in plan.workload.tensors:
        name, _, number = tensor.name.removeprefix("%").rpartition(".")
        is_part = bool(name) and number.isdigit()
        made_bytes[name if is_part else tensor.name.removeprefix("%")] += tensor.size_bytes
    return made_bytes


def _of(roots: dict[fx.Node, frozenset[Root]], nodes: Iterable[fx.Node]) -> set[Root]:
    return {root for node in nodes for root in roots[node]}


def _roots(graph: fx.Graph) -> dict[fx.Node, frozenset[Root]]:
    """Return in whose memory each node's value may lie."""
    roots: dict[fx.Node, frozenset[Root]] = {}
    for node in graph.nodes:
        own: frozenset[Root] = frozenset((node,))
        if node.target is moves.resident:
            own = frozenset((str(node.args[1]),))
        elif node.op == "call_function":
            inputs = frozenset(_of(roots, node.all_input_nodes))
            if node.target is operator.getitem:
                own = inputs
            elif not isinstance(node.target, torch._ops.OpOverload) or may_return_its_input(
                node.target
            ):
                own |= inputs
        else:
            # Inputs, and constants, may share memory among each other.
            own = frozenset((f"%{node.op}",))
        roots[node] = own
    return roots


def _written(node: fx.Node) -> list[fx.Node]:
    """Return what an op writes to, as far as anybody says; of what is no op, all that it takes."""
    target = node.target
    if target is operator.getitem:
        return []
    if not isinstance(target, torch._ops.OpOverload) or (
        target.overloadpacket.__name__ in _WRITE_MORE
    ):
        return node.all_input_nodes
    values = [
        node.args[number] if number < len(node.args) else node.kwargs.get(argument.name)
        for number, argument in enumerate(target._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    operands: list[fx.Node] = []
    fx.node.map_arg(values, operands.append)
    return operands
