"""Order a graph: its ops come in the order of a plan, where ops of several processors take turns as they end.

Ops of the tier that computes keep their order, as they may change what others read; those elsewhere change nothing,
so that they may stand wherever what they read is there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from gascompile.core.errors import PlanMismatchError
from gascompile.core.program import op_name
from gascompile.passes.graph.leaving import is_update


def same_order(names: Sequence[str], sites: Mapping[str, str], own: str) -> bool:
    """Return whether ops in the order of a program may run in that of a plan.

    Args:
        names: names of ops in the order of the program.
        sites: where each op of the plan runs, by its name, in the plan's order.
        own: the tier that computes.
    """
    if len(names) != len(sites) or set(names) != sites.keys():
        return False
    stays = [name for name, site in sites.items() if site == own]
    return [name for name in names if sites[name] == own] == stays


def order_graph(graph: fx.Graph, sites: Mapping[str, str], own: str) -> None:
    """Bring the ops of ``graph`` into the order of a plan, in place, where they may run in it.

    Args:
        graph: with the ops of the plan, one node each.
        sites: as those of ``same_order``.
        own: the tier that computes.

    Raises:
        PlanMismatchError: an op would come before what it reads.
    """
    nodes = {op_name(node): node for node in graph.nodes if node.op == "call_function"}
    names = list(nodes)
    if names == list(sites) or not same_order(names, sites, own):
        return
    if any(is_update(node) for name, node in nodes.items() if sites[name] != own):
        return  # it changes what others read
    (output,) = (node for node in graph.nodes if node.op == "output")
    behind = set(nodes.values())
    for name in sites:
        node = nodes[name]
        if not behind.isdisjoint(node.all_input_nodes):
            raise PlanMismatchError(
                f"the plan runs op '{name}' before what it reads; plan this program again"
            )
        behind.discard(node)
        output.prepend(node)
