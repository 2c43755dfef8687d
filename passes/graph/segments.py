"""Segments: the runs of element-wise ops, reductions and views that one compiled kernel can compute.

A run ends at every move of the plan, so that nothing arrives or leaves while its kernel runs, and at every
op that stays eager: matrix products, attention and convolutions are library calls either way; ops that
write their arguments, draw random numbers or look values up by an index are left as they are. Only what
is read outside a run is made in memory. Its inputs live longer and its outputs come sooner than op by op:
a run that would then need more memory than the plan reserves is cut shorter.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from gascompile.core import moves, serial
from gascompile.core.kernels import ALIGNMENT_BYTES, Layout, Segment
from gascompile.core.plan import Plan
from gascompile.core.program import op_name
from gascompile.core.steps import Compute
from gascompile.core.workload import OpSpec
from gascompile.cost_models.simulate.walk import Walk
from gascompile.passes.graph.exact_ops import is_exact

_aten = torch.ops.aten
_COMPOSITE = {
    # What decomposes into element-wise ops and reductions, beside what torch tags as such.
    _aten.cat, _aten.stack, _aten.contiguous, _aten.to, _aten._to_copy, _aten.type_as, _aten.repeat,
    _aten.softmax, _aten._softmax, _aten.log_softmax, _aten._log_softmax, _aten.layer_norm, _aten.rms_norm,
    _aten.group_norm, _aten.tril, _aten.triu, _aten.constant_pad_nd, _aten.reshape,
    _aten.flatten, _aten.arange, _aten.full, _aten.zeros, _aten.ones, _aten.scalar_tensor, _aten.full_like,
    _aten.zeros_like, _aten.ones_like, _aten.glu, _aten.masked_fill, _aten.where,
}  # fmt: skip
_DIVISIONS = {
    # By zero, these end the process where integers are compiled.
    _aten.div, _aten.floor_divide, _aten.remainder, _aten.fmod, _aten.true_divide, _aten.divide,
}  # fmt: skip
_DTYPES = {
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.bool, torch.int64, torch.int32,
}  # fmt: skip
_MIN_COMPUTED = 2
"""Ops of a segment besides views: one alone is a kernel either way."""


def segments(
    graph_module: fx.GraphModule, plan: Plan, *, exact: bool = False
) -> tuple[Segment, ...]:
    """Return the segments of an inserted graph, in its order; none where a shape is dynamic.

    Args:
        graph_module: what ``insert`` made of a freshly captured program: its nodes know their tensors.
        plan: the plan that was inserted.
        exact: take only ops whose results are the same bits in a kernel.
    """
    if any(_is_dynamic(node) for node in graph_module.graph.nodes):
        return ()
    finder = _Finder(plan, exact=exact)
    return tuple(s for run in finder.runs(graph_module.graph) for s in finder.cover(run))


def layout(node: fx.Node) -> Layout | None:
    """Return the layout of the tensor that ``node`` was captured with; ``None`` for what no kernel takes."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    # Of a tensor without elements there is nothing to compute, and the captured strides may not be eager's.
    if value.dtype not in _DTYPES or 0 in value.shape:
        return None
    if value.device.type not in ("cpu", "meta"):
        return None
    return Layout(
        dtype=str(value.dtype).removeprefix("torch."),
        shape=tuple(int(n) for n in value.shape),
        stride=tuple(int(n) for n in value.stride()),
    )


def lies_anywhere(node: fx.Node) -> bool:
    """Return whether the tensor of ``node`` may begin beside the multiples of ``ALIGNMENT_BYTES``.

    Weights lie in the arena as they do in their files, which align them to their own elements at best; so do
    views of them. Other views may begin anywhere in their tensor. What ops make begins at such a multiple.
    """
    value = node.meta["val"]
    if value.storage_offset() * value.element_size() % ALIGNMENT_BYTES:
        return True
    while _is_alias(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node.target in (moves.resident, moves.wait)


def _is_alias(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return True
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(returned.alias_info for returned in schema.returns)


def _is_dynamic(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.SymInt) or (
        isinstance(value, torch.Tensor) and any(isinstance(n, torch.SymInt) for n in value.shape)
    )


@dataclass(frozen=True, slots=True)
class _Parts:
    """A run taken apart: what its kernel reads and makes, and which views stay outside."""

    inputs: list[fx.Node]
    outputs: list[fx.Node]
    before: set[fx.Node]
    after: set[fx.Node]


class _Finder:
    """What the plan knows of its ops, by name."""

    def __init__(self, plan: Plan, *, exact: bool) -> None:
        self._exact = exact
        self._ops = plan.workload.ops
        self._number = {op.name: i for i, op in enumerate(self._ops)}
        self._size_bytes = {t.name: t.size_bytes for t in plan.workload.tensors}
        walk = Walk(plan).run()
        self._peak_bytes = walk.peak[walk.site]
        self._entering_bytes = [
            held_bytes
            for held_bytes, step in zip(walk.before, plan.steps, strict=True)
            if isinstance(step, Compute)
        ]
        """What is there when each op begins, all of which stays to the end of a segment."""

    def runs(self, graph: fx.Graph) -> Iterator[list[fx.Node]]:
        """Yield the longest runs of nodes that may be in a kernel."""
        run: list[fx.Node] = []
        for node in graph.nodes:
            if node.op == "placeholder" or node.target is moves.resident:
                continue
            if self._is_view(node) or self._is_computed(node):
                run.append(node)
            elif run:
                yield run
                run = []

    def cover(self, run: Sequence[fx.Node]) -> Iterator[Segment]:
        """Yield segments for as much of a run as its memory allows, longest first."""
        while run:
            for length in range(len(run), 0, -1):
                segment = self._segment(run[:length])
                if segment is not None:
                    yield segment
                    break
            run = run[length:]

    def _spec(self, node: fx.Node) -> OpSpec | None:
        number = self._number.get(op_name(node)) if node.op == "call_function" else None
        return None if number is None or op_name(node) != node.name else self._ops[number]

    def _is_view(self, node: fx.Node) -> bool:
        """Return whether ``node`` only looks at memory that is there."""
        spec = self._spec(node)
        if spec is None or spec.writes:
            return False
        if node.target is operator.getitem:
            return True
        target = node.target
        if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
            return False
        if not target._schema.returns:
            return False  # it is called for what it does, such as to refuse a loss
        is_dropout = target is _aten.dropout.default and node.args[2] is False
        return is_dropout or torch.Tag.nondeterministic_seeded not in target.tags

    def _is_computed(self, node: fx.Node) -> bool:
        """Return whether ``node`` makes one new tensor, element by element or as a reduction."""
        spec, target = self._spec(node), node.target
        if spec is None or tuple(spec.writes) != (f"%{node.name}",) or layout(node) is None:
            return False
        if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
            return False
        tags = target.tags
        if torch.Tag.nondeterministic_seeded in tags:
            return False
        if not (
            torch.Tag.pointwise in tags
            or torch.Tag.reduction in tags
            or target.overloadpacket in _COMPOSITE
        ):
            return False
        if target.overloadpacket in _DIVISIONS and not node.meta["val"].dtype.is_floating_point:
            return False
        if self._exact and not is_exact(node):
            return False
        return all(layout(a) is not None for a in _read_nodes(node))

    def _segment(self, run: Sequence[fx.Node]) -> Segment | None:
        """Return the segment of a whole run; ``None`` where it needs too much memory or has too few ops."""
        computed = [node for node in run if not self._is_view(node)]
        if len(computed) < _MIN_COMPUTED or self._is_view(run[-1]):
            return None
        parts = self._parts(run)
        if not parts.outputs or any(layout(node) is None for node in parts.inputs):
            return None
        first, last = self._number[op_name(run[0])], self._number[op_name(run[-1])]
        if last - first + 1 != len(run):
            return None
        born_bytes = sum(self._size_bytes[f"%{node.name}"] for node in parts.outputs)
        limit_bytes = self._peak_bytes - self._entering_bytes[first]
        if born_bytes > limit_bytes:
            return None
        return Segment(
            ops=tuple(node.name for node in run),
            inputs=tuple(node.name for node in parts.inputs),
            outputs=tuple(node.name for node in parts.outputs),
            views_before=tuple(node.name for node in run if node in parts.before),
            views_after=tuple(node.name for node in run if node in parts.after),
            scratch_limit_bytes=limit_bytes - born_bytes,
            key=_key(run, parts),
        )

    def _parts(self, run: Sequence[fx.Node]) -> _Parts:
        inside = set(run)
        early = self._early_views(run)
        escaping = {node for node in run if any(user not in inside for user in node.users)}
        before = self._taken_before(run, early, escaping)
        after: set[fx.Node] = set()
        outputs = {node for node in escaping if not self._is_view(node)}
        for node in reversed(run):
            if node not in after and not (node in escaping and self._is_view(node)):
                continue
            if node in early:
                continue
            after.add(node)
            for argument in node.all_input_nodes:
                if argument in early:
                    before |= _with_ancestors(argument, early)
                elif argument in inside and self._is_view(argument):
                    after.add(argument)
                elif argument in inside:
                    outputs.add(argument)
        ordered = [node for node in run if node in outputs]
        return _Parts(_inputs(run, ordered, before), ordered, before, after)

    def _early_views(self, run: Sequence[fx.Node]) -> set[fx.Node]:
        """Return the views of what was there before the run."""
        early: set[fx.Node] = set()
        inside = set(run)
        for node in run:
            if self._is_view(node) and all(a in early for a in node.all_input_nodes if a in inside):
                early.add(node)
        return early

    def _taken_before(
        self, run: Sequence[fx.Node], early: set[fx.Node], escaping: set[fx.Node]
    ) -> set[fx.Node]:
        """Return the early views that are taken one by one, as others read them or a kernel cannot."""
        before: set[fx.Node] = set()
        for node in run:
            if node not in early:
                continue
            given = [a for a in node.all_input_nodes if a in before or a not in early]
            if node in escaping or any(layout(a) is None for a in given):
                before |= _with_ancestors(node, early)
        return before


def _with_ancestors(node: fx.Node, among: set[fx.Node]) -> set[fx.Node]:
    members = {node}
    for argument in node.all_input_nodes:
        if argument in among:
            members |= _with_ancestors(argument, among)
    return members


def _read_nodes(node: fx.Node) -> list[fx.Node]:
    return [a for a in node.all_input_nodes if a.op != "get_attr"]


def _inputs(
    run: Sequence[fx.Node], outputs: Sequence[fx.Node], before: set[fx.Node]
) -> list[fx.Node]:
    """Return what a kernel reads to make ``outputs``, in the order of its first use."""
    needed = set(outputs)
    for node in reversed(run):
        if node in needed:
            needed.update(a for a in node.all_input_nodes if a not in before)
    inner = [node for node in run if node in needed and node not in before]
    inside = set(inner)
    return list(dict.fromkeys(a for n in inner for a in n.all_input_nodes if a not in inside))


def _inner_nodes(
    nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]
) -> list[fx.Node]:
    """Return the nodes among ``nodes`` that are needed to make ``outputs`` of ``inputs``, in order."""
    given = set(inputs)
    needed = set(outputs)
    for node in reversed(nodes):
        if node in needed:
            needed.update(a for a in node.all_input_nodes if a not in given)
    return [node for node in nodes if node in needed]


def _key(run: Sequence[fx.Node], parts: _Parts) -> str:
    names: dict[fx.Node, str] = {}
    lines = []
    for i, node in enumerate(parts.inputs):
        names[node] = f"in{i}"
        lines.append(f"in{i} {layout(node)}{' anywhere' if lies_anywhere(node) else ''}")
    for node in _inner_nodes(run, parts.inputs, parts.outputs):
        names[node] = f"v{len(names)}"
        arguments = _text((node.args, dict(sorted(node.kwargs.items()))), names)
        lines.append(f"{names[node]} = {node.target} {arguments}")
    lines += [f"return {names[node]} {layout(node)}" for node in parts.outputs]
    return serial.raw_digest("\n".join(lines).encode())


def _text(argument: object, names: Mapping[fx.Node, str]) -> str:
    if isinstance(argument, fx.Node):
        return names[argument]
    if isinstance(argument, (list, tuple)):
        return f"[{', '.join(_text(item, names) for item in argument)}]"
    if isinstance(argument, Mapping):
        return ", ".join(f"{name}={_text(item, names)}" for name, item in argument.items())
    if isinstance(argument, slice):
        return _text((argument.start, argument.stop, argument.step), names)
    return f"{type(argument).__name__} {argument!r}"
