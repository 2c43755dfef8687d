"""``plan_hosts``: a plan over many ranks and hosts, made without executing anything."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from gascompile.core.checks.hosts import named_hosts
from gascompile.core.checks.workload import check_workload
from gascompile.core.checks.workload_files import is_workload_file, load_workload
from gascompile.core.config import CompileConfig, default_cache_dir
from gascompile.core.hosts import Hosts
from gascompile.core.hosts_plan import HostsPlan
from gascompile.core.machine import Machine
from gascompile.core.workload import Workload

if TYPE_CHECKING:
    from torch import nn


def plan_hosts(
    source: nn.Module | Workload | str | os.PathLike[str],
    hosts: Hosts | str | os.PathLike[str],
    *,
    strategy: str | None = None,
    train: bool = False,
    batch: int = 1,
    tokens: int = 128,
    cache_dir: str | os.PathLike[str] | None = None,
) -> HostsPlan:
    """Return who has which layers or shards of a model, how long it takes, and what no such plan beats.

    Args:
        source: as ``plan`` takes it; with ``train`` the forward pass of one rank's rows.
        hosts: ``Hosts``, a preset's name, or a ``gascompile.hosts/1`` file.
        strategy: force one way to cut a ring.
        train: plan a training step of rows and shards in place of a ring for one request.
        batch: rows of made-up inputs.
        tokens: tokens per row of made-up inputs.
        cache_dir: where the machine profile is kept.

    Raises:
        InfeasiblePlanError: the ranks have no room for it.
        UnsupportedOpError: the source is no chain of layers that repeat, or a device has no rate.
        FormatError: a file is damaged or makes no sense; names the place.
    """
    found = named_hosts(hosts)
    machine = found.hosts[0].machine
    workload = _workload(source, machine, (batch, tokens), Path(cache_dir or default_cache_dir()))
    if train:
        if strategy is not None:
            raise ValueError(
                "strategy= is of rings; a training step has one search, so leave it out"
            )
        from gascompile.passes.parallel.plan_shards import plan_shards

        return plan_shards(workload, found)
    from gascompile.passes.parallel.plan_ring import plan_ring

    return plan_ring(workload, found, strategy=strategy or "cut")


def _workload(
    source: nn.Module | Workload | str | os.PathLike[str],
    machine: Machine,
    shape: tuple[int, int],
    cache_dir: Path,
) -> Workload:
    if isinstance(source, Workload):
        check_workload(source, where=f"workload '{source.name}': $")
        return source
    if is_workload_file(source):
        # Times are another machine's; ops are costed anew for each.
        return load_workload(source, None)
    from gascompile.api.model_planning import annotated_source

    config = CompileConfig(cache_dir=cache_dir)
    return annotated_source(source, machine, config, shape=shape)[1].workload
