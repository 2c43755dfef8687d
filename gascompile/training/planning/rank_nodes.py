"""Rank nodes: what a step's program has where several ranks train one model."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import torch
from torch import fx

from gascompile.core.errors import UnsupportedOpError
from gascompile.core.program import draws
from gascompile.core.ranks import RankLayout
from gascompile.distributed import stage_ops
from gascompile.passes.graph.bound_aliases import may_share_memory
from gascompile.training.optimizers import rank_ops
from gascompile.training.optimizers.optimizers import FEWEST_SHARED
from gascompile.training.optimizers.slots import Slot

if TYPE_CHECKING:
    from gascompile.training.capture.joint import Joint


def is_small(parameter: fx.Node, layout: RankLayout | None) -> bool:
    """Return whether ranks sum a parameter's gradient in one exchange with others."""
    count: int = parameter.meta["val"].numel()
    return layout is not None and count < layout.size * FEWEST_SHARED


def added(
    graph: fx.Graph, nodes: list[fx.Node], target: torch._ops.OpOverload = rank_ops.add
) -> list[fx.Node]:
    """Add the sums of values over the ranks, or those of ``target``, in one exchange."""
    total = graph.call_function(target, (nodes,))
    total.meta["val"] = [torch.empty_like(node.meta["val"]) for node in nodes]
    sums = []
    for number, value in enumerate(total.meta["val"]):
        sums.append(graph.call_function(operator.getitem, (total, number)))
        sums[-1].meta["val"] = value
    return sums


def own_parts(
    graph: fx.Graph, slot: Slot, gradient: fx.Node, parameter: fx.Node, rank: int
) -> list[fx.Node]:
    """Add the sums over the ranks of what ``rank`` updates of a parameter, range by range."""
    like = parameter.meta["val"]
    shape, stride = list(like.shape), list(like.stride())
    parts = []
    for bounds, (begin, end) in zip(slot.bounds, slot.ranges, strict=True):
        args = (gradient, shape, stride, list(bounds), rank)
        parts.append(graph.call_function(rank_ops.add_part, args))
        parts[-1].meta["val"] = gradient.meta["val"].new_empty(end - begin)
    return parts


def norm(graph: fx.Graph, norms: list[fx.Node]) -> fx.Node:
    """Add the norm of what all ranks have parts of, from those of this rank's."""
    node = graph.call_function(rank_ops.norm, (norms,))
    node.meta["val"] = norms[0].meta["val"].new_empty(())
    return node


def all_norms(
    graph: fx.Graph,
    slots: Collection[Slot],
    norms: list[fx.Node],
    parts: list[fx.Node],
    loss: fx.Node,
) -> list[fx.Node]:
    """Return what the norm of all gradients is made of: ``norms``, and that of what all ranks have ``parts`` of."""
    if not parts and any(slot.owner is not None for slot in slots):
        # Other stages of a pipeline wait for the part of one that has none, too.
        nothing = graph.call_function(torch.ops.aten.zeros_like.default, (loss,))
        nothing.meta["val"] = loss.meta["val"].new_empty(())
        parts = [nothing]
    return [*norms, norm(graph, parts)] if parts else norms


def gathered(graph: fx.Graph, slot: Slot, parameter: fx.Node) -> None:
    """Add what fetches the elements that other ranks have updated."""
    for bounds in slot.bounds:
        node = graph.call_function(rank_ops.gather, (parameter, list(bounds)))
        node.meta["val"] = None


def copied(graph: fx.Graph, joint: Joint, bound: Mapping[str, fx.Node]) -> set[str]:
    """Add what brings new values of parameters to all stages of a pipeline that have them; return what is received."""
    with graph.inserting_before(graph.output_node()):
        for copy in joint.copies:
            parameter = bound[copy.name]
            where = (copy.peer, copy.tag)
            if copy.sends:
                graph.call_function(stage_ops.send, (parameter, *where)).meta["val"] = None
                continue
            like = parameter.meta["val"]
            layout = (list(like.shape), list(like.stride()), like.dtype)
            value = graph.call_function(stage_ops.receive, (parameter, *where, *layout))
            value.meta["val"] = torch.empty_like(like)
            node = graph.call_function(torch.ops.aten.copy_.default, (parameter, value))
            node.meta["val"] = like
    return {copy.name for copy in joint.copies if not copy.sends}


def divide(
    graph: fx.Graph, slot: Slot, parameter: fx.Node, parts: list[fx.Node], loss: fx.Node
) -> None:
    """Let ops read a divided parameter gathered: once, or in the backward pass again.

    Args:
        graph: of the step.
        slot: of the parameter.
        parameter: its placeholder, which nothing reads any more then.
        parts: placeholders of what this rank has of it.
        loss: what comes after it is the backward pass.
    """
    again: dict[fx.Node, fx.Node] = {}
    if slot.stage == "again":
        made = _made_of(parameter)
        early = [node for node in made if node <= loss]
        late = sorted({r for node in early for r in node.users if loss < r} - {graph.output_node()})
        if late and any(node <= loss for node in parameter.users):
            again[parameter] = _gathered_before(late[0], slot, parameter, parts)
        for reader in late if again else ():
            for source in early:
                if source in reader.all_input_nodes:
                    reader.replace_input_with(source, _again(source, again, reader))
        for node in reversed(made):
            if not node.users and node is not parameter:
                graph.erase_node(node)
    if parameter.users:
        whole = _gathered_before(min(parameter.users), slot, parameter, parts)
        parameter.replace_all_uses_with(whole)


def _made_of(parameter: fx.Node) -> list[fx.Node]:
    """Return a parameter's node, and its views and casts, which are made again rather than kept; in their order."""
    made = {parameter}
    for node in parameter.graph.nodes:
        sources = [source for source in node.all_input_nodes if source in made]
        if not sources or sources != node.all_input_nodes or node.op != "call_function":
            continue
        is_cast = node.target is torch.ops.aten._to_copy.default
        if is_cast or may_share_memory(node, sources[0]):
            made.add(node)
    return sorted(made)


def _again(node: fx.Node, again: dict[fx.Node, fx.Node], reader: fx.Node) -> fx.Node:
    """Return a view or cast of what ``again`` has of a parameter, made before ``reader`` unless it is there."""
    if node not in again:
        for source in node.all_input_nodes:
            _again(source, again, reader)
        with node.graph.inserting_before(reader):
            again[node] = node.graph.node_copy(node, again.__getitem__)
    return again[node]


def _gathered_before(
    reader: fx.Node, slot: Slot, parameter: fx.Node, parts: list[fx.Node]
) -> fx.Node:
    like = parameter.meta["val"]
    bounds = [end for ends in slot.bounds for end in ends]
    with parameter.graph.inserting_before(reader):
        args = (parts, list(like.shape), list(like.stride()), bounds)
        whole = parameter.graph.call_function(rank_ops.whole, args)
    whole.meta["val"] = like.new_empty_strided(like.shape, like.stride())
    return whole


def require_synchronised(graph: fx.Graph) -> None:
    """Refuse batch norms over the rows of one rank; those of ``functional.batch_norm`` are over all ranks' by now.

    Raises:
        UnsupportedOpError: names the op.
    """
    for node in graph.nodes:
        target = node.target
        if not isinstance(target, torch._ops.OpOverload) or "batch_norm" not in str(target):
            continue
        names = [argument.name for argument in target._schema.arguments]
        given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        if given.get("training") or given.get("train"):
            raise UnsupportedOpError(
                f"{target} normalises by the rows of one rank; call torch.nn.functional.batch_norm or a module of "
                "torch.nn, which several ranks compute over all rows, or train in one process"
            )


def require_same_on_all(name: str, value: fx.Node, joint: Joint) -> None:
    """Refuse a new value of a buffer that the rows of one rank decide.

    Args:
        name: of the buffer.
        value: its new one.
        joint: what it is a part of.

    Raises:
        UnsupportedOpError: names the buffer.
    """
    # What the trace has made of numbers is in the graph of every rank.
    num_read = len(joint.outside) - joint.num_constants
    inputs = {*joint.inputs, *list(joint.outside)[:num_read]}
    left, seen = [value], {value}
    while left:
        node = left.pop()
        if node.op == "call_function" and rank_ops.exchanges(node.target):
            continue
        if node.name in inputs or draws(node.target):
            raise UnsupportedOpError(
                f"the model changes its buffer '{name}' in the forward pass by what the rows of this rank are, and "
                "ranks would drift apart; only batch norms are computed over all ranks. Change it between steps, or "
                "train in one process"
            )
        left += [source for source in node.all_input_nodes if source not in seen]
        seen.update(node.all_input_nodes)
