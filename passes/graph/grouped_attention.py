"""Grouped attention: keys and values that are repeated for groups of queries are read where they are instead.

Models repeat them before attention (``unsqueeze``, ``expand``, ``reshape``), which writes each as often as there are
queries in a group, at every call. The kernel of the processor takes them once: it computes the same numbers in the same
order, bit for bit, without the copies. Kernels of GPUs take grouped queries with fewer masks, so this is for the
processor alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from gascompile.core.program import Program, copied_graph
from gascompile.passes.graph.mutated_tensors import written_arguments

_aten = torch.ops.aten
_DTYPES = {torch.float32, torch.float64, torch.bfloat16, torch.float16}
"""That the processor's attention kernel takes; it is asked for by what it requires."""
_REPETITION = (
    _aten.reshape.default,
    _aten.expand.default,
    _aten.unsqueeze.default,
    _aten.sym_size.int,
)
_NUM_DIMS = 4
"""Of queries, keys, values and masks: rows, heads, tokens, width."""
_HEADS = 1  # dimension of keys and values


def grouped_attention(program: Program) -> Program:
    """Return ``program`` without repeated keys and values; itself where there are none."""
    if not any(_repeated_of(node) for node in program.graph_module.graph.nodes):
        return program
    graph = copied_graph(program.graph_module.graph)
    module = fx.GraphModule(program.graph_module, graph)
    nodes = list(graph.nodes)
    for i, node in enumerate(nodes):
        unrepeated = _repeated_of(node)
        # Copies are of the time when they were made: what is written after that is not in them.
        if unrepeated is not None and not _is_written_since(nodes[:i], node.args[1:3]):
            node.args = (node.args[0], *unrepeated, *node.args[3:])
            node.update_kwarg("enable_gqa", True)
    graph.eliminate_dead_code(is_impure_node=_stays)
    graph.lint()
    module.recompile()
    return replace(program, graph_module=module)


def _is_written_since(before: list[fx.Node], copies: Any) -> bool:
    """Return whether an op writes to any tensor after the first of ``copies`` is made."""
    first = min(map(before.index, copies))
    return any(map(written_arguments, before[first:]))


def _stays(node: fx.Node) -> bool:
    """Return whether a node stays though nobody reads it: all but what the repetitions are made of."""
    return node.target not in _REPETITION


def _repeated_of(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return the keys and values that an attention repeats, if it does so and its kernel can do without."""
    is_attention = node.target is _aten.scaled_dot_product_attention.default
    if not is_attention or node.kwargs.get("enable_gqa"):
        return None
    query, key, value = (_tensor(argument) for argument in node.args[:3])
    sources = (_source_of(node.args[1]), _source_of(node.args[2]))
    if query is None or key is None or value is None or None in sources:
        return None
    keys, values = (_tensor(source) for source in sources)
    assert keys is not None and values is not None, "as sources are found"
    dropout = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
    mask = _tensor(node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask"))
    fits = (
        dropout == 0.0
        and query.dtype in _DTYPES
        and query.dtype == keys.dtype == values.dtype
        and query.dim() == keys.dim() == values.dim() == _NUM_DIMS
        and (mask is None or (mask.dim() == _NUM_DIMS and not mask.requires_grad))
        and key.shape[1] == value.shape[1] == query.shape[1]
        and keys.shape[1] == values.shape[1]
        and query.shape[-1] == keys.shape[-1] == values.shape[-1]
        and all(tensor.stride(-1) == 1 for tensor in (query, keys, values))
    )
    pair: Any = sources
    return pair if fits else None


def _source_of(node: Any) -> fx.Node | None:
    """Return what ``x[:, :, None].expand(...).reshape(...)`` repeats, head after head."""
    whole = _tensor(node)
    expanded = _argument(node, _aten.reshape.default)
    parts = _tensor(expanded)
    unsqueezed = _argument(expanded, _aten.expand.default)
    repeated = _argument(unsqueezed, _aten.unsqueeze.default)
    source = _tensor(repeated)
    if source is None or whole is None or parts is None or unsqueezed is None:
        return None
    if source.dim() != _NUM_DIMS or unsqueezed.args[1] != _HEADS + 1:
        return None
    rows, heads, tokens, width = source.shape
    each = parts.shape[_HEADS + 1]
    is_repeated = parts.shape == (rows, heads, each, tokens, width)
    is_repeated = is_repeated and whole.shape == (rows, heads * each, tokens, width)
    return repeated if is_repeated else None


def _argument(node: Any, target: torch._ops.OpOverload) -> fx.Node | None:
    """Return what an op of this kind is given first."""
    if not isinstance(node, fx.Node) or node.target is not target:
        return None
    first = node.args[0]
    return first if isinstance(first, fx.Node) else None


def _tensor(node: Any) -> torch.Tensor | None:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None
