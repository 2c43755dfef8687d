"""Rank programs: what the programs of ranks have in common that train one model, so that they can run together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx
from torch.utils import _pytree as pytree

from gascompile.core import serial
from gascompile.core.errors import RankMismatchError
from gascompile.training.optimizers import rank_ops
from gascompile.training.planning.row_draws import laws_of
from gascompile.training.planning.step_program import StepProgram

_APART = ("gascompile_updates", rank_ops.NAMESPACE)


def sequence_of(step: StepProgram) -> list[object]:
    """Return what programs of all ranks have in common: updates and exchanges in their order, and what buffers become.

    Sizes of activations are each rank's own.
    """
    program = step.program
    sequence: list[object] = [sorted(step.gradients), laws_of(program.graph_module.graph)]
    for node in program.op_nodes():
        if str(node.target).startswith("gascompile_updates"):
            sequence.append([str(node.target), _named(node.args[0], step)])
        if rank_ops.exchanges(node.target) and node.target not in rank_ops.ENDS:
            bounds = [arg for arg in node.args if _is_numbers(arg)]
            # Their number alone: programs from the cache have no shapes, and gradients are told apart by their names.
            num_values = len(node.all_input_nodes)
            parts = node.args[0] if node.target is rank_ops.whole else ()
            names = [_named(part, step) for part in pytree.tree_leaves(parts)]
            # What goes on beside ops is the same exchange.
            target = rank_ops.BEGINS.get(node.target, node.target)
            sequence.append([str(target), names, bounds, num_values])
        if node.target is torch.ops.aten.copy_.default and _named(node.args[0], step):
            sequence.append(_behind(node, step))
    return sequence


def number_of_ops(step: StepProgram) -> int:
    """Return what tells ops and their constants apart, which are the same on ranks whose batches are of one kind.

    Exchanges and updates are left out, with what is made of them alone: ``sequence_of`` has them, and of some the
    number is each rank's own.
    """
    program, ops = step.program, []
    apart = {
        node
        for node in program.graph_module.graph.nodes
        if node.op == "placeholder" and program.bindings.get(node.name, "") in step.tiles
    }
    for node in program.op_nodes():
        sources = node.all_input_nodes
        namespace = node.target.namespace if isinstance(node.target, torch._ops.OpOverload) else ""
        if namespace in _APART or (sources and apart.issuperset(sources)):
            apart.add(node)
            continue
        given = pytree.tree_leaves((node.args, node.kwargs))
        numbers = [repr(arg) for arg in given if not isinstance(arg, fx.Node)]
        bound = [program.bindings.get(arg.name, "") for arg in given if isinstance(arg, fx.Node)]
        ops.append([str(node.target), numbers, bound])
    # Where an op stands is each rank's own, too.
    return _number(sorted(ops, key=repr))


def number_of_kind(batch: object) -> int:
    """Return what tells kinds of batches apart, whose programs may differ."""
    leaves, spec = pytree.tree_flatten(batch)
    kinds = [
        [str(leaf.dtype), list(leaf.shape), list(leaf.stride())]
        if isinstance(leaf, torch.Tensor)
        else repr(leaf)
        for leaf in leaves
    ]
    return _number([str(spec), kinds])


def _number(facts: object) -> int:
    return int(serial.digest(facts)[:15], 16)


def require_same_ops(ops: Sequence[int], kinds: Sequence[int]) -> None:
    """Refuse programs that differ where batches are of one kind; all ranks know of it.

    Args:
        ops: ``number_of_ops`` of each rank.
        kinds: ``number_of_kind`` of each.

    Raises:
        RankMismatchError: names two ranks.
    """
    for rank, kind in enumerate(kinds):
        first = kinds.index(kind)
        if ops[rank] != ops[first]:
            raise RankMismatchError(
                f"rank {rank} and rank {first} differ in the ops of their programs or in constants of these, such as a "
                "rate of dropout or a factor of the loss, with batches of one kind: every rank has to make the same "
                "model and loss, and to change them at the same step",
                rank=rank,
            )


def _named(argument: object, step: StepProgram) -> str:
    """Return the parameter or buffer that an op writes to, directly or through a view; of a moment its parameter."""
    while isinstance(argument, fx.Node) and argument.op != "placeholder":
        argument = argument.args[0] if argument.args else None
    name = step.program.bindings.get(argument.name, "") if isinstance(argument, fx.Node) else ""
    return step.tiles[name].parameter if name in step.tiles else name


def _behind(node: fx.Node, step: StepProgram) -> list[object]:
    """Return the ops that make a buffer's new value, with their numbers, up to exchanges."""
    ops: list[object] = []
    left, seen = [node], {node}
    while left:
        node = left.pop()
        numbers = [arg for arg in pytree.tree_leaves(node.args) if not isinstance(arg, fx.Node)]
        name = step.program.bindings.get(node.name, "")
        ops.append([str(node.target) if node.op != "placeholder" else name, repr(numbers)])
        if not rank_ops.exchanges(node.target):
            left += [source for source in node.all_input_nodes if source not in seen]
            seen.update(node.all_input_nodes)
    return ops


def _is_numbers(arg: object) -> bool:
    return isinstance(arg, (list, tuple)) and all(isinstance(item, int) for item in arg)
