"""The steps of each processor of a plan: who does what, where each finds its values, and where they meet.

The processors share no slot that either writes. A copy between them has two halves, one for each; a wait for one, too,
unless one of them waits for it by itself. What lasts has two slots: the device's copy of it, and where it rests on the
host, which ops there change in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch import fx

from gascompile.core import moves
from gascompile.core.op_sites import plan_sites
from gascompile.core.plan import Plan
from gascompile.core.program import SITE, STEP
from gascompile.runtime.devices.graph_rules import MOVE, Trait
from gascompile.runtime.run.meter import Meter, make_meters, make_site_meters
from gascompile.runtime.run.schedule import RunStep, Value, gather_of, last_users, nothing
from gascompile.runtime.run.session import Session
from gascompile.runtime.transfer.mover import PlanMover


class SiteSteps:
    """Numbers the slots of values and gathers the steps of each site."""

    def __init__(self, graph: fx.Graph, plan: Plan, session: Session, mover: PlanMover) -> None:
        """Begin with the site that computes."""
        self._plan, self._session, self._mover = plan, session, mover
        self._slots: list[Value] = []
        self._slot_of: dict[fx.Node, int] = {}
        self._own = plan.machine.compute_tier
        self._sites = plan_sites(plan)
        self._site = self._own
        """Of the step at hand."""
        self._lanes: dict[str, list[RunStep]] = {self._own: []}
        self._steps = self._lanes[self._own]
        self._sent: dict[str, tuple[fx.Node, str, str]] = {}
        """Tensor -> the node of its copy, from where to where."""
        self._arrived: set[str] = set()
        """Of those what the other end has waited for alone."""
        changed = self._sites.changed if self._sites is not None else {}
        self._last_change = {name: op for op in sorted(changed) for name in changed[op]}
        """Of what lasts and ops elsewhere change, the last such op."""
        self._changed: set[str] = set()
        """Of these, what has been changed by the step at hand."""
        self._host_slots: dict[fx.Node, int] = {}
        """Slots of the inputs, and of what lasts, that ops on the host read."""
        self._frees = last_users(graph)
        self._meters = make_meters(plan) if self._sites is None else {}
        self._site_meters = make_site_meters(plan, self._sites) if self._sites is not None else {}
        self._store: Mapping[str, int] = session.store.sizes if session.store is not None else {}
        self._next_op = 0

    def _enter(self, site: str) -> None:
        """Let the steps that follow be those of a site."""
        self._site = site
        self._steps = self._lanes.setdefault(site, [])

    def _slot(self, node: fx.Node | None, value: Value = None) -> int:
        self._slots.append(value)
        if node is not None:
            self._slot_of[node] = len(self._slots) - 1
        return len(self._slots) - 1

    def _index(self, value: Value) -> int:
        """Return the slot of a node or of a constant."""
        return self._slot_here(value) if isinstance(value, fx.Node) else self._slot(None, value)

    def _slot_here(self, node: fx.Node) -> int:
        """Return the slot that has the value of ``node`` on the site of the step at hand."""
        has_two = node.op == "placeholder" or self._lasting(node) is not None
        if not has_two or self._site == self._own:
            return self._slot_of[node]
        if node not in self._host_slots:
            self._host_slots[node] = self._slot(None)
        return self._host_slots[node]

    def _lasting(self, node: fx.Node) -> str | None:
        """Return the name of what the session's store holds, if a node asks for that."""
        name = node.args[1] if node.target is moves.resident else None
        return name if isinstance(name, str) and name in self._store else None

    def _on_host(self) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[str, int], ...]]:
        """Return the slots on the host: of inputs with their numbers, of what lasts with its names."""
        placeholders = [n for n in self._slot_of if n.op == "placeholder"]
        numbers = {node: i for i, node in enumerate(placeholders)}
        slots = self._host_slots.items()
        given = tuple((numbers[node], slot) for node, slot in slots if node in numbers)
        kept = ((self._lasting(node), slot) for node, slot in slots if node not in numbers)
        return given, tuple((name, slot) for name, slot in kept if name is not None)

    def _send(self, node: fx.Node) -> None:
        """Make the two halves of a copy between sites: one gives the value, the other memory for it."""
        crossings, tensor = self._mover.meetings, str(node.args[1])
        link = self._plan.machine.link(str(node.args[2]))
        self._sent[tensor] = (node, link.source_tier, link.target_tier)
        self._slot(node)
        self._enter(link.source_tier)
        frees = tuple(self._slot_of[n] for n in self._frees.get(node, ()) if self._clearable(n))
        self._half(node, partial(crossings.give, tensor), self._slot(None), frees, node.args[3:])
        self._enter(link.target_tier)
        self._half(node, partial(crossings.take, tensor), (slot := self._slot(None)), (slot,))

    def _arrive(self, node: fx.Node) -> None:
        """Make the two halves of the wait for a copy, one gets it, the other gives the value up; or the first alone."""
        crossings, tensor = self._mover.meetings, str(node.args[1])
        made, source, target = self._sent[tensor]
        self._slot(node)
        is_alone = node.meta.get(SITE) == target
        if not is_alone:
            self._enter(source)
            self._half(node, partial(crossings.sent, self._next_op, tensor), self._slot(None))
        if tensor not in self._arrived:
            self._enter(target)
            slot = self._slot_of[made]
            arrive = partial(crossings.arrive, self._next_op, tensor)
            self._half(node, arrive, slot, () if made.users else (slot,))
        if is_alone:
            self._arrived.add(tensor)

    def _half(
        self,
        node: fx.Node,
        function: Callable[..., Value],
        slot: int,
        frees: tuple[int, ...] = (),
        arguments: tuple[Value, ...] = (),
    ) -> None:
        """Add what the site at hand does for a copy; it says which one it is."""
        planned, gather = node.meta.get(STEP, -1), gather_of(arguments, self._index)
        step = RunStep(
            partial(function, self._site), gather, slot, self._meter(planned), frees, self._next_op
        )
        self._steps.append(step._replace(trait=Trait((), MOVE), planned=planned))

    def _change(self, names: tuple[str, ...], op: int, planned: int) -> None:
        """Let an op that has just been added be one that changes what lasts where it rests."""
        crossings = self._mover.meetings
        call = self._steps.pop()
        self._first(partial(crossings.changes, names), op, planned)
        self._steps.append(call)
        done = tuple(name for name in names if self._last_change[name] == op)
        self._first(partial(crossings.has_changed, done), op, planned)
        self._changed.update(names)

    def _follow(self, tensor: str, planned: int) -> None:
        """Before something comes back that an op elsewhere changes, wait for that op."""
        if tensor in self._changed:
            call = partial(self._mover.meetings.follow, self._next_op, tensor)
            self._first(call, self._next_op, planned)

    def _first(self, call: Callable[[], Value], op: int, planned: int) -> None:
        """Add what is done beside an op, as a part of its step of the plan."""
        slot, trait = self._slot(None), Trait((), MOVE)
        self._steps.append(RunStep(call, nothing, slot, None, (), op, trait, planned))

    def _meter(self, planned: int) -> Meter | None:
        if self._sites is None:
            return self._meters.get(planned)
        return self._site_meters.get((planned, self._site))

    def _clearable(self, node: fx.Node) -> bool:
        if node.op == "placeholder" and any(SITE in user.meta for user in node.users):
            return False  # the run keeps what its user passed in, and two sites read it
        return node in self._slot_of and node.op != "get_attr" and node.target is not moves.resident
