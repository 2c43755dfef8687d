"""``plan_hosts``: a plan over many ranks and hosts, made without executing anything."""

from __future__ import annotations

import math
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

_PARAM_BYTES = 2  # of bfloat16, where no weight says another width


def plan_hosts(
    source: nn.Module | Workload | str | os.PathLike[str],
    hosts: Hosts | str | os.PathLike[str],
    *,
    strategy: str | None = None,
    train: bool = False,
    param_bytes: int | None = None,
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
        param_bytes: per parameter of a workload, which does not say it: 2 by default. Models say it themselves.
        batch: rows of made-up inputs.
        tokens: tokens per row of made-up inputs.
        cache_dir: where the machine profile is kept.

    Raises:
        InfeasiblePlanError: the ranks have no room for it.
        UnsupportedOpError: the source is no chain of layers that repeat, or a device has no rate.
        FormatError: a file is damaged or makes no sense; names the place.
    """
    resolved = named_hosts(hosts)
    machine = resolved.hosts[0].machine
    folder = Path(cache_dir or default_cache_dir())
    workload, width = _workload(source, machine, (batch, tokens), folder)
    if train:
        if strategy is not None:
            raise ValueError(
                "strategy= is of rings; a training step has one search, so leave it out"
            )
        from gascompile.passes.parallel.plan_shards import plan_shards
        from gascompile.passes.parallel.shard_options import Training

        width = width or param_bytes or _PARAM_BYTES
        if not 1 <= width <= 8:
            raise ValueError(f"param_bytes is {width}; give 1 to 8")
        return plan_shards(workload, resolved, training=Training.adam(width))
    from gascompile.passes.parallel.plan_ring import plan_ring

    return plan_ring(workload, resolved, strategy=strategy or "cut")


def chain_of(
    source: Workload | str | os.PathLike[str],
    machine: Machine,
    shape: tuple[int, int],
    cache_dir: str | os.PathLike[str] | None,
) -> tuple[Workload, int]:
    """Return what ``plan_hosts`` plans of a source, and the bytes of its parameters where it says so, else 0.

    Args:
        source: as ``plan_hosts`` takes it.
        machine: as a rank sees it.
        shape: rows of made-up inputs, and tokens per row.
        cache_dir: where the machine profile is kept.
    """
    return _workload(source, machine, shape, Path(cache_dir or default_cache_dir()))


def _workload(
    source: nn.Module | Workload | str | os.PathLike[str],
    machine: Machine,
    shape: tuple[int, int],
    cache_dir: Path,
) -> tuple[Workload, int]:
    """Return the workload, and the bytes of its parameters where the source says so, else 0."""
    if isinstance(source, Workload):
        check_workload(source, where=f"workload '{source.name}': $")
        return source, 0
    if is_workload_file(source):
        # Times are another machine's; ops are costed anew for each.
        return load_workload(source, None), 0
    from gascompile.api.model_planning import annotated_source

    config = CompileConfig(cache_dir=cache_dir)
    _, program, annotation = annotated_source(source, machine, config, shape=shape)
    weights = [spec for name, spec in program.bound.items() if name not in program.states]
    numbers = sum(math.prod(spec.shape) for spec in weights)
    return annotation.workload, round(sum(spec.size_bytes for spec in weights) / max(1, numbers))
