"""Stage graph: what one rank of a pipeline runs in a step, as one graph over all micro-batches.

Each leg of each micro-batch has a copy of its ops, in the order of a schedule; between them stand ops that send and
receive. So one plan places all that a rank has, for the whole of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from gascompile.core.errors import UnsupportedOpError
from gascompile.passes.parallel.legs import Action, Legs, Message

Ops = tuple[torch._ops.OpOverload, torch._ops.OpOverload]
"""What sends ``(value, rank, tag)``, and what receives ``(like, rank, tag, shape, stride, dtype)``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How a graph is divided among the ranks of a pipeline."""

    legs: Legs
    orders: Sequence[Sequence[Action]]
    """Actions of each rank."""
    num_batches: int
    """Micro-batches of a step."""
    rows: Mapping[str, int]
    """Placeholder of an input that is divided -> its rows in a micro-batch."""


@dataclass(slots=True)
class StageGraph:
    """The graph of a rank as it is made: placeholders first, then its legs, then what a caller adds."""

    cut: Cut
    rank: int
    ops: Ops
    graph: fx.Graph = field(default_factory=fx.Graph)
    whole: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """Placeholders of the rank by those of the model's graph."""
    made: dict[tuple[fx.Node, int], fx.Node] = field(default_factory=dict)
    """Values by node and micro-batch."""
    num_tags: int = 0
    actions: dict[str, Action] = field(default_factory=dict)
    """In which leg of which micro-batch an op runs or a value is received, by the node's name."""

    def add_placeholders(self, placeholders: Sequence[fx.Node]) -> None:
        """Add all placeholders of the model's graph that this rank has, inputs over the rows of all micro-batches."""
        count = self.cut.num_batches
        for node in placeholders:
            own = self.graph.placeholder(node.name)
            own.meta = {"val": node.meta.get("val")}
            if node.name in self.cut.rows and count > 1:
                value: torch.Tensor = node.meta["val"]
                shape = (count * value.shape[0], *value.shape[1:])
                own.meta = {"val": value.new_empty(shape)}
            self.whole[node] = own

    def run(self, after: Callable[[Action], object] = lambda _: None) -> None:
        """Add the legs of this rank with what they send and receive; ``after`` is called at the end of each."""
        legs = self.cut.legs
        by_leg: dict[int, list[fx.Node]] = {leg: [] for leg in legs.of_rank(self.rank)}
        for node, leg in legs.leg_of.items():
            if leg in by_leg:
                by_leg[leg].append(node)
        self.num_tags = self.cut.num_batches * len(legs.messages)
        for action in self.cut.orders[self.rank]:
            last = next(reversed(self.graph.nodes))
            for number, message in enumerate(legs.messages):
                if message.target == action.leg:
                    self._receive_message(message, number, action.batch)
            for node in by_leg[action.leg]:
                self._copy(node, action.batch)
            for number, message in enumerate(legs.messages):
                if message.source == action.leg:
                    value = self.made[message.value, action.batch]
                    peer = legs.rank_of(message.target)
                    self.send(value, peer, self._tag(number, action.batch))
            after(action)
            while last.next.op != "root":
                last = last.next
                self.actions[last.name] = action

    def _tag(self, number: int, batch: int) -> int:
        return number * self.cut.num_batches + batch

    def _receive_message(self, message: Message, number: int, batch: int) -> None:
        peer = self.cut.legs.rank_of(message.source)
        value = self.receive(message.value, peer, self._tag(number, batch))
        self.made[message.value, batch] = value

    def send(self, value: fx.Node, peer: int, tag: int) -> fx.Node:
        """Add an op that sends a value."""
        node = self.graph.call_function(self.ops[0], (value, peer, tag))
        node.meta["val"] = None
        return node

    def receive(self, like: fx.Node, peer: int, tag: int) -> fx.Node:
        """Add an op that receives a value that lies as that of ``like``, a node of any graph."""
        value: torch.Tensor = like.meta["val"]
        layout = (list(value.shape), list(value.stride()), value.dtype)
        args = (self.anchor(), peer, tag, *layout)
        node: fx.Node = self.graph.call_function(self.ops[1], args)
        node.meta["val"] = value.new_empty_strided(value.shape, value.stride())
        return node

    def anchor(self) -> fx.Node:
        """Return a tensor that is there all the time: an input.

        Raises:
            UnsupportedOpError: there is none.
        """
        given = (n for n in self.whole.values() if isinstance(n.meta.get("val"), torch.Tensor))
        tensor = next(given, None)
        if tensor is None:
            raise UnsupportedOpError("a stage of a pipeline takes no tensor; pass one to the model")
        return tensor

    def value(self, node: fx.Node, batch: int) -> fx.Node:
        """Return a value of a micro-batch, which is made here if it was neither run nor received."""
        if node.op == "placeholder":
            return self._rows(node, batch)
        if (node, batch) not in self.made:
            self._copy(node, batch)
        return self.made[node, batch]

    def _copy(self, node: fx.Node, batch: int) -> None:
        sources = {source: self.value(source, batch) for source in node.all_input_nodes}
        copy = self.graph.node_copy(node, sources.__getitem__)
        copy.meta = {key: node.meta[key] for key in ("val",) if key in node.meta}
        self.made[node, batch] = copy

    def _rows(self, node: fx.Node, batch: int) -> fx.Node:
        """Return what a micro-batch has of a placeholder."""
        own = self.whole[node]
        if node.name not in self.cut.rows or self.cut.num_batches == 1:
            return own
        if (node, batch) not in self.made:
            count = self.cut.rows[node.name]
            args = (own, 0, count * batch, count * (batch + 1))
            part = self.graph.call_function(torch.ops.aten.slice.Tensor, args)
            part.meta["val"] = torch.narrow(own.meta["val"], 0, count * batch, count)
            self.made[node, batch] = part
        return self.made[node, batch]

    def total(self, terms: Sequence[fx.Node]) -> fx.Node:
        """Add the sum of values of one layout."""
        total, *rest = terms
        for term in rest:
            value = total.meta["val"]
            total = self.graph.call_function(torch.ops.aten.add.Tensor, (total, term))
            total.meta["val"] = torch.empty_like(value)
        return total


def terms_of(node: fx.Node) -> list[fx.Node]:
    """Return what a sum of tensors that nobody else reads is the sum of."""
    if node.target is not torch.ops.aten.add.Tensor or node.kwargs or len(node.users) > 1:
        return [node]
    parts = node.args[:2]
    shape = node.meta["val"].shape
    if not all(isinstance(p, fx.Node) and p.meta["val"].shape == shape for p in parts):
        return [node]
    return [term for part in parts if isinstance(part, fx.Node) for term in terms_of(part)]
