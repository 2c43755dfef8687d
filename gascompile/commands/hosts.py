"""``gascompile plan --hosts`` and ``--ranks``: a plan over many ranks, as JSON and as tables."""

from __future__ import annotations

from collections.abc import Sequence

import typer
from rich.console import RenderableType

from gascompile.commands import options as opt
from gascompile.commands.output import fields, grid, note
from gascompile.core import serial
from gascompile.core.hosts import Hosts
from gascompile.core.hosts_plan import HostsPlan, ShardGroup, Stage
from gascompile.core.sizes import format_size, format_time

_MOST_ROWS = 40
"""Of a table for people; --json has all."""


def plan_over(asked: opt.Asked) -> HostsPlan:
    """Plan a source over the hosts of a file or preset, or over equal ranks on one machine."""
    from gascompile.api.plan_hosts import plan_hosts

    resolved, (batch, tokens) = hosts_of(asked), asked.shape
    with opt.usage_errors():
        return plan_hosts(
            asked.source,
            resolved,
            strategy=asked.strategy,
            train=asked.train,
            batch=batch,
            tokens=tokens,
            cache_dir=asked.cache_dir,
        )


def hosts_of(asked: opt.Asked) -> Hosts:
    """Return the hosts that the command line names for a source; wrong usage where it names two."""
    from gascompile.core.checks.hosts import named_hosts
    from gascompile.core.hosts import equal_ranks

    if asked.hosts is not None and (asked.ranks is not None or asked.machine is not None):
        raise typer.BadParameter(
            "--hosts names machines and ranks itself; leave out --ranks and --machine"
        )
    if asked.hosts is not None:
        return named_hosts(asked.hosts)
    assert asked.ranks is not None, "one of them is given"
    return equal_ranks(opt.machine_of(asked.machine, asked.cache_dir, asked.source), asked.ranks)


def as_json(made: HostsPlan) -> serial.JsonValue:
    """Return the plan with its digest and gap, which its file leaves out."""
    data = serial.to_json(made)
    assert isinstance(data, dict), "a dataclass becomes an object"
    return {**data, "digest": made.digest, "gap": made.gap}


def hosts_parts(made: HostsPlan) -> list[RenderableType]:
    """Return a plan over hosts for people."""
    per = "step" if made.kind == "shards" else "token"
    rows = [
        ("hosts", f"{made.hosts.name}: {made.hosts.num_hosts} hosts, {made.hosts.num_ranks} ranks"),
        ("layers", str(made.num_layers)),
    ]
    if made.kind == "ring":
        rows += [("rounds", str(made.rounds)), ("head", made.head)]
    rows += [
        ("predicted", f"{format_time(made.predicted_s)} per {per}"),
        ("lower bound", f"{format_time(made.lower_bound_s)} (gap {made.gap:.2%})"),
        ("of", made.holds_over),
        ("what binds", made.binding),
        ("busy", ", ".join(f"{x.resource} {format_time(x.seconds)}" for x in made.loads)),
        ("planned peak", ", ".join(f"{k} {format_size(v)}" for k, v in made.peak_bytes.items())),
        ("strategy", made.strategy),
        ("digest", made.digest),
    ]
    tables: list[RenderableType] = [fields(f"Plan for {made.workload} over hosts", rows)]
    if made.stages:
        tables.append(_stages(made.stages))
    if made.groups:
        tables.append(_groups(made.groups))
    return [*tables, *(note(text) for text in made.notes)]


def _stages(stages: Sequence[Stage]) -> RenderableType:
    columns = [
        ("rank", False), ("layers", False), ("gpu", True), ("ram", True), ("in gpu", True), ("in ram", True),
        ("streamed", True), ("computes", True), ("drive", True),
    ]  # fmt: skip
    lines = [
        (
            stage.rank,
            ", ".join(f"{w.first}-{w.last}" for w in stage.windows) or "none",
            str(stage.gpu_layers),
            str(stage.ram_layers),
            format_size(stage.gpu_bytes),
            format_size(stage.cpu_bytes),
            format_size(stage.streamed_bytes),
            format_time(stage.compute_s),
            format_time(stage.drive_s),
        )
        for stage in stages[:_MOST_ROWS]
    ]
    return grid("Who has which layers", columns, lines)


def _groups(groups: Sequence[ShardGroup]) -> RenderableType:
    columns = [
        ("layers", True), ("ZeRO", True), ("parameters", False), ("states", False), ("kept gathered", False),
        ("activations", False),
    ]  # fmt: skip
    lines = [
        (
            str(group.layers),
            str(group.zero_stage),
            f"1/{group.params_over} in {group.params_home}",
            f"1/{group.states_over} in {group.states_home}",
            "yes" if group.keeps else "no",
            group.activations,
        )
        for group in groups
    ]
    return grid("What each rank has of its layers", columns, lines)
