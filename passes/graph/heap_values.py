"""Heap values: which node of a graph under change has now what lies on the heap, ops that run again included.

A tensor of the heap keeps its node while its bytes leave and come back. An op that runs again makes a new one, and
so do the views of the old result: whatever is read from there on is taken of the new one.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Mapping

from torch import fx

from gascompile.core.errors import PlanMismatchError
from gascompile.core.plan import Plan
from gascompile.core.program import STEP, add_node
from gascompile.core.steps import Compute, Recompute
from gascompile.core.tiles import result_name


def moved_on_heap(plan: Plan) -> frozenset[str]:
    """Return the tensors that move without a place in the arena."""
    return frozenset(
        step.tensor
        for step in plan.steps
        if not isinstance(step, (Compute, Recompute)) and step.address is None
    )


def taken_again(
    graph: fx.Graph, node: fx.Node, args: fx.node.Argument, kwargs: fx.node.Argument
) -> fx.Node:
    """Insert a second call of what ``node`` calls."""
    assert callable(node.target) and isinstance(args, tuple) and isinstance(kwargs, dict)
    again = add_node(graph, node.target, args, kwargs, node.name)
    again.meta = {key: value for key, value in node.meta.items() if key != STEP}
    return again


class HeapValues:
    """What has been made so far, as the steps are walked."""

    def __init__(
        self,
        graph: fx.Graph,
        ops: list[fx.Node],
        plan: Plan,
        bound: Mapping[str, fx.Node],
        current: Callable[[fx.Node], fx.Node],
    ) -> None:
        """Know the ops before their arguments are changed.

        Args:
            graph: under change.
            ops: its nodes, in order.
            plan: whose steps will be walked.
            bound: the nodes of weights and states that are at hand.
            current: returns the node to read now in the place of one.
        """
        self._graph, self._ops, self._current = graph, ops, current
        self._bound = bound
        self.latest: dict[fx.Node, fx.Node] = {}
        """Ops that have run again, and views of their results: who has the value now."""
        self._owner: dict[str, tuple[int, int | None]] = {}
        """Tensor -> the op that makes it, and which element of the result it is."""
        specs = plan.workload.ops
        for i, spec in enumerate(specs[: len(ops)]):
            own = result_name(spec.name, spec.writes)
            for name in spec.writes:
                if name == own:
                    self._owner.setdefault(name, (i, None))
                elif name.startswith(f"{own}."):
                    self._owner[name] = (i, int(name.removeprefix(f"{own}.")))
        self._elements: dict[int, list[tuple[str, int]]] = defaultdict(list)
        """Elements of results that move, by the op."""
        for name in sorted(moved_on_heap(plan)):
            op, element = self._owner.get(name, (0, None))
            if element is not None:
                self._elements[op].append((name, element))
        self._parts: dict[str, fx.Node] = {}
        """Nodes of those elements."""
        self._again = {
            step.source: ops[step.source] for step in plan.steps if isinstance(step, Recompute)
        }
        self._views = {i: self._views_of(node, plan) for i, node in self._again.items()}
        self._original = {
            node: (node.args, node.kwargs)
            for i, source in self._again.items()
            for node in (source, *(ops[view] for view in self._views[i]))
        }
        self._taken: list[fx.Node] = []

    def _views_of(self, source: fx.Node, plan: Plan) -> list[int]:
        """Return the ops that only look at an op's result, or at what such an op returns, in order."""
        number = {node: i for i, node in enumerate(self._ops)}
        views: set[int] = set()
        pending = [source]
        while pending:
            for user in pending.pop().users:
                i = number.get(user)
                if i is not None and i not in views and not plan.workload.ops[i].writes:
                    views.add(i)
                    pending.append(user)
        return sorted(views)

    def value(self, tensor: str, next_op: int) -> fx.Node:
        """Return the node whose result a tensor of the heap is.

        Raises:
            PlanMismatchError: it is nothing that is bound, and no op before ``next_op`` makes it.
        """
        if tensor in self._bound:
            return self._bound[tensor]
        op, element = self._owner.get(tensor, (next_op, None))
        if op >= next_op:
            raise PlanMismatchError(
                f"the plan moves '{tensor}', which is not a result of an op before op {next_op}; plan again"
            )
        return self._current(self._ops[op]) if element is None else self._parts[tensor]

    def made(self, op: int) -> None:
        """Take note of an op that runs for the first time."""
        self._take_parts(op, self._ops[op])

    def recompute(self, source: int, next_op: int) -> fx.Node:
        """Insert a second run of an op and of the views of its result that were taken of the first one."""
        made = self._take_again(self._ops[source])
        for view in self._views[source]:
            if view < next_op:
                self._taken.append(self._take_again(self._ops[view]))
        self._take_parts(source, made)
        return made

    def _take_again(self, node: fx.Node) -> fx.Node:
        args, kwargs = fx.node.map_arg(self._original[node], self._current)
        self.latest[node] = made = taken_again(self._graph, node, args, kwargs)
        return made

    def _take_parts(self, op: int, result: fx.Node) -> None:
        """Take the elements that move out of a result at once: the others must not live as long."""
        for name, element in self._elements.get(op, ()):
            with self._graph.inserting_after(result):
                self._parts[name] = add_node(self._graph, operator.getitem, (result, element))
            self._taken.append(self._parts[name])

    def finish(self) -> None:
        """Drop the views and elements that nobody has read."""
        for node in reversed(self._taken):
            if not node.users:
                self._graph.erase_node(node)
