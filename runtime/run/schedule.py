"""What a run goes through: calls on numbered slots, and how a call's arguments are fetched from them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import fx

from gascompile.core.program import last_readers
from gascompile.runtime.devices.graph_rules import ARRIVAL, Trait
from gascompile.runtime.run.meter import Meter

# Values of a graph are tensors, numbers and tuples of them; nothing here looks inside.
Value = Any
Gather = Callable[[list[Value]], tuple[Value, ...]]


class RunStep(NamedTuple):
    """One call. A tuple, as the loop unpacks it once per op."""

    function: Callable[..., Value]
    gather: Gather
    result: int
    """Slot of the result."""
    meter: Meter | None
    frees: tuple[int, ...]
    op: int
    """Index of the op, or of the next one for a move."""
    trait: Trait = Trait()
    """What a graph of the device has to know of it."""
    planned: int = -1
    """Number of the plan's step that it belongs to; -1 for a call that no plan knows of."""
    is_late: bool = False
    """Whether it may as well run after all others, with those of its kind."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RunSchedule:
    """All that a run needs. Whoever reports an error prints what calls were given, and values may be away by then."""

    steps: tuple[RunStep, ...]
    slots: tuple[Value, ...]
    """Slots before a run: constants and residents in place, the rest empty."""
    inputs: tuple[tuple[str, int], ...]
    """Name and slot of each user input."""
    outputs: tuple[int, ...]
    elsewhere: tuple[RunStep, ...] = ()
    """What runs beside ``steps``, on the processor of ``site``; the two share no slot that either writes."""
    site: str = ""
    host_inputs: tuple[tuple[int, int], ...] = ()
    """Number of a user input and the slot that has it on the host, for ops that run there."""
    host_lasting: tuple[tuple[str, int], ...] = ()
    """Name and slot of what lasts and rests on the host, where ops change it."""


def without_arrivals(schedule: RunSchedule) -> RunSchedule:
    """Return a schedule for runs that find all resident weights in place."""
    steps = tuple(step for step in schedule.steps if step.trait.host is not ARRIVAL)
    return replace(schedule, steps=steps)


def nothing(_values: list[Value]) -> tuple[Value, ...]:
    """Fetch no arguments."""
    return ()


def only(slot: int) -> Gather:
    """Return what fetches one slot."""
    return lambda values: (values[slot],)


def gather_of(arguments: tuple[Value, ...], index: Callable[[Value], int]) -> Gather:
    """Return what fetches arguments; ``index`` tells the slot of a node or of a constant."""
    if not arguments:
        return nothing
    if any(has_node(a) and not isinstance(a, fx.Node) for a in arguments):
        fetchers = tuple(_fetch(a, index) for a in arguments)
        return lambda values: tuple(fetch(values) for fetch in fetchers)
    indices = [index(a) for a in arguments]
    return only(indices[0]) if len(indices) == 1 else operator.itemgetter(*indices)


def _fetch(argument: Value, index: Callable[[Value], int]) -> Callable[[list[Value]], Value]:
    """Return a function that rebuilds an argument with nodes inside lists, slices and dicts."""
    if isinstance(argument, fx.Node):
        return operator.itemgetter(index(argument))
    if not has_node(argument):
        return lambda _values: argument
    if isinstance(argument, slice):
        bounds = _fetch((argument.start, argument.stop, argument.step), index)
        return lambda values: slice(*bounds(values))
    if isinstance(argument, Mapping):
        items = {key: _fetch(value, index) for key, value in argument.items()}
        return lambda values: {key: fetch(values) for key, fetch in items.items()}
    parts = tuple(_fetch(part, index) for part in argument)
    if isinstance(argument, tuple):
        return lambda values: tuple(fetch(values) for fetch in parts)
    return lambda values: [fetch(values) for fetch in parts]


def has_node(argument: Value) -> bool:
    """Return whether there is a node in an argument."""
    nodes: list[fx.Node] = []
    fx.node.map_arg(argument, nodes.append)
    return bool(nodes)


def last_users(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Return, per node, the nodes whose last user it is; what the output reads is in nobody's list."""
    return {
        node: values for node, values in last_readers(graph.nodes).items() if node.op != "output"
    }
