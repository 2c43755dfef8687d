"""``plan``, and what other verbs need to get at a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType

from gascompile.commands import options as opt
from gascompile.commands.exporting import Overwrite, plan_with_onnx
from gascompile.commands.output import emit, note, reserved_stdout, warnings_block
from gascompile.commands.summary import plan_parts
from gascompile.core import serial
from gascompile.core.plan import Plan
from gascompile.core.serial import JsonValue

Source = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="Hugging Face directory (weights optional), .pt2 file, *.workload.json, package.module:callable, or "
        "what a plan or a bundle was made for.",
        show_default=False,
    ),
]
PlanArgument = Annotated[
    Path,
    typer.Argument(
        metavar="PLAN|BUNDLE", help="A plan file or a saved bundle.", show_default=False
    ),
]


DeviceMapFile = Annotated[
    Path | None,
    typer.Option(
        "--device-map",
        metavar="FILE",
        help="Plan what accelerate does with this device map (JSON).",
    ),
]


GpuLayers = Annotated[
    int | None,
    typer.Option(
        "--ngl",
        min=0,
        metavar="N",
        help="Plan what llama.cpp does with -ngl N: the last layers on the GPU, the others' ops on the host.",
    ),
]
OverrideTensor = Annotated[
    list[str] | None,
    typer.Option(
        "--ot",
        metavar="PATTERN=DEVICE",
        help="With --ngl: llama.cpp's -ot, such as 'ffn_.*_exps=CPU'.",
    ),
]


Compare = Annotated[
    str | None,
    typer.Option(
        "--compare",
        metavar="FILE|FLAGS",
        help="Say beside the plan what another tool's placement takes: a device map or a configuration of DeepSpeed "
        "(JSON), or llama.cpp's flags, as in --compare='-ngl 20 -ot exps=CPU'.",
    ),
]


HostsFile = Annotated[
    str | None,
    typer.Option(
        "--hosts",
        metavar="NAME|FILE",
        help="Plan over the ranks of these hosts: a preset such as home-4 or dgx-h100, or a hosts file.",
    ),
]
Ranks = Annotated[
    int | None,
    typer.Option("--ranks", min=1, metavar="N", help="Plan over N equal ranks on the machine."),
]
OnnxFile = Annotated[
    Path | None,
    typer.Option(
        "--onnx",
        metavar="FILE",
        help="Write the model with the plan as an ONNX file: devices of ops, homes of weights.",
    ),
]
Train = Annotated[
    bool,
    typer.Option(
        "--train",
        help="With --hosts or --ranks: a training step of rows and shards, in place of a ring for one request.",
    ),
]


def plan(
    source: Source,
    budget: opt.BudgetSize = None,
    cpu: opt.CpuSize = None,
    nvme: opt.NvmeSize = None,
    place: opt.PlaceSizes = None,
    machine: opt.MachineName = None,
    output: opt.Output = None,
    batch: opt.Batch = 1,
    tokens: opt.Tokens = 128,
    strategy: opt.Strategy = None,
    device_map: DeviceMapFile = None,
    ngl: GpuLayers = None,
    ot: OverrideTensor = None,
    compare: Compare = None,
    onnx: OnnxFile = None,
    overwrite: Overwrite = False,
    hosts: HostsFile = None,
    ranks: Ranks = None,
    train: Train = False,
    weights: opt.WeightForm = None,
    sites: opt.Sites = "one",
    objective: opt.Objective = "time",
    time_limit: opt.TimeLimit = 20.0,
    cache_dir: opt.CacheDir = None,
    json: opt.JsonFlag = False,
) -> None:
    """Decide where every tensor lives and when it moves; needs no weights. --json prints the whole plan.

    Example: [bold]gascompile plan Qwen3-8B/ --budget 8GiB --machine rtx4090-gen4 -o plan.json[/bold]
    Over ranks: [bold]gascompile plan llama-70b.workload.json --hosts home-4[/bold]
    """
    if hosts is not None or ranks is not None or train:
        others = (budget, cpu, nvme, place, device_map, ngl, ot, weights, compare, onnx)
        if any(option is not None for option in others) or (sites, objective) != ("one", "time"):
            raise typer.BadParameter(
                "plans over ranks take --hosts or --ranks, --machine, --strategy, --train, --batch and --tokens alone; "
                "what places may hold stands in the hosts file"
            )
        over = (hosts, ranks, machine, train)
        _plan_over(source, over, (batch, tokens), strategy, cache_dir, output, json=json)
        return
    given = _given_placement(device_map, ngl, ot or [])
    _require_alone(given, compare=compare, strategy=strategy, weights=weights, onnx=onnx)
    limits, folder = opt.Limits(budget, cpu, nvme, place or ()), opt.cache_dir_of(cache_dir)
    asked: dict[str, Any] = {
        "limits": limits, "machine": machine, "shape": (batch, tokens), "strategy": strategy,
        "time_limit_s": time_limit, "cache_dir": folder, "sites": sites, "objective": objective,
    }  # fmt: skip
    with reserved_stdout(json):
        if onnx is not None:
            made, data, beside = plan_with_onnx(source, (onnx, overwrite), **asked)
        elif device_map is not None:
            made = _mapped(source, device_map, limits, machine, (batch, tokens), folder)
        elif ngl is not None:
            made = _layered(source, (ngl, ot or []), limits, machine, (batch, tokens), folder)
        else:
            made = make_plan_of(source, weights=weights, **asked)
        if output is not None:
            made.save(output)
        if onnx is None:
            data, beside = _beside(compare, source, made, limits, (batch, tokens), folder)
    written = [note(f"The plan is in {output}.")] if output is not None else []
    parts = [*plan_parts(made), *beside, *warnings_block(made.warnings), *written]
    emit(json, serial.to_json(made) if data is None else data, *parts)


def _require_alone(
    given: str | None,
    *,
    compare: str | None,
    strategy: str | None,
    weights: str | None,
    onnx: Path | None,
) -> None:
    """Refuse options of ``plan`` that do not go together; ``given`` is the one that says where weights lie."""
    if given is not None and compare is not None:
        raise typer.BadParameter(
            f"{given} is the plan, and --compare what is beside it; give one of them"
        )
    if given is not None and strategy is not None:
        raise typer.BadParameter(f"{given} and --strategy both say how to plan; give one of them")
    if given is not None and weights is not None:
        raise typer.BadParameter(f"{given} moves weights as they are stored; leave out --weights")
    other = given or (compare and "--compare") or (weights and "--weights")
    if onnx is not None and other:
        raise typer.BadParameter(
            f"--onnx writes a plan of weights as they are stored, alone; leave out {other}"
        )


def _beside(
    compare: str | None,
    source: str,
    made: Plan,
    limits: opt.Limits,
    shape: tuple[int, int],
    cache_dir: Path,
) -> tuple[JsonValue, list[RenderableType]]:
    """Return what --compare prints as JSON and for people; nothing without it."""
    if compare is None:
        return None, []
    from gascompile.commands.comparison import compared

    budget = opt.budget_of(limits, made.machine)
    of = made.workload if opt.is_finished(Path(source)) else source
    return compared(compare, of, made, budget, shape=shape, cache_dir=cache_dir)


def _plan_over(
    source: str,
    over: tuple[str | None, int | None, str | None, bool],
    shape: tuple[int, int],
    strategy: str | None,
    cache_dir: Path | None,
    output: Path | None,
    *,
    json: bool,
) -> None:
    """Plan over ranks; ``over`` are --hosts, --ranks, --machine and --train."""
    from gascompile.commands.hosts import as_json, hosts_parts, plan_over

    hosts, ranks, machine, train = over
    if hosts is None and ranks is None:
        raise typer.BadParameter("--train is beside --hosts or --ranks")
    with reserved_stdout(json):
        made = plan_over(
            source,
            hosts=hosts,
            ranks=ranks,
            machine=machine,
            shape=shape,
            strategy=strategy,
            train=train,
            cache_dir=opt.cache_dir_of(cache_dir),
        )
        if output is not None:
            made.save(output)
    written = [note(f"The plan is in {output}.")] if output is not None else []
    emit(json, as_json(made), *hosts_parts(made), *written)


def _given_placement(device_map: Path | None, ngl: int | None, ot: list[str]) -> str | None:
    """Return the option that says where weights lie; wrong usage where two do, or one lacks another."""
    if device_map is not None and (ngl is not None or ot):
        raise typer.BadParameter("--device-map and --ngl both say where weights lie; give one")
    if ot and ngl is None:
        raise typer.BadParameter("--ot is beside --ngl, as in --ngl 99 --ot 'ffn_.*_exps=CPU'")
    if device_map is not None:
        return "--device-map"
    return "--ngl" if ngl is not None else None


def _layered(
    source: str,
    said: tuple[int, list[str]],
    limits: opt.Limits,
    machine: str | None,
    shape: tuple[int, int],
    cache_dir: Path,
) -> Plan:
    from gascompile.integrations.llama_cpp import LlamaCppPlacement, llama_cpp_plan

    placement = LlamaCppPlacement.of(*said)
    resolved = opt.machine_of(machine, cache_dir, source)
    return llama_cpp_plan(
        placement,
        source,
        resolved,
        opt.budget_of(limits, resolved),
        batch=shape[0],
        tokens=shape[1],
        cache_dir=cache_dir,
    )


def _mapped(
    source: str,
    device_map: Path,
    limits: opt.Limits,
    machine: str | None,
    shape: tuple[int, int],
    cache_dir: Path,
) -> Plan:
    from gascompile.integrations.device_map import device_map_plan, read_device_map

    theirs = read_device_map(device_map)
    resolved = opt.machine_of(machine, cache_dir, source)
    return device_map_plan(
        theirs,
        source,
        resolved,
        opt.budget_of(limits, resolved),
        batch=shape[0],
        tokens=shape[1],
        cache_dir=cache_dir,
    )


def make_plan_of(
    source: str,
    *,
    limits: opt.Limits,
    machine: str | None,
    shape: tuple[int, int],
    strategy: str | None,
    time_limit_s: float,
    cache_dir: Path,
    weights: str | None = None,
    sites: str = "one",
    objective: str = "time",
) -> Plan:
    """Plan a source as the command line names it; ``limits`` are those of the command line."""
    from gascompile.api.plan import plan as plan_source

    resolved = opt.machine_of(machine, cache_dir, source)
    allowed = opt.budget_of(limits, resolved)
    path = Path(source)
    finished = opt.is_finished(path)
    with opt.usage_errors():
        return plan_source(
            read_plan(path).workload if finished else source,
            allowed,
            resolved,
            cache_dir=cache_dir,
            time_limit_s=time_limit_s,
            strategy=strategy,
            weights=weights,
            sites=sites,
            objective=objective,
            batch=shape[0],
            tokens=shape[1],
        )


def plan_to_look_at(
    source: str,
    *,
    limits: opt.Limits,
    machine: str | None,
    shape: tuple[int, int],
    time_limit_s: float,
    cache_dir: Path,
    strategy: str | None = None,
    options: str = "--budget, --cpu, --nvme, --place and --machine",
) -> tuple[Plan, bool]:
    """Return the verified plan of a plan file or a bundle, else one that is made; and whether it was finished.

    ``options`` are those that choose a plan: none of them applies to one that is finished.
    """
    from gascompile.passes.verify.walk import verify

    path = Path(source)
    if not opt.is_finished(path):
        made = make_plan_of(
            source,
            limits=limits,
            machine=machine,
            shape=shape,
            strategy=strategy,
            time_limit_s=time_limit_s,
            cache_dir=cache_dir,
        )
        return made, False
    if limits.is_given or machine is not None or strategy is not None:
        raise typer.BadParameter(
            f"{source} is a finished plan, so {options} do not apply; plan its source again to change them"
        )
    made = read_plan(path)
    verify(made)
    return made, True


def read_plan(path: Path) -> Plan:
    """Read the plan of a plan file or of a bundle; it is not verified yet."""
    opt.require_plan_or_bundle(path)
    if opt.is_bundle(path):
        from gascompile.bundles.files import read_bundle_files

        return read_bundle_files(path).plan
    return Plan.load(path)
