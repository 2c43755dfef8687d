"""Site choices: which weights are tried at another site, and what a choice takes at least.

Of a choice the ops of its weights run elsewhere. Some come from a walk that gives ops to the site that is done with
them first, changed while that shortens what is certain; others are even shares, or all that the arena does not hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from gascompile.passes.bounds.certify import physical_limit
from gascompile.passes.model.problem import Problem
from gascompile.passes.search.site_order import site_ends
from gascompile.passes.search.site_routes import closed, find_route, own_times
from gascompile.passes.search.strategies import MANY_WEIGHTS

_SHARES = (1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125)
"""Shares of the weights that can be sent with their ops, evenly spread: links carry the others meanwhile."""
_STREAMED = (0.0, 0.5, 1.0)
"""Of the weights that stay, how much comes over the link, where ops are given to who is done with them first."""
_TRIED_OPS = 300_000
"""Ops of the workload, once per trial of a weight. [Empirical] Some seven seconds on one core of an EPYC."""
_PASSES = 3
"""Times that each weight is tried at the other site in turn."""


def candidates(task: Problem, tier: str) -> Iterator[frozenset[int]]:
    """Yield sets of weights that stay on ``tier``, their ops being sent there."""
    able = able_weights(task, tier)
    for share in _STREAMED:
        first = closed(task, _first_done(task, frozenset(able), tier, share), tier)
        yield first
        if len(able) < MANY_WEIGHTS:
            yield improved(task, tier, first, able, certain_s)
    for order in (able, able[::-1]):
        yield closed(task, _beyond_arena(task, order), tier)
    for share in _SHARES:
        count = round(share * len(able))
        spread = {able[k * len(able) // count] for k in range(count)}
        yield closed(task, frozenset(spread), tier)


def able_weights(task: Problem, tier: str) -> list[int]:
    """Return the weights whose ops can all run on ``tier``, in the order of their uses."""
    everything = frozenset(range(len(task.weights)))
    return sorted(closed(task, everything, tier), key=lambda i: task.weights[i].uses)


def _beyond_arena(task: Problem, order: Sequence[int]) -> frozenset[int]:
    """Return the first weights of ``order``, as few as let the arena hold all others: then no weight moves."""
    able = set(order)
    held = sum(w.reserved_bytes for i, w in enumerate(task.weights) if i not in able)
    kept = 0
    for weight in reversed(order):
        held += task.weights[weight].reserved_bytes
        if held > task.arena_limit_bytes:
            break
        kept += 1
    return frozenset(order[: len(order) - kept])


def _units(task: Problem, able: Sequence[int]) -> list[frozenset[int]]:
    """Return the weights of ``able`` in sets that stay or leave together, as ops read several of them at once."""
    number = {task.weights[i].name: i for i in able}
    unit_of = {i: {i} for i in able}
    for op in task.workload.ops:
        together = {j for name in op.reads if name in number for j in unit_of[number[name]]}
        unit_of.update(dict.fromkeys(together, together))
    return list(dict.fromkeys(frozenset(unit_of[i]) for i in able))


def improved(
    task: Problem,
    tier: str,
    sent: frozenset[int],
    able: Sequence[int],
    seconds: Callable[[Problem, str, frozenset[int]], float],
    near: int = 0,
) -> frozenset[int]:
    """Return ``sent`` with weights added and removed, as long as that shortens ``seconds``.

    Those of one op are tried at a time, and with those of each of the ``near`` ones behind it.
    """
    best_s = seconds(task, tier, sent)
    left = _TRIED_OPS // max(1, len(task.workload.ops))
    units = _units(task, able)
    for _ in range(_PASSES):
        before = sent
        for i, unit in enumerate(units):
            for other in (frozenset[int](), *units[i + 1 : i + 1 + near]):
                left -= 1
                if left < 0:
                    return sent
                changed = closed(task, sent ^ unit ^ other, tier)
                if changed != sent and (changed_s := seconds(task, tier, changed)) < best_s:
                    sent, best_s = changed, changed_s
        if sent == before:
            break
    return sent


def certain_s(task: Problem, tier: str, sent: frozenset[int]) -> float:
    """Return what an iteration takes at least: its ops and copies between sites, and what its link has to bring."""
    route = find_route(task, tier, frozenset(task.weights[i].name for i in sent))
    return max(sum(own_times(task, route)), _moved_s(task, sent))


def least_done_s(task: Problem, tier: str, sent: frozenset[int]) -> float:
    """Return the same where ops may run in another order."""
    route = find_route(task, tier, frozenset(task.weights[i].name for i in sent))
    _, done_s = site_ends(task.workload, route.op_sites, task.machine)
    return max(done_s, _moved_s(task, sent))


def _moved_s(task: Problem, sent: frozenset[int]) -> float:
    """Return what the links need for the weights that are not sent."""
    kept_bytes = sum(w.size_bytes for i, w in enumerate(task.weights) if i not in sent and w.uses)
    return physical_limit(0.0, kept_bytes, task.arena_limit_bytes, task.machine, task.room_bytes)[0]


def _first_done(task: Problem, able: frozenset[int], tier: str, streamed: float) -> frozenset[int]:
    """Return the weights whose ops are given to ``tier``, in their order each to the site that is done with it first.

    Args:
        task: the problem.
        able: weights whose ops can run there.
        tier: the other site.
        streamed: share of the other weights' bytes that come over the link, in the order of their use.
    """
    own = task.machine.compute_tier
    sizes = {tensor.name: tensor.size_bytes for tensor in task.workload.tensors}
    number = {weight.name: i for i, weight in enumerate(task.weights)}
    link = {own: task.machine.link(f"{tier}->{own}"), tier: task.machine.link(f"{own}->{tier}")}
    now = {own: 0.0, tier: 0.0}
    ready: dict[str, dict[str, float]] = {}
    sent: set[int] = set()
    kept: set[int] = set()
    link_free_s = 0.0
    for op in task.workload.ops:
        weights = [number[name] for name in dict.fromkeys(op.reads) if name in number]
        coming = [i for i in weights if i not in kept and i not in sent]
        load_s = sum(link[own].transfer_time_s(task.weights[i].size_bytes) for i in coming)
        done_s: dict[str, float] = {}
        for site in (own, tier):
            arrived_s = max(
                (
                    min(
                        at[site] if site in at else s + link[site].transfer_time_s(sizes[name])
                        for s in at.values()
                    )
                    for name in (*op.reads, *op.writes)
                    if (at := ready.get(name)) is not None
                ),
                default=0.0,
            )
            if site == own and coming:
                arrived_s = max(arrived_s, link_free_s + streamed * load_s)
            done_s[site] = max(now[site], arrived_s) + op.time_s.get(site, 0.0)
        can = all(i in able for i in weights) and tier in op.time_s
        goes = can and not kept.intersection(weights) and done_s[tier] < done_s[own]
        site = tier if (weights and sent.intersection(weights)) or goes else own
        if site == own:
            link_free_s += streamed * load_s
        (sent if site == tier else kept).update(weights)
        now[site] = done_s[site]
        ready.update({name: {site: done_s[site]} for name in op.writes})
    return frozenset(sent)
