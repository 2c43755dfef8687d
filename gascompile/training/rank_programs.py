"""Rank programs: what the programs of ranks have in common that train one model, so that they can run together."""

from __future__ import annotations

import torch
from torch import fx
from torch.utils import _pytree as pytree

from gascompile.training.optimizers import rank_ops
from gascompile.training.planning.step_program import StepProgram


def sequence_of(step: StepProgram) -> list[object]:
    """Return what programs of all ranks have in common: updates and exchanges in their order, and what buffers become.

    Sizes of activations are each rank's own.
    """
    program = step.program
    sequence: list[object] = [sorted(step.gradients)]
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
