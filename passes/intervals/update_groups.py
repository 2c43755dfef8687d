"""Update groups: ops that change what lasts, and might as well run where that rests.

An optimizer's update reads a gradient and changes a parameter and its moments. On a tier with a processor of its own
the moments may rest for good, as nothing else touches them: then a gradient goes there and a parameter comes back.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gascompile.core.machine import Machine
from gascompile.core.workload import PERSISTENT, TensorKind, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateGroup:
    """Ops that go elsewhere together: all that change the same tensors."""

    ops: tuple[int, ...]
    gradient: str
    """What they read, of the ops before."""
    shared: tuple[str, ...]
    """What they change and ops before them read: parameters."""
    apart: tuple[str, ...]
    """What they change and nobody else touches: moments."""
    size_bytes: int
    """Of the gradient."""
    lasting_bytes: int
    """Of what they change."""
    time_s: float
    """Of the ops, elsewhere."""


def update_groups(workload: Workload, machine: Machine, tier: str) -> list[UpdateGroup]:
    """Return what may run on ``tier``, in program order, but for what would be mostly latency to send there."""
    own = machine.compute_tier
    link = machine.link(f"{own}->{tier}")
    least_bytes = link.latency_s * link.bandwidth_bytes_per_s
    kinds = {tensor.name: tensor.kind for tensor in workload.tensors}
    able = [
        i
        for i, op in enumerate(workload.ops)
        if {own, tier} <= op.time_s.keys()
        and op.writes
        and all(kinds[name] in PERSISTENT for name in op.writes)
    ]
    groups = (_group(workload, ops, tier, kinds) for ops in _joined(workload, able))
    worthwhile = [g for g in groups if g is not None and g.size_bytes >= least_bytes]
    gradients = Counter(g.gradient for g in worthwhile)
    return sorted((g for g in worthwhile if gradients[g.gradient] == 1), key=lambda g: g.ops)


def _joined(workload: Workload, able: Sequence[int]) -> list[list[int]]:
    """Return the ops that change a tensor in common, those groups without an op that may not go left out."""
    root: dict[str, str] = {}

    def find(name: str) -> str:
        while (above := root.setdefault(name, name)) != name:
            name = above
        return name

    for i in able:
        first, *rest = workload.ops[i].writes
        for name in rest:
            root[find(name)] = find(first)
    joined: dict[str, list[int]] = defaultdict(list)
    for i in able:
        joined[find(workload.ops[i].writes[0])].append(i)
    others = {n for i, op in enumerate(workload.ops) if i not in set(able) for n in op.writes}
    return [
        ops
        for ops in joined.values()
        if others.isdisjoint(n for i in ops for n in workload.ops[i].writes)
    ]


def _group(
    workload: Workload, ops: Sequence[int], tier: str, kinds: Mapping[str, TensorKind]
) -> UpdateGroup | None:
    """Return the group of ``ops``; ``None`` where others need what they change, or they read more than one result."""
    sizes = {tensor.name: tensor.size_bytes for tensor in workload.tensors}
    changed = tuple(dict.fromkeys(name for i in ops for name in workload.ops[i].writes))
    made = {
        name
        for i in ops
        for name in workload.ops[i].reads
        if name not in changed and kinds[name] is not TensorKind.INPUT
    }
    if len(made) != 1:
        return None
    (gradient,) = made
    writers = [i for i, op in enumerate(workload.ops) if gradient in op.writes]
    if kinds[gradient] not in {TensorKind.ACTIVATION, TensorKind.GRADIENT} or len(writers) != 1:
        return None
    mine = set(ops)
    users = {
        name: [i for i, op in enumerate(workload.ops) if i not in mine and name in op.reads]
        for name in changed
    }
    if any(i > ops[0] for readers in users.values() for i in readers):
        return None
    return UpdateGroup(
        ops=tuple(ops),
        gradient=gradient,
        shared=tuple(name for name in changed if users[name]),
        apart=tuple(name for name in changed if not users[name]),
        size_bytes=sizes[gradient],
        lasting_bytes=sum(sizes[name] for name in changed),
        time_s=sum(workload.ops[i].time_s[tier] for i in ops),
    )


def sites_of(
    workload: Workload, groups: Sequence[UpdateGroup], own: str, tier: str
) -> tuple[str, ...]:
    """Return where each op runs when ``groups`` run on ``tier``."""
    away = {i for group in groups for i in group.ops}
    return tuple(tier if i in away else own for i in range(len(workload.ops)))
