"""Legs: in which part of a pipeline each op of a graph runs, and what ranks send each other for it.

A stage has a forward leg and, where there is a backward pass, a backward leg. The legs of one batch follow each other:
all forward ones, then the backward ones from the last stage to the first. A rank runs both legs of its stage. What an
op reads comes from its own leg or an earlier one, which is all that makes a pipeline right, however legs were chosen.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from gascompile.core.errors import UnsupportedOpError
from gascompile.core.program import draws
from gascompile.passes.graph.bound_aliases import may_share_memory

MOST_COPIED_BYTES = 1 << 20
"""Of buffers that several stages may have copies of, for what they compute from the batch alone, such as masks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A value that one rank sends another, of each micro-batch."""

    value: fx.Node
    source: int
    """Leg that computes it."""
    target: int
    """First leg of the other rank that reads it."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the value."""
        value: torch.Tensor = self.value.meta["val"]
        return value.numel() * value.element_size()


@dataclass(frozen=True, slots=True, kw_only=True)
class Legs:
    """Where the ops of a graph run."""

    num_stages: int
    has_backward: bool
    leg_of: Mapping[fx.Node, int]
    """Of the ops that one rank runs, in their order; every rank runs the others that it needs."""
    messages: tuple[Message, ...] = ()

    def rank_of(self, leg: int) -> int:
        """Return the stage of a leg, which is the number of its rank."""
        return min(leg, 2 * self.num_stages - 1 - leg)

    def of_rank(self, rank: int) -> tuple[int, ...]:
        """Return the legs of a rank."""
        return (rank, 2 * self.num_stages - 1 - rank) if self.has_backward else (rank,)


def staged(graph: fx.Graph, bound: Mapping[str, int], fixed: Collection[str]) -> list[fx.Node]:
    """Return the ops that one rank alone runs, in their order.

    Others are views of results, and what is computed from the batch and small buffers alone, such as masks and
    positions: a rank that needs such a value makes it rather than receive it.

    Args:
        graph: of a model.
        bound: bytes of what placeholders are bound to, by their names.
        fixed: placeholders of those that nothing changes.
    """
    small = {n for n in fixed if bound[n] <= MOST_COPIED_BYTES}
    copied: set[fx.Node] = set()
    staged_ops = []
    for node in graph.nodes:
        if node.op == "placeholder" and (node.name not in bound or node.name in small):
            copied.add(node)
        if node.op != "call_function":
            continue
        sources = set(node.all_input_nodes)
        if sources <= copied and not draws(node.target):
            copied.add(node)
        elif not is_view(node):
            staged_ops.append(node)
    return staged_ops


def is_view(node: fx.Node) -> bool:
    """Return whether a node has another way to look at the one tensor that it reads, and nothing else."""
    sources = node.all_input_nodes
    if node.op != "call_function" or node.target is operator.getitem or len(sources) != 1:
        return False
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return False
    one = isinstance(node.meta.get("val"), torch.Tensor)
    return one and isinstance(sources[0].meta.get("val"), torch.Tensor) and (
        may_share_memory(node, sources[0])
    )  # fmt: skip


def assign_legs(
    ops: Sequence[fx.Node],
    stages: Sequence[int],
    num_stages: int,
    holders: Mapping[str, Collection[int]],
) -> Legs:
    """Return the legs of ops.

    Args:
        ops: that one rank alone runs, in their order.
        stages: of the first of them, those of the forward pass; from 0 on, never less than the one before.
        num_stages: of the pipeline.
        holders: stages that have what a placeholder is bound to.

    Raises:
        UnsupportedOpError: an op of the backward pass would need what no leg after it has.
    """
    forward = ops[: len(stages)]
    leg_of = dict(zip(forward, stages, strict=True))
    own = set(ops)
    of_trace = {
        node.meta["seq_nr"]: leg
        for node, leg in leg_of.items()
        if node.meta.get("seq_nr") is not None
    }
    for node in forward:
        if node.target is operator.getitem and node.all_input_nodes[0] in leg_of:
            leg_of[node] = leg_of[node.all_input_nodes[0]]
    last = 2 * num_stages - 1
    for node in ops[len(stages) :]:
        read = roots(node, own)
        earliest = max([num_stages, *(leg_of[source] for source in read)])
        # As late as all that the forward pass has kept for it is, or the op is whose gradient it computes.
        kept = [
            last - _reach(source, leg_of, num_stages)
            for source in read
            if leg_of[source] < num_stages
        ]
        partner = of_trace.get(node.meta.get("seq_nr"))
        wanted = [last - partner] if partner is not None else kept
        needed = [holders[n.name] for n in placeholders(node, own) if n.name in holders]
        able = range(max([earliest, *wanted]), last + 1)
        leg = next((leg for leg in able if all(last - leg in of for of in needed)), None)
        if leg is None:
            raise UnsupportedOpError(
                f"the gradient op '{node.name}' of {node.target} needs parameters and results that no stage has "
                "together; train in one process, or let ranks have rows of their own"
            )
        leg_of[node] = leg
        if node.target is operator.getitem:
            leg_of[node] = leg_of[node.all_input_nodes[0]]
    has_backward = len(ops) > len(stages)
    legs = Legs(num_stages=num_stages, has_backward=has_backward, leg_of=leg_of)
    return Legs(
        num_stages=num_stages,
        has_backward=has_backward,
        leg_of=leg_of,
        messages=tuple(_messages(legs)),
    )


def _reach(source: fx.Node, leg_of: Mapping[fx.Node, int], num_stages: int) -> int:
    """Return the last stage whose forward leg has a value."""
    readers = (leg_of.get(reader, num_stages) for reader in source.users)
    return max([leg_of[source], *(leg for leg in readers if leg < num_stages)])


def roots(node: fx.Node, own: Collection[fx.Node]) -> list[fx.Node]:
    """Return the ops of ``own`` that a node reads, directly or through what every rank makes for itself."""
    return [source for source in _behind(node, own) if source in own]


def placeholders(node: fx.Node, own: Collection[fx.Node]) -> list[fx.Node]:
    """Return the placeholders that a node reads, directly or through what every rank makes for itself."""
    return [source for source in _behind(node, own) if source.op == "placeholder"]


def _behind(node: fx.Node, own: Collection[fx.Node]) -> Iterator[fx.Node]:
    left, seen = list(reversed(node.all_input_nodes)), set[fx.Node]()
    while left:
        source = left.pop()
        if source in seen:
            continue
        seen.add(source)
        yield source
        if source not in own:
            left += reversed(source.all_input_nodes)


def _messages(legs: Legs) -> Iterator[Message]:
    own, given = legs.leg_of.keys(), set[tuple[fx.Node, int]]()
    by_leg: dict[int, list[fx.Node]] = {}
    for node, leg in legs.leg_of.items():
        by_leg.setdefault(leg, []).append(node)
    for leg in sorted(by_leg):
        for node in by_leg[leg]:
            for source in roots(node, own):
                rank = legs.rank_of(leg)
                if legs.rank_of(legs.leg_of[source]) == rank or (source, rank) in given:
                    continue
                given.add((source, rank))
                _require_tensor(source)
                yield Message(value=source, source=legs.leg_of[source], target=leg)


def _require_tensor(node: fx.Node) -> None:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        raise UnsupportedOpError(
            f"a later stage reads '{node.name}' of {node.target}, which is no tensor that can be sent; train in one "
            "process, or let ranks have rows of their own"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One leg of one micro-batch."""

    leg: int
    batch: int


@dataclass(slots=True)
class _Rank:
    knows: list[int] = field(default_factory=list)
    """How many actions of each rank are known to be over."""


def outstanding_bytes(legs: Legs, orders: Sequence[Sequence[Action]], rank: int) -> int:
    """Return the most bytes that ``rank`` can have sent while nothing shows that they have been received.

    Args:
        legs: with messages.
        orders: the actions of each rank, in their order.
        rank: in question.
    """
    size = len(orders)
    when = {(a.leg, a.batch): (r, i) for r, order in enumerate(orders) for i, a in enumerate(order)}
    clocks: dict[tuple[int, int], list[int]] = {}
    states = [_Rank([0] * size) for _ in range(size)]
    done = [0] * size
    sent: list[tuple[int, int, int]] = []
    most = 0
    while any(done[r] < len(orders[r]) for r in range(size)):
        before = sum(done)
        for r in range(size):
            while done[r] < len(orders[r]):
                action = orders[r][done[r]]
                needs = {m.source for m in legs.messages if m.target == action.leg}
                if not all((leg, action.batch) in clocks for leg in needs):
                    break
                known = states[r].knows
                for leg in needs:
                    known[:] = map(max, known, clocks[leg, action.batch])
                done[r] += 1
                known[r] = done[r]
                if r == rank:
                    sent = [item for item in sent if known[item[0]] <= item[1]]
                    for m in legs.messages:
                        if m.source == action.leg:
                            sent.append((*when[m.target, action.batch], m.size_bytes))
                    most = max(most, sum(item[2] for item in sent))
                clocks[action.leg, action.batch] = list(known)
        assert sum(done) > before, "legs follow each other"
    return most
