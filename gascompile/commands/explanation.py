"""``explain``: why a tensor is where it is, or what an op costs, with the alternatives' price."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType

from gascompile.commands import options as opt
from gascompile.commands.output import emit, fields, grid, note, reserved_stdout
from gascompile.commands.plans import HostsFile, Ranks, Train, plan_to_look_at
from gascompile.commands.simulation import why_late
from gascompile.core import serial
from gascompile.core.plan import Plan
from gascompile.core.sizes import format_size, format_time
from gascompile.core.tiles import parse_tile

if TYPE_CHECKING:  # numpy comes with it, which help and wrong usage need not wait for
    from gascompile.cost_models.simulate.trace import Transfer
    from gascompile.passes.explain.alternatives import Alternative
    from gascompile.passes.explain.explain import OpExplanation, TensorExplanation
    from gascompile.passes.explain.other_moves import OtherMove
    from gascompile.passes.explain.other_sites import OtherSite

Subject = Annotated[
    str, typer.Argument(metavar="TENSOR|OP", help="A name in the plan.", show_default=False)
]
PlanOrSource = Annotated[
    str,
    typer.Argument(
        metavar="PLAN|SOURCE",
        help="A plan file, a bundle, or what 'plan' takes.",
        show_default=False,
    ),
]


def explain_verb(
    source: PlanOrSource,
    name: Subject,
    budget: opt.BudgetSize = None,
    cpu: opt.CpuSize = None,
    nvme: opt.NvmeSize = None,
    place: opt.PlaceSizes = None,
    machine: opt.MachineName = None,
    batch: opt.Batch = 1,
    tokens: opt.Tokens = 128,
    strategy: opt.Strategy = None,
    hosts: HostsFile = None,
    ranks: Ranks = None,
    train: Train = False,
    time_limit: opt.TimeLimit = 20.0,
    cache_dir: opt.CacheDir = None,
    json: opt.JsonFlag = False,
) -> None:
    """Say why a tensor is where it is, or what an op costs, and what the alternatives would take.

    Example: [bold]gascompile explain plan.json model.layers.7.mlp.up_proj.weight[/bold]
    Over ranks: [bold]gascompile explain gpt.workload.json parameters --hosts dgx-h100 --train[/bold]
    """
    asked = opt.Asked(
        source=source,
        limits=opt.Limits(budget, cpu, nvme, place or ()),
        machine=machine,
        shape=(batch, tokens),
        strategy=strategy,
        hosts=hosts,
        ranks=ranks,
        train=train,
        time_limit_s=time_limit,
        cache_dir=opt.cache_dir_of(cache_dir),
    )
    if asked.is_over_ranks:
        from gascompile.commands.over_ranks import explain_over

        if any(x is not None for x in (budget, cpu, nvme, place, strategy)):
            raise typer.BadParameter(
                "what is sharded over ranks takes --hosts or --ranks, --machine, --train, --batch and --tokens alone"
            )
        explain_over(asked, name, json=json)
        return
    from gascompile.commands.summary import energy_rows
    from gascompile.cost_models.formulas.energy import plan_energy
    from gascompile.passes.explain.explain import TensorExplanation, explain

    with reserved_stdout(json):
        options = "--budget, --cpu, --nvme, --place, --machine and --strategy"
        made, _ = plan_to_look_at(asked, options)
        with opt.usage_errors():
            explained = explain(made, name)
    kind = "tensor" if isinstance(explained, TensorExplanation) else "op"
    parts = (
        _tensor_parts(explained, made)
        if isinstance(explained, TensorExplanation)
        else _op_parts(explained)
    )
    energy = plan_energy(made)
    data: dict[str, serial.JsonValue] = {
        "model": made.workload.name,
        kind: serial.to_json(explained),
    }
    if energy is not None:
        data["energy"] = serial.to_json(energy)
        parts.append(fields("The whole plan", energy_rows(energy)))
    emit(json, data, *parts)


def _tensor_parts(tensor: TensorExplanation, plan: Plan) -> list[RenderableType]:
    rows = [
        ("kind", tensor.kind.value),
        ("size", format_size(tensor.size_bytes)),
        *_form_rows(tensor.name, plan),
        ("home", tensor.home),
        ("why", tensor.reason),
        ("read by", _some(tensor.uses)),
    ]
    if tensor.writers:
        rows.append(("written by", _some(tensor.writers)))
    for transfer in tensor.transfers:
        rows += _transfer_rows(transfer, plan)
    if tensor.releases:
        rows.append(("released before", _some(tuple(_before(plan, op) for op in tensor.releases))))
    rows.append(
        ("stall", f"{format_time(tensor.stall_s)} of {format_time(tensor.plan_s)} per iteration")
    )
    rows += [("why late", f"{format_time(s.time_s)}: {why_late(s)}") for s in tensor.stalls]
    parts: list[RenderableType] = [fields(tensor.name, rows)]
    if tensor.alternative is not None:
        parts.append(_alternatives(tensor, tensor.alternative))
    if tensor.choices:
        lines = [
            (_choice(other), _signed_size(other.peak_change_bytes), *_times(other))
            for other in tensor.choices
        ]
        columns = [("instead", False), ("peak", True), *_TIME_COLUMNS]
        parts.append(grid("Alternatives, all else as planned", columns, lines))
    return parts


def _form_rows(name: str, plan: Plan) -> list[tuple[str, str]]:
    """Return how a weight moves that is computed in another form."""
    for tensor in plan.workload.tensors:
        tile = parse_tile(tensor.name)
        if tensor.forms is not None and name in (tensor.name, tile.base if tile else ""):
            return [("form", f"moves as {tensor.forms.wire}, computed in {tensor.forms.compute}")]
    return []


_TIME_COLUMNS = [("iteration", True), ("change", True), ("why not", False)]


def _transfer_rows(transfer: Transfer, plan: Plan) -> list[tuple[str, str]]:
    flight_s = transfer.arrived_s - transfer.begun_s
    verb = {
        "fetch": "fetched half the way",
        "prefetch": "prefetched",
        "reload": "reloaded",
        "offload": "offloaded",
    }[transfer.kind]
    started = f"before '{_before(plan, transfer.issue_op)}' over {transfer.link}"
    rows = [
        (verb, f"{started}, {_ago(transfer.issued_s)}"),
        ("in flight", f"{format_time(flight_s)} on the link"),
    ]
    if transfer.wait_op is not None and transfer.needed_s is not None:
        needed = f"by '{_before(plan, transfer.wait_op)}' at {format_time(transfer.needed_s)}"
        rows += [("needed", needed), ("slack", _slack(transfer.slack_s))]
    return rows


def _before(plan: Plan, op: int) -> str:
    return plan.ops[op].name if op < len(plan.ops) else "the end"


def _choice(other: OtherMove) -> str:
    if other.choice == "keep":
        return "kept"
    return f"moved to {other.way}" if other.choice == "move" else f"computed again by {other.way}"


def _times(other: OtherMove | OtherSite) -> tuple[str, str, str]:
    if other.seconds is None or other.change_s is None:
        return "-", "-", other.obstacle
    sign = "-" if other.change_s < 0 else "+"
    return format_time(other.seconds), f"{sign}{format_time(abs(other.change_s))}", ""


def _signed_size(size_bytes: int) -> str:
    return f"{'+' if size_bytes > 0 else '-' if size_bytes else ''}{format_size(abs(size_bytes))}"


def _alternatives(tensor: TensorExplanation, alternative: Alternative) -> RenderableType:
    lines = [(f"this one in {alternative.home}", *_price(alternative))]
    if tensor.peer is not None:
        peer = tensor.peer
        lines.append((f"{peer.name} streamed", *_price(peer.streamed)))
        if peer.exchange is not None:
            lines.append((f"this one resident, {peer.name} streamed", *_price(peer.exchange)))
    columns = [("instead", False), ("memory", True), ("iteration", True), ("change", True)]
    return grid("Alternatives within the same budget", columns, lines)


def _price(alternative: Alternative) -> tuple[str, str, str]:
    memory = _signed_size(alternative.arena_change_bytes)
    if alternative.seconds is None or alternative.change_s is None:
        return memory, "does not fit", ""
    sign = "-" if alternative.change_s < 0 else "+"
    return (
        memory,
        format_time(alternative.seconds),
        f"{sign}{format_time(abs(alternative.change_s))}",
    )


def _ago(time_s: float) -> str:
    if time_s < 0:
        return f"{format_time(-time_s)} before the iteration begins"
    return f"at {format_time(time_s)}"


def _slack(slack_s: float) -> str:
    if slack_s < 0:
        return f"none: it arrives {format_time(-slack_s)} late"
    return f"{format_time(slack_s)}: it may arrive so much later without a stall"


def _some(names: tuple[str, ...]) -> str:
    shown = ", ".join(names[:4]) or "no op"
    return f"{shown} and {len(names) - 4} more" if len(names) > 4 else shown


def _op_parts(op: OpExplanation) -> list[RenderableType]:
    rows = [
        ("op", f"number {op.index}, on {op.site}"),
        ("time", format_time(op.time_s)),
        (
            "work",
            f"{op.flops / 1e9:.4g} GFLOP, {format_size(op.moved_bytes)} of memory traffic",
        ),
        ("intensity", f"{op.arithmetic_intensity:.3g} FLOP per byte"),
        ("bound by", op.bound),
        ("workspace", format_size(op.workspace_bytes)),
        ("stall", format_time(op.stall_s)),
        *(("waits for", f"{s.tensor}, {format_time(s.time_s)}: {why_late(s)}") for s in op.stalls),
    ]
    parts: list[RenderableType] = [fields(op.name, rows)]
    columns = [("", False), ("tensor", False), ("size", True), ("home", False)]
    lines = [("reads", t.name, format_size(t.size_bytes), t.home) for t in op.reads]
    lines += [("writes", t.name, format_size(t.size_bytes), t.home) for t in op.writes]
    parts.append(grid("Operands", columns, lines) if lines else note("It touches no tensor."))
    if op.sites:
        columns = [("site", False), ("op", True), ("copied", True), *_TIME_COLUMNS]
        sites = [
            (other.site, format_time(other.op_s), format_size(other.copied_bytes), *_times(other))
            for other in op.sites
        ]
        parts.append(grid("Other sites, all else as planned", columns, sites))
    return parts
