"""Stage joint: forward and backward passes of one stage over all micro-batches of a step, as one joint graph.

What follows is the same as for a step of one process: updates are added, all of it is planned under one budget, and
runs. The gradient of a parameter is summed up where its parts are computed, and its owner adds the sums of other ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from gascompile.core.ranks import StageLayout
from gascompile.distributed import stage_ops
from gascompile.passes.parallel.legs import Action, Legs, placeholders
from gascompile.passes.parallel.stage_graph import Cut, StageGraph, terms_of
from gascompile.training.capture.joint import Copied, Joint
from gascompile.training.optimizers import rank_ops
from gascompile.training.planning import rank_nodes

_OPS = stage_ops.send, stage_ops.receive
_FEWEST_ALONE = 1 << 16
"""Elements of a gradient that pipelines add up by itself. [Empirical] An exchange takes a millisecond beside its bytes,
in which Gloo moves as many."""


def held_by(legs: Legs, bound: Mapping[str, str]) -> list[set[str]]:
    """Return the names of what each rank reads of the tensors that placeholders are bound to."""
    names_of: list[set[str]] = [set() for _ in range(legs.num_stages)]
    own = legs.leg_of.keys()
    for node, leg in legs.leg_of.items():
        names = (bound.get(source.name) for source in placeholders(node, own))
        names_of[legs.rank_of(leg)].update(name for name in names if name is not None)
    return names_of


def late_bytes(joint: Joint) -> int:
    """Return the bytes of what a stage sends after its legs: sums of gradients, the loss, and parameters."""
    nodes = joint.graph_module.graph.nodes
    values: list[Any] = [
        n.args[0] for n in nodes if n.target is _OPS[0] and n.name not in joint.actions
    ]
    names = {copied.name for copied in joint.copies if copied.sends}
    values += [n for n in nodes if n.op == "placeholder" and joint.bound.get(n.name) in names]
    return sum(value.meta["val"].numel() * value.meta["val"].element_size() for value in values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Who has and updates what."""

    held: Sequence[frozenset[str]]
    """Names of each rank's tensors."""
    owners: Mapping[str, int]
    """Parameter -> the first rank that has it, which updates it."""

    def layout(self, rank: int, replica: int) -> StageLayout:
        """Return what concerns one rank."""
        held = self.held[rank]
        elsewhere = frozenset().union(*self.held) - held
        return StageLayout(
            rank=rank,
            size=len(self.held),
            owners=self.owners,
            held=held,
            elsewhere=elsewhere,
            replica=replica,
        )


def placed(legs: Legs, joint: Joint, every: Sequence[str]) -> Placed:
    """Return who has what; tensors that nobody reads are the first rank's.

    Args:
        legs: of the joint graph.
        joint: forward and backward pass of a micro-batch.
        every: names of all tensors that may be trained.
    """
    held = held_by(legs, joint.bound)
    owners = {}
    for name in every:
        owners[name] = next((rank for rank, names in enumerate(held) if name in names), 0)
        held[owners[name]].add(name)
    return Placed(held=[frozenset(names) for names in held], owners=owners)


def stage_joint(joint: Joint, cut: Cut, who: Placed, rank: int, *, num_replicas: int = 1) -> Joint:
    """Return what a rank runs of a step.

    Args:
        joint: forward and backward pass of a micro-batch, on all ranks the same.
        cut: its legs.
        who: has and updates what.
        rank: in question.
        num_replicas: pipelines beside each other, each with as many rows.
    """
    return _Maker(joint, cut, who, rank, num_replicas).make()


class _Maker:
    def __init__(self, joint: Joint, cut: Cut, who: Placed, rank: int, num_replicas: int) -> None:
        self._joint, self._cut, self._who, self._rank = joint, cut, who, rank
        self._num_replicas = num_replicas
        self._to = StageGraph(cut=cut, rank=rank, ops=_OPS)
        self._last = cut.legs.num_stages - 1
        self._terms = {name: terms_of(node) for name, node in joint.gradients.items()}
        for name, terms in self._terms.items():
            if len({self._rank_of(term, name) for term in terms}) == 1:
                # As in one process: nothing is gained by another order of sums.
                self._terms[name] = [joint.gradients[name]]
        self._totals: dict[str, fx.Node] = {}
        self._num_tags = 0

    def _rank_of(self, term: fx.Node, name: str) -> int:
        """Return the rank that computes a part of a parameter's gradient."""
        return self._cut.legs.rank_of(self._leg_of(term, name))

    def _leg_of(self, term: fx.Node, name: str) -> int:
        legs, node = self._cut.legs, term
        while node not in legs.leg_of:
            if len(node.all_input_nodes) != 1:
                # A number that all ranks could make: its owner does.
                return 2 * legs.num_stages - 1 - self._who.owners[name]
            (node,) = node.all_input_nodes
        return legs.leg_of[node]

    def _next_tag(self) -> int:
        self._num_tags += 1
        return self._to.num_tags + self._num_tags - 1

    def make(self) -> Joint:
        to, joint = self._to, self._joint
        held = self._who.held[self._rank]
        every = [n for n in joint.graph_module.graph.nodes if n.op == "placeholder"]
        bound = {n.name: joint.bound[n.name] for n in every if joint.bound.get(n.name) in held}
        to.add_placeholders([n for n in every if n.name in bound or n.name not in joint.bound])
        _scale_start(joint, self._cut.num_batches * self._num_replicas)
        to.run(after=self._add_gradients)
        gradients = self._summed()
        loss = self._loss()
        copies = self._copies()
        to.graph.output((loss,))
        graph_module = fx.GraphModule(nn.Module(), to.graph)
        return replace(
            joint,
            graph_module=graph_module,
            bound=bound,
            loss=loss,
            outputs=(loss,),
            gradients=gradients,
            trained=frozenset(joint.gradients),
            copies=copies,
            actions=to.actions,
        )

    def _add_gradients(self, action: Action) -> None:
        """Add what a backward leg has computed of gradients to the sums of this rank."""
        for name, terms in self._terms.items():
            for term in terms:
                if self._leg_of(term, name) != action.leg:
                    continue
                value = self._to.value(term, action.batch)
                before = self._totals.get(name)
                self._totals[name] = value if before is None else self._to.total([before, value])

    def _summed(self) -> dict[str, fx.Node]:
        """Exchange the sums of gradients that several ranks have parts of; return those that this rank updates with."""
        sums: dict[str, fx.Node] = {}
        coming: list[tuple[str, int, int]] = []
        for name, terms in self._terms.items():
            owner = self._who.owners[name]
            for other in sorted({self._rank_of(term, name) for term in terms} - {owner}):
                tag = self._next_tag()
                if other == self._rank:
                    self._to.send(self._totals[name], owner, tag)
                elif owner == self._rank:
                    coming.append((name, other, tag))
            if owner == self._rank and name in self._totals:
                sums[name] = self._totals[name]
        for name, other, tag in coming:
            parts = self._terms[name]
            like = next(term for term in parts if self._rank_of(term, name) == other)
            received = self._to.receive(like, other, tag)
            sums[name] = self._to.total([sums[name], received]) if name in sums else received
        return self._of_all({name: sums[name] for name in self._terms if name in sums})

    def _of_all(self, gradients: dict[str, fx.Node]) -> dict[str, fx.Node]:
        """Add the gradients of all pipelines: large ones one by one, and the others together."""
        if self._num_replicas == 1:
            return gradients
        small = [n for n, node in gradients.items() if node.meta["val"].numel() < _FEWEST_ALONE]
        sums = {n: self._across(node) for n, node in gradients.items() if n not in small}
        if small:
            nodes = [gradients[name] for name in small]
            totals = rank_nodes.added(self._to.graph, nodes, rank_ops.across)
            sums.update(zip(small, totals, strict=True))
        return {name: sums[name] for name in gradients}

    def _across(self, node: fx.Node) -> fx.Node:
        return rank_nodes.added(self._to.graph, [node], rank_ops.across)[0]

    def _loss(self) -> fx.Node:
        """Return the mean of the micro-batches' losses, which the last stage computes and gives to all."""
        to, loss, count = self._to, self._joint.loss, self._cut.num_batches
        tags = [self._next_tag() for _ in range(self._last)]
        if self._rank != self._last:
            return to.receive(loss, self._last, tags[self._rank])
        whole = to.total([to.value(loss, batch) for batch in range(count)])
        # Of what is no mean, as a number of right answers, the sum.
        share = 1 / (count * self._num_replicas) if loss.meta["val"].is_floating_point() else 1
        if share < 1:
            whole = to.graph.call_function(torch.ops.aten.mul.Tensor, (whole, share))
            whole.meta["val"] = loss.meta["val"].new_empty(())
        if self._num_replicas > 1:
            whole = self._across(whole)
        for rank, tag in enumerate(tags):
            to.send(whole, rank, tag)
        # What looks at the loss and may end the step comes after all have it.
        copied = to.graph.call_function(torch.ops.aten.clone.default, (whole,))
        copied.meta["val"] = whole.meta["val"]
        return copied

    def _copies(self) -> tuple[Copied, ...]:
        """Return which new values this rank sends or receives, of parameters that several ranks have."""
        copies = []
        for name in self._joint.gradients:
            owner = self._who.owners[name]
            for other, held in enumerate(self._who.held):
                if other == owner or name not in held:
                    continue
                tag = self._next_tag()
                if self._rank in (owner, other):
                    sends = self._rank == owner
                    peer = other if sends else owner
                    copies.append(Copied(name=name, peer=peer, tag=tag, sends=sends))
        return tuple(copies)


def _scale_start(joint: Joint, count: int) -> None:
    """Let the backward pass begin with a micro-batch's share of the loss."""
    for node in list(joint.loss.users):
        if node.target is torch.ops.aten.ones_like.default and count > 1:
            node.target = torch.ops.aten.full_like.default
            node.args = (joint.loss, 1 / count)
