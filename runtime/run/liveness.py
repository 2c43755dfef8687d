"""Lives: the steps of a plan with what each runs, and what nothing needs after it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from gascompile.core.plan import Plan
from gascompile.core.steps import Compute, Offload, Recompute, Release, Reload, Step, Wait


@dataclass(frozen=True, slots=True)
class Entry:
    """One step with what may be let go of after it."""

    step: Step
    nodes: tuple[fx.Node, ...]
    """What a ``Compute`` or ``Recompute`` runs: the op, and views of its result that are taken anew."""
    frees: tuple[fx.Node, ...]
    dies: tuple[str, ...]
    """Tensors that nothing needs any more in this iteration."""


def owners(nodes: Sequence[fx.Node], plan: Plan) -> dict[str, tuple[fx.Node, int | None]]:
    """Return per tensor the op that creates it, and which element of its result it is."""
    found: dict[str, tuple[fx.Node, int | None]] = {}
    for node, op in zip(nodes, plan.workload.ops, strict=True):
        own = f"%{node.name}"
        for name in op.writes:
            if name == own:
                found[name] = (node, None)
            elif name.startswith(f"{own}."):
                found[name] = (node, int(name.removeprefix(f"{own}.")))
    return found


def changes(plan: Plan, persistent: Mapping[str, int]) -> list[tuple[str, ...]]:
    """Return the persistent tensors that each op gives a new value."""
    return [tuple(n for n in op.writes if n in persistent) for op in plan.workload.ops]


class Lives:
    """When values end: after the last step that reads them, runs of recomputed ops and of their views included."""

    def __init__(
        self,
        nodes: Sequence[fx.Node],
        plan: Plan,
        outputs: Any,
        owner: Mapping[str, tuple[fx.Node, int | None]],
    ) -> None:
        self._nodes, self._plan, self._owner = nodes, plan, owner
        self._outputs = set(outputs)
        self._last: dict[fx.Node, int] = {}
        self._last_of_tensor: dict[str, int] = {}
        self._number = {node: number for number, node in enumerate(nodes)}
        self._at = {step.op: at for at, step in enumerate(plan.steps) if isinstance(step, Compute)}
        """Where each op runs for the first time."""

    def entries(self) -> tuple[Entry, ...]:
        """Return the plan's steps with their ends."""
        steps = self._plan.steps
        runs: list[tuple[fx.Node, ...]] = [()] * len(steps)
        for at in reversed(range(len(steps))):
            step = steps[at]
            match step:
                case Compute(op=op):
                    runs[at] = (self._nodes[op],)
                    self._use(op, at)
                case Recompute(source=source):
                    runs[at] = (self._nodes[source], *self._views(source, at))
                    self._use(source, at)
                    for node in runs[at]:
                        for read in node.all_input_nodes:
                            self._last.setdefault(read, at)
                case _:
                    self._last_of_tensor.setdefault(step.tensor, at)
                    if step.tensor in self._owner:
                        self._last.setdefault(self._owner[step.tensor][0], at)
        frees: dict[int, list[fx.Node]] = defaultdict(list)
        for node, at in self._last.items():
            if node not in self._outputs and node.op == "call_function":
                frees[at].append(node)
        dies: dict[int, list[str]] = defaultdict(list)
        for name, at in self._last_of_tensor.items():
            if name in self._owner and self._owner[name][0] not in self._outputs:
                dies[at].append(name)
        return tuple(
            Entry(step, runs[at], tuple(frees[at]), tuple(dies[at]))
            for at, step in enumerate(steps)
        )

    def _use(self, op: int, at: int) -> None:
        node = self._nodes[op]
        self._last.setdefault(node, at)
        for read in node.all_input_nodes:
            self._last.setdefault(read, at)
        spec = self._plan.workload.ops[op]
        for name in (*spec.reads, *spec.writes):
            self._last_of_tensor.setdefault(name, at)
            if name in self._owner:
                # A view may be read when the op's own result is not: its memory moves by the latter.
                self._last.setdefault(self._owner[name][0], at)

    def _views(self, source: int, at: int) -> tuple[fx.Node, ...]:
        """Return the views of an op's result that exist before ``at`` and are read after it."""
        found: set[int] = set()
        pending = [self._nodes[source]]
        while pending:
            for user in pending.pop().users:
                number = self._number.get(user)
                if number is None or number in found or self._at.get(number, at) >= at:
                    continue
                if not self._plan.workload.ops[number].writes:
                    found.add(number)
                    pending.append(user)
        wanted: set[fx.Node] = set()
        for number in sorted(found, reverse=True):
            node = self._nodes[number]
            read_by_views = any(user in wanted for user in node.users)
            if self._last.get(node, -1) > at or read_by_views:
                wanted.add(node)
        return tuple(
            self._nodes[number] for number in sorted(found) if self._nodes[number] in wanted
        )


def at_rest(
    plan: Plan, persistent: Mapping[str, int]
) -> tuple[frozenset[str], tuple[Offload | Reload, ...]]:
    """Return the tensors that are away before the first step, and moves that the last iteration has started.

    A wait that stands before the move it is for belongs to the iteration before.
    """
    first: dict[str, Step] = {}
    last: dict[str, Offload | Reload] = {}
    used: set[str] = set()
    for step in plan.steps:
        if isinstance(step, Compute):
            op = plan.workload.ops[step.op]
            used.update((*op.reads, *op.writes))
        elif isinstance(step, (Offload, Reload, Release, Wait)) and step.tensor in persistent:
            if step.tensor not in used:
                first.setdefault(step.tensor, step)
            if isinstance(step, (Offload, Reload)):
                last[step.tensor] = step
    away: set[str] = set()
    up_front: list[Offload | Reload] = []
    for name, step in first.items():
        if isinstance(step, Reload):
            away.add(name)
        elif isinstance(step, Wait) and name in last:
            up_front.append(last[name])
            if isinstance(last[name], Reload):
                away.add(name)
    site = plan.machine.compute_tier
    idle = {
        name
        for name, tensor in plan.tensors.items()
        if name in persistent and name not in used and tensor.home != site
    }
    outside = set(persistent) - set(plan.tensors)
    return frozenset(away | idle | outside), tuple(up_front)


def new_bytes(plan: Plan, persistent: Mapping[str, int]) -> list[int]:
    """Return the bytes that each op allocates, workspace included."""
    sizes = {tensor.name: tensor.size_bytes for tensor in plan.workload.tensors}
    return [
        sum(sizes[name] for name in op.writes if name not in persistent) + op.workspace_bytes
        for op in plan.workload.ops
    ]
