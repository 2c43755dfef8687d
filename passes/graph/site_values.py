"""The values of a graph by the processor they are on, where ops run on several.

A result is where its op runs, and where it was sent. A view is taken again where it is read, of the copy that is
there. What users pass in, and weights, are read as they are: the runtime has each where it is needed.
"""

from __future__ import annotations

from torch import fx

from gascompile.core import moves
from gascompile.core.errors import PlanMismatchError
from gascompile.core.op_sites import OpSites
from gascompile.core.plan import Plan
from gascompile.core.program import SITE, add_node
from gascompile.core.steps import Offload, Reload
from gascompile.passes.graph.heap_values import taken_again
from gascompile.passes.graph.leaving import bound_tensors, leaves


class SiteValues:
    """Which node has a value on which processor, as the steps are walked."""

    def __init__(
        self,
        graph: fx.Graph,
        mover: fx.Node,
        ops: list[fx.Node],
        plan: Plan,
        sites: OpSites,
    ) -> None:
        """Mark the ops that run elsewhere.

        Raises:
            PlanMismatchError: one of them may not.
        """
        self._graph, self._mover, self._plan, self.sites = graph, mover, plan, sites
        self._number = {node: i for i, node in enumerate(ops)}
        self._at: dict[tuple[fx.Node, str], fx.Node] = {}
        self._sent: list[fx.Node] = []
        bound = bound_tensors(plan.workload.tensors, plan.workload.ops)
        for node, spec, site in zip(ops, plan.workload.ops, sites.of, strict=True):
            if site == sites.own:
                continue
            if not leaves(spec, node, bound):
                raise PlanMismatchError(
                    f"the plan runs op '{spec.name}' on '{site}', which may run on '{sites.own}' alone; plan again"
                )
            node.meta[SITE] = site

    def send(self, step: Offload | Reload, value: fx.Node) -> fx.Node:
        """Insert the copy of a result to the other end of the step's link."""
        link = self._plan.machine.link(step.link)
        if value not in self._number:
            raise PlanMismatchError(
                f"the plan sends '{step.tensor}' to '{link.target_tier}', which no op makes; plan again"
            )
        if any(other.args[1] == step.tensor for other in self._sent):
            raise PlanMismatchError(f"the plan sends '{step.tensor}' twice; plan again")
        source = self.read(value, link.source_tier)
        made = add_node(self._graph, moves.send, (self._mover, step.tensor, step.link, source))
        self._sent.append(made)
        self._at[value, link.target_tier] = made
        self._mark(made, link.target_tier)
        return made

    def read(self, node: fx.Node, site: str) -> fx.Node:
        """Return the node that has the value of ``node`` on ``site``; may insert a view there.

        Raises:
            PlanMismatchError: no step has brought it there.
        """
        op = self._number.get(node)
        if op is None or self.sites.of[op] == site:
            return node
        if (there := self._at.get((node, site))) is not None:
            return there
        if self._plan.workload.ops[op].writes:
            raise PlanMismatchError(
                f"the plan reads the result of op '{node.name}' on '{site}', where no step has sent it; plan again"
            )
        args, kwargs = fx.node.map_arg(
            (node.args, node.kwargs), lambda argument: self.read(argument, site)
        )
        self._at[node, site] = made = taken_again(self._graph, node, args, kwargs)
        self._mark(made, site)
        return made

    def point(self, user: fx.Node, site: str) -> None:
        """Let ``user``, which runs on ``site``, read what is there."""
        for argument in tuple(user.all_input_nodes):
            if (there := self.read(argument, site)) is not argument:
                user.replace_input_with(argument, there)

    def _mark(self, node: fx.Node, site: str) -> None:
        node.meta.pop(SITE, None)
        if site != self.sites.own:
            node.meta[SITE] = site
