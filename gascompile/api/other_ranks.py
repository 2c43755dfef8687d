"""Other numbers of ranks: what a model takes over each of them, every one a plan made for it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gascompile.api.plan_hosts import chain_of, plan_hosts
from gascompile.core.errors import InfeasiblePlanError
from gascompile.core.hosts import equal_ranks
from gascompile.core.machine import Machine
from gascompile.core.serial import json_name

if TYPE_CHECKING:
    from gascompile.core.hosts_plan import HostsPlan
    from gascompile.core.workload import Workload

_BETWEEN = ("peers", "network")
"""Resources between ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksVariant:
    """What a number of ranks takes, on one machine."""

    ranks: int
    predicted_s: float | None = field(metadata=json_name("predicted_seconds"))
    """Of a step, or of a token; ``None`` where no plan has room."""
    lower_bound_s: float | None = field(metadata=json_name("lower_bound_seconds"))
    per_second: float | None
    """Ranks' rows of a step, or tokens of one request, in a second."""
    efficiency: float | None
    """That per rank, as a share of the fewest ranks' that have room."""
    peak_bytes: dict[str, int]
    """Of the fullest place of each kind."""
    exchange_s: float | None = field(metadata=json_name("exchange_seconds"))
    """That the busiest ways between ranks are at work, beside ops or not."""
    binding: str = ""
    required_bytes: int | None = None
    """In the place that is too small, where no plan has room."""


def other_ranks(
    source: Workload | str | os.PathLike[str],
    machine: Machine,
    counts: Sequence[int],
    *,
    train: bool = False,
    batch: int = 1,
    tokens: int = 128,
    cache_dir: str | os.PathLike[str] | None = None,
) -> tuple[RanksVariant, ...]:
    """Return what a model takes over each number of equal ranks on ``machine``, which is captured once.

    Args:
        source: as ``plan_hosts`` takes it.
        machine: as one of the ranks sees it.
        counts: numbers of ranks, each once, in any order.
        train: a training step of as many rows on each rank, in place of a ring for one request.
        batch: rows of made-up inputs.
        tokens: tokens per row of made-up inputs.
        cache_dir: where the machine profile is kept.

    Raises:
        UnsupportedOpError: the source is no chain of layers, or a device has no rate.
        ValueError: a number of ranks is below one, or there is none.
    """
    if not counts or min(counts) < 1:
        raise ValueError(f"numbers of ranks are {list(counts)}; give one at least, each from 1 on")
    workload, width = chain_of(source, machine, (batch, tokens), cache_dir)
    variants: list[RanksVariant] = []
    base: float | None = None
    for count in sorted(set(counts)):
        try:
            made = plan_hosts(
                workload, equal_ranks(machine, count), train=train, param_bytes=width or None
            )
        except InfeasiblePlanError as error:
            variants.append(_without_room(count, error.required_bytes))
            continue
        rate = (count if train else 1) / made.predicted_s
        base = rate / count if base is None else base
        variants.append(_of(made, rate, rate / count / base))
    return tuple(variants)


def _of(made: HostsPlan, rate: float, efficiency: float) -> RanksVariant:
    return RanksVariant(
        ranks=made.hosts.num_ranks,
        predicted_s=made.predicted_s,
        lower_bound_s=made.lower_bound_s,
        per_second=rate,
        efficiency=efficiency,
        peak_bytes=dict(made.peak_bytes),
        exchange_s=sum(load.seconds for load in made.loads if load.resource in _BETWEEN),
        binding=made.binding,
    )


def _without_room(count: int, required_bytes: int) -> RanksVariant:
    return RanksVariant(
        ranks=count,
        predicted_s=None,
        lower_bound_s=None,
        per_second=None,
        efficiency=None,
        peak_bytes={},
        exchange_s=None,
        required_bytes=required_bytes,
    )
