"""Leaving: which ops of a program may run on another processor than the one that its plan is for.

Only what is proven may: ops of torch's own that read tensors and make one, and change nothing, draw nothing, name
no device. Whatever they touch is written by one op alone and is no state, so that a copy of it is as good as itself.
And updates of optimizers, which change whole tensors that last and nothing else: where these rest, if need be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

import torch
from torch import fx

from gascompile.core.machine import Machine, PlaceKind
from gascompile.core.workload import OpSpec, TensorKind, TensorSpec
from gascompile.passes.graph.mutated_tensors import written_arguments

_NAMED = ("device", "pin_memory", "generator", "layout")
"""Arguments that tie an op to where it is."""
_UPDATES = "gascompile_updates"
"""Namespace of the updates of optimizers."""
_CHANCE = (
    torch.Tag.nondeterministic_seeded,
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
)


def other_sites(machine: Machine) -> tuple[str, ...]:
    """Return the place besides the one that computes whose processor the machine knows the speed of, if any."""
    own = machine.compute_tier
    links = {(link.source_tier, link.target_tier) for link in machine.links}
    known = {rate.device for rate in machine.memory} & {rate.device for rate in machine.rates}
    # What slows links down was measured beside ops of the tier that computes.
    is_calm = not (machine.interference.points or machine.interference.op_s_per_byte)
    hosts = (place.name for place in machine.places if place.kind is PlaceKind.CPU)
    able = (h for h in hosts if h != own and h in known and {(own, h), (h, own)} <= links)
    return tuple(able)[:1] if is_calm else ()


def may_leave(node: fx.Node) -> bool:
    """Return whether the call of ``node`` does the same wherever its tensors lie."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return False
    schema = target._schema
    if schema.is_mutable or written_arguments(node) or any(tag in target.tags for tag in _CHANCE):
        return False
    if len(schema.returns) != 1 or str(schema.returns[0].type) != "Tensor":
        return False
    given = {argument.name for argument, _ in zip(schema.arguments, node.args, strict=False)}
    named = [*given, *(name for name, value in node.kwargs.items() if value is not None)]
    return bool(node.all_input_nodes) and not any(name in _NAMED for name in named)


def bound_tensors(tensors: Iterable[TensorSpec], ops: Iterable[OpSpec]) -> frozenset[str]:
    """Return what must be touched by ops of the tier that computes alone: what lasts and changes, parts of results."""
    tensors, ops = list(tensors), list(ops)
    writers = Counter(name for op in ops for name in dict.fromkeys(op.writes))
    own = {f"%{op.name}" for op in ops}
    # What lies in the memory of an input that changes may change with it.
    is_given_back = any(writers[t.name] for t in tensors if t.kind == TensorKind.INPUT)
    return frozenset(
        t.name
        for t in tensors
        if t.kind == TensorKind.STATE
        or (is_given_back and t.kind == TensorKind.INPUT)
        or writers[t.name] > 1
        or (writers[t.name] and t.kind == TensorKind.WEIGHT)
        or (writers[t.name] and t.name not in own)
    )


def is_update(node: fx.Node) -> bool:
    """Return whether a node is an optimizer's update: it changes what it is given, and makes nothing."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != _UPDATES:
        return False
    return target._schema.is_mutable and not target._schema.returns


def _update_leaves(op: OpSpec, node: fx.Node, bound: Collection[str]) -> bool:
    """Return whether an update changes nothing but what lasts, whole, and reads one result beside that."""
    changed = written_arguments(node)
    if not (is_update(node) and op.writes and all(name in bound for name in op.writes)):
        return False
    # Hyperparameters are the step's own: they lie beside no input that ops change.
    given = {f"%{n.name}" for n in node.all_input_nodes if n.op == "placeholder"}
    made = [n for n in dict.fromkeys(op.reads) if n not in op.writes and n not in given]
    return all(n.op == "placeholder" for n in changed) and len(made) == 1 and made[0] not in bound


def leaves(op: OpSpec, node: fx.Node, bound: Collection[str]) -> bool:
    """Return whether an op may run elsewhere, ``bound`` being what must not."""
    if is_update(node):
        return _update_leaves(op, node, bound)
    return (
        may_leave(node) and not op.gathers and not any(n in bound for n in (*op.reads, *op.writes))
    )
