"""Change forms: weights that move in another form than they are computed in, and the ops that take them so.

Run before annotation, so that what is planned, tiled, gathered, moved and laid out are the bytes that move. A linear
layer decodes its weight block by block as it multiplies; of an embedding the gathered rows are decoded; every
other use gets the weight decoded by an op of its own, right before the first use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import fx

from gascompile.core.errors import UnsupportedOpError
from gascompile.core.program import BoundSpec, Program
from gascompile.core.workload import Forms
from gascompile.formats.layout import is_packed
from gascompile.formats.ops import DECODE, LINEAR, FormSpec, transfer_matrix
from gascompile.formats.packings import packing_of

_EMBEDDING = torch.ops.aten.embedding.default
_LINEAR = torch.ops.aten.linear.default
_UNFLATTEN = torch.ops.aten.unflatten.int
_FLATTEN = torch.ops.aten.flatten.using_ints
_TRANSPOSE = torch.ops.aten.transpose.int
_CLONE = torch.ops.aten.clone.default


def change_formats(program: Program, forms: Mapping[str, FormSpec]) -> Program:
    """Return ``program`` with the weights of ``forms`` in their transfer formats, and its ops rewritten to take them.

    Args:
        program: as captured; it is not changed.
        forms: weights by name. A packed form needs a matrix; a state has no form.

    Raises:
        ValueError: a name is no weight of the program, or its form is not for its shape.
        UnsupportedOpError: rows of a weight are interleaved, and another op than a linear layer reads it.
    """
    if not forms:
        return program
    bound = dict(program.bound)
    for name, spec in forms.items():
        _check(program, name, spec)
        bound[name] = _transfer_spec(program.bound[name], spec)
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(program.graph_module.graph, copies))
    for node, copied in copies.items():
        copied.name = node.name  # a copy gives inputs called like builtins another one
    for node in list(graph.nodes):
        bound_name = program.bindings.get(node.name, "") if node.op == "placeholder" else ""
        if bound_name in forms:
            bound_spec, spec = program.bound[bound_name], forms[bound_name]
            if spec.interleaved_heads:
                _order_results(node, bound_name, bound_spec, spec.interleaved_heads)
            if spec.wire != bound_spec.dtype:
                _change(node, bound_spec, spec)
    graph.lint()
    module = fx.GraphModule(program.graph_module, graph)
    module.recompile()
    kept = {
        name: Forms(
            stored=spec.stored,
            wire=spec.wire,
            compute=program.bound[name].dtype,
            interleaved_heads=spec.interleaved_heads or None,
        )
        for name, spec in forms.items()
    }
    return replace(program, graph_module=module, bound=bound, forms=kept)


def _check(program: Program, name: str, spec: FormSpec) -> None:
    if name not in program.bound or name in program.states:
        raise ValueError(f"'{name}' is no weight of '{program.name}'")
    shape = program.bound[name].shape
    if is_packed(spec.wire) and len(shape) != 2:
        raise ValueError(f"'{name}' has the shape {list(shape)}; {spec.wire} is for matrices")


def _transfer_spec(bound: BoundSpec, spec: FormSpec) -> BoundSpec:
    if not is_packed(spec.wire):
        return BoundSpec(dtype=spec.wire, shape=bound.shape)
    rows, columns = bound.shape
    dtype, shape = transfer_matrix(spec.wire, rows, columns, spec.group)
    return BoundSpec(dtype=dtype, shape=shape)


def _order_results(weight: fx.Node, name: str, bound: BoundSpec, heads: int) -> None:
    """Bring the results of the layers that read a weight of interleaved rows in the order that its model has.

    Row ``2 i`` of a head lies for row ``i`` of its first half and row ``2 i + 1`` for row ``i`` of the second, so a
    layer's results of ``[..., heads, half, 2]`` are transposed to ``[..., heads, 2, half]``.
    """
    if len(bound.shape) != 2 or bound.stride is not None or bound.shape[0] % (2 * heads):
        raise ValueError(f"'{name}' of the shape {list(bound.shape)} has no {heads} heads of pairs")
    for user in list(weight.users):
        x, _, bias = (*user.args, None, None, None)[:3]
        value = user.meta.get("val")
        if (
            user.target is not _LINEAR
            or user.args[1] is not weight
            or x is weight
            or bias is not None
            or user.kwargs
            or not isinstance(value, torch.Tensor)
        ):
            raise UnsupportedOpError(
                f"'{name}' lies with its rows in another order than the model has, and '{user.name}' is no linear "
                "layer without a bias that could take it so; convert the checkpoint to safetensors"
            )
        _order_result(user, value, heads)


def _order_result(layer: fx.Node, value: torch.Tensor, heads: int) -> None:
    half = value.shape[-1] // (2 * heads)
    users, graph = list(layer.users), layer.graph
    is_whole: dict[str, fx.node.Argument] = {"memory_format": torch.contiguous_format}
    last, held = layer, value
    # None of them names the dimensions before the last, which may be dynamic.
    for target, args, kwargs in (
        (_UNFLATTEN, (-1, [heads, half, 2]), {}),
        (_TRANSPOSE, (-2, -1), {}),
        (_CLONE, (), is_whole),
        (_FLATTEN, (-3, -1), {}),
    ):
        with graph.inserting_after(last):
            last = graph.call_function(target, (last, *args), kwargs)
        held = target(held, *args, **kwargs)
        last.meta = {**layer.meta, "val": held}
    for user in users:
        user.replace_input_with(layer, last)


def _change(weight: fx.Node, bound: BoundSpec, spec: FormSpec) -> None:
    """Give the users of a placeholder the weight in its transfer format, or what they need of it."""
    compute: torch.dtype = getattr(torch, bound.dtype)
    wire = _transfer_spec(bound, spec)
    value = weight.meta.get("val")
    if isinstance(value, torch.Tensor):
        weight.meta = {**weight.meta, "val": value.new_empty(wire.shape, dtype=_dtype(wire))}
    fixed = (spec.wire, bound.shape[-1] if bound.shape else 1, spec.group, compute)
    has_rows = packing_of(spec.wire) is None
    rest = []
    for user in list(weight.users):
        if _takes_packed(user, weight, compute):
            _to_packed_linear(user, spec)
        elif has_rows and user.target is _EMBEDDING and user.args[0] is weight is not user.args[1]:
            _decode_rows(user, fixed, wire)
        else:
            rest.append(user)
    if rest:
        with weight.graph.inserting_before(_first(weight.graph, rest)):
            decoded = weight.graph.call_function(DECODE, (weight, *fixed))
        decoded.meta = {**weight.meta, "val": value} if value is not None else {}
        for user in rest:
            user.replace_input_with(weight, decoded)


def _takes_packed(user: fx.Node, weight: fx.Node, compute: torch.dtype) -> bool:
    """Return whether ``user`` is a linear layer of ``weight`` on inputs of the dtype it is computed in."""
    if user.target is not _LINEAR or user.args[1] is not weight:
        return False
    if user.args[0] is weight or (*user.args, None)[2] is weight:
        return False
    value = user.meta.get("val")
    # Under autocast, say, a layer computes in another dtype than its weight has.
    return len(user.args) >= 2 and isinstance(value, torch.Tensor) and value.dtype == compute


def _to_packed_linear(user: fx.Node, spec: FormSpec) -> None:
    x, weight, bias = (*user.args, None)[:3]
    bias = user.kwargs.get("bias", bias)
    user.target = LINEAR
    user.args = (x, weight, bias, spec.wire, spec.group)
    user.kwargs = {}


def _decode_rows(user: fx.Node, fixed: tuple[fx.node.Argument, ...], wire: BoundSpec) -> None:
    with user.graph.inserting_after(user):
        decoded = user.graph.call_function(DECODE)
    user.replace_all_uses_with(decoded)
    decoded.args = (user, *fixed)
    decoded.meta = dict(user.meta)
    value = user.meta.get("val")
    if isinstance(value, torch.Tensor):
        shape = (*value.shape[:-1], wire.shape[-1])
        user.meta = {**user.meta, "val": value.new_empty(shape, dtype=_dtype(wire))}


def _dtype(bound: BoundSpec) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, bound.dtype)
    return dtype


def _first(graph: fx.Graph, nodes: list[fx.Node]) -> fx.Node:
    wanted = set(nodes)
    node: fx.Node = next(node for node in graph.nodes if node in wanted)
    return node
