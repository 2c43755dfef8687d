"""Packed nodes: ops of a step that read a frozen weight get it decoded, each right before it runs.

A weight has its values in memory for one op at a time, in forward and backward pass alike: what a step keeps and moves
are the bytes that files have. Decoding gives the values of the model before it was packed, so that results are eager's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import fx

from gascompile.core.program import BoundSpec, Program
from gascompile.core.workload import Forms
from gascompile.formats.ops import DECODE
from gascompile.passes.graph.bound_aliases import may_share_memory
from gascompile.training.planning.program_specs import bound_spec, remove_unused
from gascompile.training.planning.step_program import StepProgram
from gascompile.training.state.packed_values import PackedValue

_VIEW = torch.ops.aten.view.default


def with_packed(step: StepProgram, packed: Mapping[str, PackedValue]) -> StepProgram:
    """Return a step whose weights among ``packed`` are bound as their bytes; its graph is changed."""
    program = step.program
    graph = program.graph_module.graph
    bound, forms = dict(program.bound), dict(program.forms)
    for node in [n for n in graph.nodes if n.op == "placeholder"]:
        value = packed.get(program.bindings.get(node.name, ""))
        if value is not None:
            bound[value.name], forms[value.name] = _decode(node, value)
    if not forms:
        return step
    remove_unused(graph)
    graph.lint()
    program.graph_module.recompile()
    changed: Program = replace(program, bound=bound, forms=forms)
    return replace(step, program=changed)


def _decode(weight: fx.Node, value: PackedValue) -> tuple[BoundSpec, Forms]:
    dense = weight.meta["val"]
    outline = value.outline()
    weight.meta = {**weight.meta, "val": dense.new_empty(outline.shape, dtype=outline.dtype)}
    for user, path in list(_uses(weight)):
        with weight.graph.inserting_before(user):
            seen = _seen(weight, _decoded(weight, value, dense), path)
        user.replace_input_with(path[-1] if path else weight, seen)
    spec = value.spec
    forms = Forms(
        stored=spec.stored,
        wire=spec.wire,
        compute=str(value.dtype).removeprefix("torch."),
        interleaved_heads=value.heads or None,
    )
    return bound_spec(weight), forms


def _uses(node: fx.Node, path: tuple[fx.Node, ...] = ()) -> Iterator[tuple[fx.Node, list[fx.Node]]]:
    """Yield each op that reads a weight, with the views through which it does."""
    for user in node.users:
        if user.op == "call_function" and may_share_memory(user, node):
            yield from _uses(user, (*path, user))
        else:
            yield user, list(path)


def _seen(weight: fx.Node, decoded: fx.Node, path: Sequence[fx.Node]) -> fx.Node:
    """Add the views of ``path``, which begins at a weight, of what was decoded of it."""
    copies = {weight: decoded}

    def copied(node: fx.Node) -> fx.Node:
        return copies.get(node, node)

    for view in path:
        copies[view] = weight.graph.node_copy(view, copied)
    return copied(path[-1]) if path else decoded


def _decoded(weight: fx.Node, value: PackedValue, dense: torch.Tensor) -> fx.Node:
    """Add the op that decodes a weight, and those that bring its rows in order."""
    graph, columns = weight.graph, value.shape[1]

    def added(target: torch._ops.OpOverload, *args: object, **kwargs: object) -> fx.Node:
        node = graph.call_function(target, args, kwargs)  # type: ignore[arg-type]
        node.meta["val"] = _run(target, args, kwargs) if target is not DECODE else dense
        return node

    decoded = added(DECODE, weight, value.form, columns, value.spec.group, value.dtype)
    if value.heads:
        half = value.shape[0] // (2 * value.heads)
        decoded = added(_VIEW, decoded, [value.heads, half, 2, columns])
        decoded = added(torch.ops.aten.permute.default, decoded, [0, 2, 1, 3])
        whole = {"memory_format": torch.contiguous_format}
        decoded = added(torch.ops.aten.clone.default, decoded, **whole)
        decoded = added(_VIEW, decoded, list(value.shape))
    return decoded


def _run(
    target: torch._ops.OpOverload, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> object:
    values = [arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in args]
    return target(*values, **kwargs)
