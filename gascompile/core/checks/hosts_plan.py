"""Refuses a plan over hosts that cannot be one, with the JSON path of the first thing that is wrong."""

from __future__ import annotations

import math
from collections.abc import Iterator

from gascompile.core.checks.hosts import check_hosts
from gascompile.core.errors import FormatError
from gascompile.core.hosts_plan import HostsPlan

_KINDS = ("ring", "shards")


def check_hosts_plan(plan: HostsPlan, *, where: str = "$") -> None:
    """Return if ``plan`` places every layer once, on ranks that there are, with times that can be.

    Raises:
        FormatError: names the first field that makes no sense.
    """
    check_hosts(plan.hosts, where=f"{where}.hosts")
    for path, problem in _problems(plan):
        raise FormatError(f"{where}{path}: {problem}; plan again")


def _problems(plan: HostsPlan) -> Iterator[tuple[str, str]]:
    if plan.kind not in _KINDS:
        yield ".kind", f"there is no kind '{plan.kind}'; there are {' and '.join(_KINDS)}"
    if not (math.isfinite(plan.predicted_s) and plan.predicted_s > 0):
        yield ".predicted_seconds", f"{plan.predicted_s} is no time"
    if not 0 <= plan.lower_bound_s <= plan.predicted_s * (1 + 1e-9):
        yield ".lower_bound_seconds", f"{plan.lower_bound_s} bounds no {plan.predicted_s} s"
    if plan.kind == "shards":
        if (held := sum(group.layers for group in plan.groups)) != plan.num_layers:
            yield ".groups", f"they have {held} layers of {plan.num_layers}"
        if any(group.layers < 1 for group in plan.groups):
            yield ".groups", "one has no layers"
        return
    ranks = {rank.name for rank in plan.hosts.ranks()}
    stages = [stage.rank for stage in plan.stages]
    if len(set(stages)) < len(stages) or not ranks.issuperset(stages) or plan.head not in ranks:
        yield ".stages", "a rank stands twice, or is none of the hosts'"
    at = 0
    for first, last in sorted((w.first, w.last) for s in plan.stages for w in s.windows):
        if first != at or last < first:
            yield ".stages", f"layers {first} to {last} stand where {at} is next"
        at = last + 1
    if at != plan.num_layers:
        yield ".stages", f"{at} of {plan.num_layers} layers are placed"
    for i, stage in enumerate(plan.stages):
        if stage.gpu_layers + stage.ram_layers != sum(w.last - w.first + 1 for w in stage.windows):
            yield f".stages[{i}]", "its windows do not add up to its layers"
