"""An inserted graph as a flat list of calls on numbered slots, prepared once so that a run does little.

Slots hold the values of nodes and all constants; a step fetches its arguments in one go, calls, stores
its result and clears the slots that nobody reads again.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial

import torch
from torch import fx

from gascompile.core import moves
from gascompile.core.errors import PlanMismatchError, UnsupportedOpError
from gascompile.core.plan import Plan
from gascompile.core.program import SITE, STEP, op_name
from gascompile.runtime.devices.graph_rules import ARRIVAL, MOVE, RELEASE, Trait, trait_of
from gascompile.runtime.kernels import onednn as other_products
from gascompile.runtime.kernels.fused import FusedSegment, bind, segment_nodes
from gascompile.runtime.run.calls import (
    Changing,
    direct,
    may_return_its_input,
    owning,
    patching,
    returns_its_first,
    takes_what_it_returns,
    trimmed,
    with_keywords,
)
from gascompile.runtime.run.late_updates import late_updates
from gascompile.runtime.run.meter import fused_meter, op_of
from gascompile.runtime.run.moving import moving, steady
from gascompile.runtime.run.schedule import (
    Gather,
    RunSchedule,
    RunStep,
    Value,
    gather_of,
    has_node,
    nothing,
    only,
)
from gascompile.runtime.run.session import Session
from gascompile.runtime.run.site_steps import SiteSteps
from gascompile.runtime.transfer.dues import due_fetches, due_ops
from gascompile.runtime.transfer.mover import PlanMover

_LINEAR = torch.ops.aten.linear.default


def compile_steps(
    graph_module: fx.GraphModule,
    plan: Plan,
    session: Session,
    mover: PlanMover,
    fused: Sequence[FusedSegment] = (),
    *,
    onednn: bool = False,
) -> RunSchedule:
    """Return the schedule of an inserted graph, with a step for each of its ``fused`` segments.

    With ``onednn`` large products are that library's, where it is the faster one and the plan reserves its memory.

    Raises:
        PlanMismatchError: the graph was not rewritten for this plan, or the segments are another graph's.
        UnsupportedOpError: the graph holds something other than calls of functions.
    """
    builder = _Builder(graph_module, plan, session, mover, fused)
    # With more threads than planned for, a product takes more.
    if onednn and session.device.is_host and other_products.is_faster_here():
        builder.product_bytes = other_products.scratch_bytes()
    return builder.build()


class _Builder(SiteSteps):
    product_bytes: int | None = None
    """What an op has to reserve for oneDNN's product; ``None`` where all are torch's."""

    def __init__(
        self,
        graph_module: fx.GraphModule,
        plan: Plan,
        session: Session,
        mover: PlanMover,
        fused: Sequence[FusedSegment],
    ) -> None:
        super().__init__(graph_module.graph, plan, session, mover)
        self._module = graph_module
        self._sizes = {tensor.name: tensor.size_bytes for tensor in plan.workload.tensors}
        self._dues = [due for _, due in due_ops(plan)]
        self._fetch_dues = [due for _, due in due_fetches(plan)]
        self._moving = moving(graph_module.graph, plan, self._store)
        is_alone = self._store and session.device.is_host and self._sites is None
        self._late = (
            late_updates(graph_module.graph, plan, session.fixed_bytes) if is_alone else frozenset()
        )
        self._may_return_its_input = cache(may_return_its_input)
        self._awaited: set[str] = set()
        output = graph_module.graph.output_node()
        self._inputs = _written_inputs(output) if session.device.is_host else {}
        self._returned = set(output.all_input_nodes) - self._inputs.keys()
        self._fused = {f.segment.ops[0]: f for f in fused}
        self._in_segment: set[fx.Node] = set()

    def build(self) -> RunSchedule:
        nodes = list(self._module.graph.nodes)
        mover = nodes[0]
        if mover.op != "placeholder" or any(u.target not in moves.MOVES for u in mover.users):
            raise PlanMismatchError("the graph's first input is no mover: insert the plan's moves")
        inputs: list[tuple[str, int]] = []
        named = {node.name: node for node in nodes}
        for node in nodes[1:-1]:
            if node.name in self._fused:
                self._segment(self._fused[node.name], named)
            if node in self._in_segment:
                continue
            self._enter(node.meta.get(SITE, self._own))
            match node.op:
                case "placeholder":
                    inputs.append((node.name, self._slot(node)))
                case "get_attr":
                    self._slot(node, operator.attrgetter(node.target)(self._module))
                case "call_function":
                    self._call(node)
                case _:
                    raise UnsupportedOpError(
                        f"node '{node.name}' is a {node.op}, which a captured graph does not hold; capture it again"
                    )
        if self._next_op != len(self._plan.ops):
            raise PlanMismatchError(
                f"the graph has {self._next_op} of the plan's {len(self._plan.ops)} ops; insert the plan again"
            )
        self._enter(self._own)
        returned: tuple[Value, ...] = nodes[-1].args[0]
        outputs = tuple(self._index(self._inputs.get(value, value)) for value in returned)
        (site, elsewhere) = next(
            (lane for lane in self._lanes.items() if lane[0] != self._own), ("", [])
        )
        host_inputs, host_lasting = self._on_host()
        return RunSchedule(
            steps=tuple(self._lanes[self._own]),
            slots=tuple(self._slots),
            inputs=tuple(inputs),
            outputs=outputs,
            elsewhere=tuple(elsewhere),
            site=site,
            host_inputs=host_inputs,
            host_lasting=host_lasting,
        )

    def _call(self, node: fx.Node) -> None:
        arguments: tuple[Value, ...] = node.args[1:]
        if node.target is moves.resident:
            self._slot(node, self._session.resident(*arguments))
        elif node.target is moves.fetch:
            self._move(node, self._mover.fetch_at, (self._fetch_dues.pop(0), *arguments))
        elif node.target is moves.evict:
            self._move(node, self._mover.evict, arguments)
        elif node.target is moves.prefetch:
            self._move(node, self._mover.prefetch_at, (self._dues.pop(0), *arguments))
        elif node.target is moves.wait:
            self._move(node, self._mover.wait_at, (self._next_op, *arguments))
        elif node.target is moves.release:
            self._move(node, self._mover.release, arguments, RELEASE)
        elif node.target is moves.send:
            self._send(node)
        elif node.target is moves.settle and node.args[1] in self._sent:
            self._arrive(node)
        elif node.target is moves.settle:
            self._move(node, self._mover.settle_at, (self._next_op, *arguments))
        elif node.target in moves.HEAP_MOVES:
            self._move_value(node, node.target.__name__, arguments)
        else:
            self._compute(node)
        if node in self._returned and node.target is not moves.resident:
            self._detach(self._slot_of[node])

    def _detach(self, slot: int) -> None:
        """Copy an output that lies in the arena at once: the copy there may be released before the run ends."""
        call, trait = self._mover.out_of_arena, Trait((slot,), "")
        self._steps.append(RunStep(call, only(slot), slot, None, (), self._next_op, trait))

    def _move(
        self, node: fx.Node, function: Callable[..., Value], arguments: Value, why: str = MOVE
    ) -> None:
        call = partial(function, *arguments)
        slot = self._slot(node)
        frees, trait, planned = self._freed(node, slot), Trait((), why), node.meta.get(STEP, -1)
        self._steps.append(RunStep(call, nothing, slot, None, frees, self._next_op, trait, planned))

    def _move_value(self, node: fx.Node, name: str, arguments: Value) -> None:
        """Move the memory of a value: the last argument, the others are fixed."""
        call = partial(getattr(self._mover, name), *arguments[:-1])
        gather, slot = gather_of(arguments[-1:], self._index), self._slot(node)
        frees, trait = self._freed(node, slot), Trait(self._reads(node), MOVE)
        planned = node.meta.get(STEP, -1)
        if node.target is moves.reload:
            self._follow(str(node.args[1]), planned)
        self._steps.append(RunStep(call, gather, slot, None, frees, self._next_op, trait, planned))

    def _compute(self, node: fx.Node) -> None:
        self._await_residents(node)
        op, num_ops, planned = self._next_op, 0, node.meta.get(STEP, -1)
        source = op_of(self._plan.steps[planned]) if planned >= 0 else None
        if is_again := source is not None and source < op:
            op, num_ops = source, 1
        elif op < len(self._plan.ops) and op_name(node) == self._plan.ops[op].name:
            num_ops = 1
            self._next_op += 1
        meter = self._meter(planned) if num_ops else None
        function, gather = self._prepare(node, op)
        if meter is not None and meter.births and self._may_return_its_input(node.target):
            function = owning(function)
        function = self._mover.watched(function, node.name)
        is_here = self._site == self._own
        if num_ops and is_here and self._session.store is not None:
            function = self._before(node, op, planned, function, is_first=not is_again)
        slot = self._slot(node)
        trait = steady((node,), trait_of(node, self._reads(node), num_ops), self._moving)
        frees = self._freed(node, slot)
        is_late = isinstance(function, Changing)
        self._steps.append(
            RunStep(function, gather, slot, meter, frees, op, trait, planned, is_late)
        )
        changed = self._sites.changed.get(op, ()) if num_ops and self._sites is not None else ()
        if changed and not is_here:
            self._change(changed, op, planned)

    def _before(
        self,
        node: fx.Node,
        op: int,
        planned: int,
        function: Callable[..., Value],
        *,
        is_first: bool,
    ) -> Callable[..., Value]:
        """Add what has to be done before an op beside what the session's store holds; return what to call for it."""
        spec, store = self._plan.workload.ops[op], self._session.store
        made = [name for name in spec.writes if name not in self._store]
        size_bytes = sum(self._sizes[name] for name in made) + spec.workspace_bytes
        self._make_room(size_bytes, op, planned)
        changed = tuple(name for name in spec.writes if name in self._store)
        patched = changed if changed == tuple(spec.patches) else ()
        if patched and is_first and store is not None:
            function = patching(function, node.target, store, patched[0])
        elif changed and is_first and node in self._late and store is not None:
            return Changing(function, store, changed)
        elif changed and is_first and store is not None:
            # Before the op: an interrupt in between leaves no new value that is taken for the old one.
            self._first(partial(store.changed, changed), op, planned)
        own = f"%{spec.name}"
        if own not in made or takes_what_it_returns(node.target):
            return function
        return trimmed(function, self._sizes[own])

    def _make_room(self, size_bytes: int, op: int, planned: int) -> None:
        memory = self._session.memory
        if memory is not None and memory.is_due(size_bytes):
            self._first(partial(memory.make_room, size_bytes), op, planned)

    def _reads(self, node: fx.Node) -> tuple[int, ...]:
        return tuple(self._slot_of[n] for n in node.all_input_nodes if n in self._slot_of)

    def _segment(self, fused: FusedSegment, named: Mapping[str, fx.Node]) -> None:
        """Make one step of the ops of a segment, and of the views around it that others read."""
        segment, first = fused.segment, self._next_op
        ops = segment_nodes(segment, named, self._plan.ops[first:])
        self._in_segment.update(ops)
        self._next_op += len(ops)
        for node in ops:
            self._await_residents(node)
        for name in segment.views_before:
            self._view(named[name], first)
        kernel = bind(fused, named, self._session.device.torch_device)
        function = self._mover.watched(kernel, segment.ops[-1])
        gather = gather_of(tuple(named[name] for name in segment.inputs), self._index)
        outputs = [named[name] for name in segment.outputs]
        meters = {node: self._meters.get(node.meta.get(STEP, -1)) for node in ops}
        births = tuple(meters[node] for node in outputs)
        meter = fused_meter(births, tuple(meters.values()), sum(fused.kernel.scratch_bytes))
        planned = ops[0].meta.get(STEP, -1)
        born_bytes = sum(self._sizes[f"%{name}"] for name in segment.outputs)
        self._make_room(born_bytes + sum(fused.kernel.scratch_bytes), first, planned)
        made = self._slot(outputs[0] if len(outputs) == 1 else None)
        reads = tuple(self._slot_of[named[name]] for name in segment.inputs)
        trait = Trait(reads, "", name=segment.ops[-1], num_ops=len(ops))
        trait = steady(ops, trait, self._moving)
        self._steps.append(RunStep(function, gather, made, meter, (), first, trait, planned))
        freed, host = {made} if len(outputs) > 1 else set(), trait.host
        for i, node in enumerate(outputs if len(outputs) > 1 else ()):
            part, slot = operator.itemgetter(i), self._slot(node)
            trait = Trait((made,), host, launches=False)
            self._steps.append(RunStep(part, only(made), slot, None, (), first, trait))
        for name in segment.views_after:
            self._view(named[name], first)
        for node in ops:
            freed.update(self._slot_of[n] for n in self._frees.get(node, ()) if self._clearable(n))
        self._steps[-1] = self._steps[-1]._replace(frees=tuple(freed))

    def _view(self, node: fx.Node, op: int) -> None:
        """Take a view of a segment's inputs or outputs."""
        function, gather = self._prepare(node, op)
        slot, trait = self._slot(node), trait_of(node, self._reads(node))
        trait = steady((node,), trait, self._moving)
        self._steps.append(RunStep(function, gather, slot, None, (), op, trait))
        if node in self._returned:
            self._detach(slot)

    def _await_residents(self, node: fx.Node) -> None:
        """Before the first op that reads a resident weight, wait for it to be loaded."""
        for argument in node.all_input_nodes:
            name = argument.args[1] if argument.target is moves.resident else None
            known = (self._session.kept.tensors, self._store, self._awaited)
            if not isinstance(name, str) or any(name in names for names in known):
                continue
            self._awaited.add(name)
            call: Callable[..., Value] = partial(self._mover.resident_at, self._next_op, name)
            if self._site != self._own:
                call = partial(self._session.host.wait_for, name)
            slot, trait = self._slot(None), Trait((), ARRIVAL)
            self._steps.append(RunStep(call, nothing, slot, None, (), self._next_op, trait))

    def _freed(self, node: fx.Node, slot: int) -> tuple[int, ...]:
        """Return the slots that nobody reads after ``node``; a result that nobody reads is one."""
        own = () if node.users else (slot,)
        return (
            tuple(self._slot_of[n] for n in self._frees.get(node, ()) if self._clearable(n)) + own
        )

    def _prepare(self, node: fx.Node, op: int) -> tuple[Callable[..., Value], Gather]:
        """Return what to call and how to fetch its arguments; constants are bound beforehand."""
        assert callable(node.target)
        if node.target is moves.gather:
            return partial(self._mover.gather_at, op), gather_of(tuple(node.args[1:]), self._index)
        function = direct(node.target)
        if node.target is _LINEAR and self.product_bytes is not None:
            reserved_bytes = self._plan.workload.ops[op].workspace_bytes
            if reserved_bytes >= self.product_bytes:
                function = other_products.linear
        constant = {k: v for k, v in node.kwargs.items() if not has_node(v)}
        varying = {k: v for k, v in node.kwargs.items() if k not in constant}
        if varying:
            function = with_keywords(function, len(node.args), tuple(varying), constant)
        elif constant:
            function = partial(function, **constant)
        return function, gather_of((*node.args, *varying.values()), self._index)


def _written_inputs(output: fx.Node) -> dict[fx.Node, fx.Node]:
    """Return, of what a graph returns, the nodes that are inputs which ops have written to, and these inputs."""
    written = {}
    for node in output.all_input_nodes:
        source: Value = node
        while isinstance(source, fx.Node) and returns_its_first(source.target):
            source = source.args[0]
        if source is not node and isinstance(source, fx.Node) and source.op == "placeholder":
            written[node] = source
    return written
