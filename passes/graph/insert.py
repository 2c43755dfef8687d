"""Insert: a plan's moves become nodes of the graph, so that the graph's code reads as the schedule.

Every bound placeholder gives way to nodes that ask the runtime for the tensor: ``resident`` for what
stays or moves by the heap, one ``wait`` per staged copy of what is streamed. A use takes the copy that is there then; a
view that was taken of an earlier copy is taken again of the current one, as the bytes of the old one may be gone.
An op that runs again is a second node, which those that follow read, as they do the views that are taken of it.
Where ops run on several processors, ``send`` nodes are the copies between them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import fx

from gascompile.core import moves
from gascompile.core.errors import PlanMismatchError
from gascompile.core.op_sites import plan_sites
from gascompile.core.plan import Plan, weights_elsewhere
from gascompile.core.program import (
    SITE,
    STEP,
    Program,
    add_node,
    copied_graph,
    graph_module_of,
    op_name,
)
from gascompile.core.steps import (
    Compute,
    Evict,
    Fetch,
    Offload,
    Prefetch,
    Recompute,
    Release,
    Reload,
    Step,
    Wait,
)
from gascompile.core.tiles import result_name
from gascompile.passes.graph.divide_graph import divide_graph
from gascompile.passes.graph.heap_values import HeapValues, moved_on_heap, taken_again
from gascompile.passes.graph.order_graph import order_graph
from gascompile.passes.graph.site_values import SiteValues

for _move in (
    moves.fetch,
    moves.evict,
    moves.prefetch,
    moves.wait,
    moves.release,
    moves.send,
    *moves.HEAP_MOVES,
):
    fx.node.has_side_effect(_move)


def insert(program: Program, plan: Plan) -> fx.GraphModule:
    """Return a copy of the program's graph with the plan's moves as nodes.

    Its first input is the ``moves.Mover`` that carries them out, followed by the user's inputs.

    Raises:
        PlanMismatchError: the plan was made for another program.
    """
    graph = copied_graph(program.graph_module.graph)
    rewrite = _Rewrite(program, plan, graph)
    for number, step in enumerate(plan.steps):
        rewrite.apply(number, step)
    rewrite.finish()
    graph.lint()
    return graph_module_of(program.graph_module, graph)


def _unused(name: str, graph: fx.Graph) -> str:
    """Return ``name``, longer where an input of the model is called so."""
    taken = {node.target for node in graph.nodes if node.op == "placeholder"}
    while name in taken:
        name += "_"
    return name


def _check_ops(nodes: list[fx.Node], plan: Plan) -> None:
    names = [op_name(node) for node in nodes]
    planned = [op.name for op in plan.ops]
    if names != planned:
        differing = next(
            (
                f"op {i} is '{a}' in the program and '{b}' in the plan"
                for i, (a, b) in enumerate(zip(names, planned, strict=False))
                if a != b
            ),
            "one is longer than the other",
        )
        raise PlanMismatchError(
            f"the plan has {len(planned)} ops, the program {len(names)}: {differing}; plan this program again"
        )
    order = [step.op for step in plan.steps if isinstance(step, Compute)]
    if order != list(range(len(planned))):
        raise PlanMismatchError("the plan's steps do not run each op once and in order; plan again")


@dataclass(frozen=True, slots=True)
class _View:
    """A view of streamed weights: how to take it again, and the copies it was taken of."""

    args: tuple[fx.node.Argument, ...]
    kwargs: dict[str, fx.node.Argument]
    copies: dict[fx.Node, fx.Node]
    """Placeholder of a streamed weight -> the ``wait`` node of its staged copy."""


class _Rewrite:
    """The graph under change and, as the steps are walked, the staged copy that each weight has."""

    def __init__(self, program: Program, plan: Plan, graph: fx.Graph) -> None:
        self._plan = plan
        self._graph = graph
        (self._output,) = (node for node in graph.nodes if node.op == "output")
        self._next_op = 0
        self._bound = {
            node: program.bindings[node.name]
            for node in graph.nodes
            if node.op == "placeholder" and node.name in program.bindings
        }
        self._copies: dict[fx.Node, fx.Node] = {}
        self._views: dict[fx.Node, _View] = {}
        with graph.inserting_before(next(iter(graph.nodes))):
            self._mover = graph.placeholder(_unused("mover", graph))
        divide_graph(graph, plan.workload.ops, self._bound, self._mover)
        order_graph(graph, {op.name: op.site for op in plan.ops}, plan.machine.compute_tier)
        self._ops: list[fx.Node] = [n for n in graph.nodes if n.op == "call_function"]
        _check_ops(self._ops, plan)
        on_heap = moved_on_heap(plan)
        sites = plan_sites(plan)
        self._sites: SiteValues | None = None
        if sites is not None:
            self._sites = SiteValues(graph, self._mover, self._ops, plan, sites)
        changed = sites.changed.values() if sites is not None else ()
        self._elsewhere = {*weights_elsewhere(plan), *(name for names in changed for name in names)}
        self._streamed = {
            node: name
            for node, name in self._bound.items()
            if name not in on_heap and not self._is_resident(name)
        }
        self._owners: dict[str, list[fx.Node]] = {}  # of what streams, by name
        for node, name in self._streamed.items():
            self._owners.setdefault(name, []).append(node)
        at_hand = self._place_residents(on_heap)
        self._heap = HeapValues(graph, self._ops, plan, at_hand, self._current)

    def _is_resident(self, name: str) -> bool:
        tensor = self._plan.tensors.get(name)
        own = self._plan.machine.compute_tier
        return tensor is None or tensor.home == own or name in self._elsewhere

    def _place_residents(self, on_heap: frozenset[str]) -> dict[str, fx.Node]:
        """Ask for what stays, and for what moves by the heap; return the nodes of the tensors."""
        placed: dict[str, fx.Node] = {}
        top = self._ops[0] if self._ops else self._output
        for node, name in self._bound.items():
            if node in self._streamed or not (node.users or name in on_heap):
                continue
            if name not in self._plan.tensors:
                raise PlanMismatchError(f"the plan does not know '{name}'; plan this program again")
            with self._graph.inserting_before(top):
                resident = self._ask(moves.resident, node, (self._mover, name))
            node.replace_all_uses_with(resident)
            placed[name] = resident
        return placed

    def _ask(
        self,
        move: Callable[..., object],
        placeholder: fx.Node,
        args: tuple[fx.node.Argument, ...],
    ) -> fx.Node:
        """Insert a node that stands for what ``placeholder`` stood for, and read like it."""
        node = add_node(self._graph, move, args, name=placeholder.name)
        node.meta.update(placeholder.meta)
        return node

    def apply(self, number: int, step: Step) -> None:
        """Take one step of the plan."""
        if isinstance(step, Compute):
            self._ops[step.op].meta[STEP] = number
            self._compute(step.op)
            return
        place = self._ops[self._next_op] if self._next_op < len(self._ops) else self._output
        with self._graph.inserting_before(place):
            made = self._move(step)
        made.meta[STEP] = number

    def _move(self, step: Step) -> fx.Node:
        match step:
            case Recompute():
                return self._heap.recompute(step.source, self._next_op)
            case Offload() | Reload() if self._sites is not None and self._sites.sites.is_crossing(
                step
            ):
                return self._sites.send(step, self._heap.value(step.tensor, self._next_op))
            case Offload() | Reload():
                move = moves.offload if isinstance(step, Offload) else moves.reload
                value = self._heap.value(step.tensor, self._next_op)
                return add_node(self._graph, move, (self._mover, step.tensor, step.link, value))
            case Wait(address=None):
                made = add_node(self._graph, moves.settle, (self._mover, step.tensor))
                if step.site is not None:
                    made.meta[SITE] = step.site
                return made
            case Release(address=None):
                value = self._heap.value(step.tensor, self._next_op)
                return add_node(self._graph, moves.drop, (self._mover, step.tensor, value))
            case Fetch():
                way = (self._mover, step.tensor, step.link, step.place, step.address)
                return add_node(self._graph, moves.fetch, way)
            case Evict():
                where = (self._mover, step.tensor, step.place, step.address)
                return add_node(self._graph, moves.evict, where)
            case Prefetch():
                args = (self._mover, step.tensor, step.link, step.address)
                return add_node(self._graph, moves.prefetch, args)
            case Wait():
                return self._wait(step)
            case Release():
                return self._release(step)
            case Compute():
                raise AssertionError("an op is no move")

    def _wait(self, step: Wait) -> fx.Node:
        owners = self._owners.get(step.tensor)
        if owners is None:
            raise PlanMismatchError(
                f"the plan waits for '{step.tensor}', which the program does not stream; plan again"
            )
        copy = self._ask(moves.wait, owners[0], (self._mover, step.tensor, step.address))
        self._copies.update(dict.fromkeys(owners, copy))
        return copy

    def _release(self, step: Release) -> fx.Node:
        for node, copy in list(self._copies.items()):
            if copy.args[1:] == (step.tensor, step.address):
                del self._copies[node]
        return add_node(self._graph, moves.release, (self._mover, step.tensor, step.address))

    def _compute(self, op: int) -> None:
        node, spec = self._ops[op], self._plan.workload.ops[op]
        taken = _View(node.args, node.kwargs, self._bases(node))
        with self._graph.inserting_before(node):
            self._point_at_copies(node, spec.reads)
            if self._sites is not None:
                self._sites.point(node, self._plan.ops[op].site)
        own = result_name(spec.name, spec.writes)
        makes_view = not any(name == own or name.startswith(f"{own}.") for name in spec.writes)
        if taken.copies and makes_view:
            self._views[node] = taken
        self._next_op = op + 1
        self._heap.made(op)

    def _bases(self, node: fx.Node) -> dict[fx.Node, fx.Node]:
        """Return the current copies of the streamed weights that the arguments of ``node`` lie in."""
        bases: dict[fx.Node, fx.Node] = {}
        for argument in node.all_input_nodes:
            for base in (argument, *self._view_bases(argument)):
                if base in self._copies:
                    bases[base] = self._copies[base]
        return bases

    def _view_bases(self, node: fx.Node) -> tuple[fx.Node, ...]:
        return tuple(self._views[node].copies) if node in self._views else ()

    def _point_at_copies(self, user: fx.Node, reads: tuple[str, ...]) -> None:
        for argument in tuple(user.all_input_nodes):
            current = self._current(argument, reads)
            if current is not argument:
                user.replace_input_with(argument, current)

    def _current(self, node: fx.Node, reads: tuple[str, ...] = ()) -> fx.Node:
        """Return the node that holds now what ``node`` held in the program."""
        if node in self._streamed:
            if node not in self._copies:
                raise PlanMismatchError(
                    f"'{self._streamed[node]}' is used before op {self._next_op} outside its staged copies; plan again"
                )
            return self._copies[node]
        if (latest := self._heap.latest.get(node)) is not None:
            return latest
        view = self._views.get(node)
        if view is None or all(
            self._copies.get(base) is copy
            for base, copy in view.copies.items()
            if self._streamed[base] in reads
        ):
            return node
        args, kwargs = fx.node.map_arg(
            (view.args, view.kwargs), lambda argument: self._current(argument, reads)
        )
        return taken_again(self._graph, node, args, kwargs)

    def finish(self) -> None:
        """Point the outputs at what is there at the end and drop the bound placeholders."""
        if self._next_op != len(self._ops):
            raise PlanMismatchError("the plan's steps end before the program does; plan again")
        self._point_at_copies(self._output, ())
        if self._sites is not None:
            with self._graph.inserting_before(self._output):
                self._sites.point(self._output, self._plan.machine.compute_tier)
        self._heap.finish()
        for node in self._bound:
            self._graph.erase_node(node)
