"""Divide a graph: the captured nodes of divided ops give way to one node per tile or part, or to a gather.

Afterwards the graph has the ops of the plan's workload, one node each and in order, and a placeholder
for every tile or part of a weight. The node of an op in parts joins them, or goes where nobody needs the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import fx

from gascompile.core import moves
from gascompile.core.errors import PlanMismatchError
from gascompile.core.program import OP_NAME, add_node
from gascompile.core.tiles import Tile, base_name, is_tile, parse_tile
from gascompile.core.workload import OpSpec
from gascompile.cost_models.formulas.gathers import gathered
from gascompile.formats import ops as format_ops


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
        elif row_reads := gathered(op):
            gathers[op.name] = tuple(row_reads)
    parts = _Parts(graph, ops, bound)
    for node in list(graph.nodes):
        if node.op == "call_function" and node.name in parts.of:
            parts.divide(node)
        elif node.op == "call_function" and node.name in tiles:
            _replace_by_tiles(graph, node, tiles[node.name], bound)
        elif node.op == "call_function" and node.name in gathers:
            _replace_by_gather(graph, node, gathers[node.name], bound, mover)
    parts.finish()


def _replace_by_tiles(
    graph: fx.Graph, node: fx.Node, tiles: Sequence[Tile], bound: dict[fx.Node, str]
) -> None:
    x, weight, bias = (*node.args, None)[:3] if len(node.args) > 1 else (None, None, None)
    is_linear = node.target in (torch.ops.aten.linear.default, format_ops.LINEAR)
    if not is_linear or weight not in bound:
        raise PlanMismatchError(
            f"the plan divides op '{node.name}', which is no linear layer of a weight; plan again"
        )
    assert isinstance(weight, fx.Node)
    bias = node.kwargs.get("bias", bias)
    is_packed = node.target is format_ops.LINEAR
    function = format_ops.linear_tile if is_packed else moves.linear_tile
    form = node.args[3:] if is_packed else ()
    out: fx.Node | None = None
    for tile in tiles:
        part = _tile_placeholder(graph, weight, tile, bound)
        with graph.inserting_before(node):
            args = (out, x, part, bias, tile.begin, tiles[-1].end, *form)
            out = _call(graph, node, function, args, tile)
    assert out is not None
    node.replace_all_uses_with(out)
    graph.erase_node(node)


class _Parts:
    """The nodes of ops in parts: one per part, each an op as it was, and those that join what these make."""

    def __init__(self, graph: fx.Graph, ops: Sequence[OpSpec], bound: dict[fx.Node, str]) -> None:
        """Find which ops are in parts, and which joins there are."""
        self._graph, self._bound = graph, bound
        self.of: dict[str, list[Tile]] = {}
        self._joins: dict[str, list[Tile]] = {}
        """Of an op the whole that is made for another processor's parts."""
        self._reads = {op.name: op.reads for op in ops}
        self._made: dict[str, fx.Node] = {}
        self._left: list[fx.Node] = []
        for op in ops:
            tile = parse_tile(op.name)
            if tile is None or is_tile(op.name, op.writes):
                continue
            is_join = any(base_name(name) == f"%{tile.base}" for name in op.reads)
            (self._joins if is_join else self.of).setdefault(tile.base, []).append(tile)

    def divide(self, node: fx.Node) -> None:
        """Insert the parts of ``node`` and what joins them; the node itself does so for the tier that computes.

        Raises:
            PlanMismatchError: they are not all of its features, each once.
        """
        parts = self.of[node.name]
        in_order = sorted(parts, key=lambda part: part.begin)
        ends = [0, *(part.end for part in in_order)]
        is_linear = node.target is torch.ops.aten.linear.default and not node.kwargs
        is_whole = [part.begin for part in in_order] == ends[:-1] and all(
            part.begin < part.end for part in parts
        )
        value = node.meta.get("val")
        if not is_whole or _features(node, is_linear=is_linear) not in (None, ends[-1]):
            self._refuse(node)
        for part in parts:
            given = self._linear(node, part) if is_linear else self._pointwise(node, part)
            with self._graph.inserting_before(node):
                call = _call(self._graph, node, node.target, given, part)
            call.kwargs = node.kwargs
            if isinstance(value, torch.Tensor):
                call.meta["val"] = value.new_empty((*value.shape[:-1], part.end - part.begin))
            self._made[part.name] = call
        joined = ([self._made[part.name] for part in in_order], -1)
        for join in self._joins.get(node.name, ()):
            if (join.begin, join.end) != (0, ends[-1]):
                self._refuse(node)
            with self._graph.inserting_before(node):
                made = _call(self._graph, node, torch.ops.aten.cat.default, joined, join)
            self._made[join.name] = made
        if node.name in self._reads:
            node.target, node.args, node.kwargs = torch.ops.aten.cat.default, joined, {}
        else:
            self._left.append(node)

    def finish(self) -> None:
        """Take out what nobody joins.

        Raises:
            PlanMismatchError: somebody reads it as a whole.
        """
        for node in reversed(self._left):
            if node.users:
                self._refuse(node)
            self._graph.erase_node(node)

    def _linear(self, node: fx.Node, part: Tile) -> tuple[fx.node.Argument, ...]:
        """Return what a part of a linear layer is given: its input and its rows of weight and bias."""
        x, weight, bias = (*node.args, None)[:3] if len(node.args) > 1 else (None, None, None)
        known = [row for row in (weight, bias) if row is not None]
        if x in known or not known:
            self._refuse(node)
        rows = []
        for row in known:
            if not isinstance(row, fx.Node) or row not in self._bound:
                self._refuse(node)
            rows.append(_tile_placeholder(self._graph, row, part, self._bound))
        wholes = (name[1:] for name in self._reads[part.name] if name[1:] in self._made)
        for name in wholes:
            join = parse_tile(name)
            if join is None or not isinstance(x, fx.Node) or x.name != join.base:
                self._refuse(node)
            x = self._made[name]
        return (x, *rows)

    def _pointwise(self, node: fx.Node, part: Tile) -> tuple[fx.node.Argument, ...]:
        """Return the arguments of a pointwise op with the same part of each result that it is given."""
        target = node.target
        is_pointwise = (
            isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags
        )
        given = {n: self._made.get(part._replace(base=n.name).name) for n in node.all_input_nodes}
        in_kwargs: list[fx.Node] = []
        fx.node.map_arg(node.kwargs, in_kwargs.append)
        if not is_pointwise or in_kwargs or not given or None in given.values():
            self._refuse(node)
        args: tuple[fx.node.Argument, ...] = fx.node.map_arg(node.args, lambda n: given[n])
        return args

    def _refuse(self, node: fx.Node) -> NoReturn:
        raise PlanMismatchError(
            f"the plan has op '{node.name}' in parts that are not those of a linear layer's rows; plan again"
        )


def _features(node: fx.Node, *, is_linear: bool) -> int | None:
    """Return the features of an op's result, as far as its graph says so."""
    weight = node.args[1] if is_linear and len(node.args) > 1 else None
    values = (weight.meta.get("val") if isinstance(weight, fx.Node) else None, node.meta.get("val"))
    features = [
        v.shape[i] for i, v in zip((0, -1), values, strict=True) if isinstance(v, torch.Tensor)
    ]
    return int(features[0]) if features else None


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
