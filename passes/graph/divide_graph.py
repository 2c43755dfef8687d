"""Divide a graph: the captured nodes of divided ops give way to one node per tile or part, or to a gather.

Afterwards the graph has the ops of the plan's workload, one node each and in order, and a placeholder
for every tile or part of a weight. The node of an op in parts stays: it joins them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from gascompile.core import moves
from gascompile.core.errors import PlanMismatchError
from gascompile.core.program import OP_NAME, add_node
from gascompile.core.tiles import Tile, parse_tile
from gascompile.core.workload import OpSpec
from gascompile.cost_models.formulas.gathers import gathered
from gascompile.formats import ops as wire_ops
from gascompile.passes.graph.divide import joined_ops


def divide_graph(
    graph: fx.Graph, ops: Sequence[OpSpec], bound: dict[fx.Node, str], mover: fx.Node
) -> None:
    """Divide the nodes of ``graph`` as ``ops`` has them, in place.

    Args:
        graph: a copy of the program's graph.
        ops: those of the plan's workload.
        bound: placeholders with the names of their tensors; those of tiles are added.
        mover: the placeholder of the runtime, which a gather asks for its rows.

    Raises:
        PlanMismatchError: an op is divided that cannot be.
    """
    tiles: dict[str, list[Tile]] = {}
    gathers: dict[str, tuple[str, ...]] = {}
    for op in ops:
        tile = parse_tile(op.name)
        if tile is not None:
            tiles.setdefault(tile.base, []).append(tile)
        elif found := gathered(op):
            gathers[op.name] = tuple(found)
    joined = joined_ops(ops)
    for node in list(graph.nodes):
        if node.op == "call_function" and node.name in joined:
            _join_parts(graph, node, tiles[node.name], bound)
        elif node.op == "call_function" and node.name in tiles:
            _replace_by_tiles(graph, node, tiles[node.name], bound)
        elif node.op == "call_function" and node.name in gathers:
            _replace_by_gather(graph, node, gathers[node.name], bound, mover)


def _replace_by_tiles(
    graph: fx.Graph, node: fx.Node, tiles: Sequence[Tile], bound: dict[fx.Node, str]
) -> None:
    x, weight, bias = (*node.args, None)[:3] if len(node.args) > 1 else (None, None, None)
    is_linear = node.target in (torch.ops.aten.linear.default, wire_ops.LINEAR)
    if not is_linear or weight not in bound:
        raise PlanMismatchError(
            f"the plan divides op '{node.name}', which is no linear layer of a weight; plan again"
        )
    assert isinstance(weight, fx.Node)
    bias = node.kwargs.get("bias", bias)
    is_wire = node.target is wire_ops.LINEAR
    function = wire_ops.linear_tile if is_wire else moves.linear_tile
    form = node.args[3:] if is_wire else ()
    out: fx.Node | None = None
    for tile in tiles:
        part = _tile_placeholder(graph, weight, tile, bound)
        with graph.inserting_before(node):
            args = (out, x, part, bias, tile.begin, tiles[-1].end, *form)
            out = _call(graph, node, function, args, tile)
    assert out is not None
    node.replace_all_uses_with(out)
    graph.erase_node(node)


def _join_parts(
    graph: fx.Graph, node: fx.Node, parts: Sequence[Tile], bound: dict[fx.Node, str]
) -> None:
    """Let ``node`` join what its parts make, each an op as it was, of some rows of its weight and bias.

    Raises:
        PlanMismatchError: it has none, or they are not all of its rows, each once and in their order.
    """
    x, weight, bias = (*node.args, None)[:3] if len(node.args) > 1 else (None, None, None)
    value = node.meta.get("val")
    in_order = sorted(parts, key=lambda part: part.begin)
    ends = [0, *(part.end for part in in_order)]
    known = [row for row in (weight, bias) if row is not None]
    if (
        node.target is not torch.ops.aten.linear.default
        or node.kwargs
        or x in known
        or any(not isinstance(row, fx.Node) or row not in bound for row in known)
        or [part.begin for part in in_order] != ends[:-1]
        or any(part.begin >= part.end for part in parts)
        or _features(weight, value) not in (None, ends[-1])
    ):
        raise PlanMismatchError(
            f"the plan has op '{node.name}' in parts that are not those of a linear layer's rows; plan again"
        )
    made: dict[Tile, fx.Node] = {}
    for part in parts:
        rows = [
            _tile_placeholder(graph, row, part, bound) for row in known if isinstance(row, fx.Node)
        ]
        with graph.inserting_before(node):
            found = _call(graph, node, torch.ops.aten.linear.default, (x, *rows), part)
        if isinstance(value, torch.Tensor):
            found.meta["val"] = value.new_empty((*value.shape[:-1], part.end - part.begin))
        made[part] = found
    node.target = torch.ops.aten.cat.default
    node.args = ([made[part] for part in in_order], -1)


def _features(weight: object, value: object) -> int | None:
    """Return the output features of a layer, as far as its graph says so."""
    values = (weight.meta.get("val") if isinstance(weight, fx.Node) else None, value)
    found = [
        v.shape[i] for i, v in zip((0, -1), values, strict=True) if isinstance(v, torch.Tensor)
    ]
    return int(found[0]) if found else None


def _call(
    graph: fx.Graph,
    node: fx.Node,
    function: object,
    args: tuple[fx.node.Argument, ...],
    tile: Tile | None = None,
) -> fx.Node:
    """Insert the op that takes the place of ``node`` or does a tile of it."""
    suffix = f"{tile.begin}to{tile.end}" if tile else "rows"
    assert callable(function)
    call = add_node(graph, function, args, name=f"{node.name}_{suffix}")
    op = Tile(node.name, tile.begin, tile.end).name if tile else node.name
    call.meta = {**node.meta, OP_NAME: op}
    return call


def _tile_placeholder(
    graph: fx.Graph, weight: fx.Node, tile: Tile, bound: dict[fx.Node, str]
) -> fx.Node:
    """Return the placeholder of rows of ``weight``; ops that share the weight share it."""
    name = Tile(bound[weight], tile.begin, tile.end).name
    for node, known in bound.items():
        if known == name:
            return node
    with graph.inserting_after(weight):
        placeholder = graph.placeholder(f"{weight.name}_{tile.begin}to{tile.end}")
    bound[placeholder] = name
    return placeholder


def _replace_by_gather(
    graph: fx.Graph,
    node: fx.Node,
    names: tuple[str, ...],
    bound: dict[fx.Node, str],
    mover: fx.Node,
) -> None:
    weight = node.args[0] if node.args else None
    is_embedding = node.target is torch.ops.aten.embedding.default
    if not is_embedding or not isinstance(weight, fx.Node) or names != (bound.get(weight),):
        raise PlanMismatchError(
            f"the plan gathers rows in op '{node.name}', which is no embedding of {list(names)}; plan again"
        )
    with graph.inserting_before(node):
        rows = _call(graph, node, moves.gather, (mover, names[0], node.args[1]))
    node.replace_all_uses_with(rows)
    graph.erase_node(node)
