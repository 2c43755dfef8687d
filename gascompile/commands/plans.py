"""``plan``, and what other verbs need to get at a plan."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

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
    asked = opt.Asked(
        source=source,
        limits=opt.Limits(budget, cpu, nvme, place or ()),
        machine=machine,
        shape=(batch, tokens),
        cache_dir=opt.cache_dir_of(cache_dir),
        time_limit_s=time_limit,
        strategy=strategy,
        weights=weights,
        sites=sites,
        objective=objective,
        hosts=hosts,
        ranks=ranks,
        train=train,
    )
    if asked.is_over_ranks:
        others = (budget, cpu, nvme, place, device_map, ngl, ot, weights, compare, onnx)
        if any(option is not None for option in others) or (sites, objective) != ("one", "time"):
            raise typer.BadParameter(
                "plans over ranks take --hosts or --ranks, --machine, --strategy, --train, --batch and --tokens alone; "
                "what places may hold stands in the hosts file"
            )
        _plan_over(asked, output, json=json)
        return
    given = _given_placement(device_map, ngl, ot or [])
    _require_alone(given, compare=compare, strategy=strategy, weights=weights, onnx=onnx)
    with reserved_stdout(json):
        if onnx is not None:
            made, data, beside = plan_with_onnx(asked, onnx, overwrite=overwrite)
        elif given is not None:
            made = _placed(asked, device_map, (ngl, ot or []))
        else:
            made = make_plan_of(asked)
        if output is not None:
            made.save(output)
        if onnx is None:
            data, beside = _beside(compare, asked, made)
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
    compare: str | None, asked: opt.Asked, made: Plan
) -> tuple[JsonValue, list[RenderableType]]:
    """Return what --compare prints as JSON and for people; nothing without it."""
    if compare is None:
        return None, []
    from gascompile.commands.comparison import compared

    budget = opt.budget_of(asked.limits, made.machine)
    of = made.workload if opt.is_finished(Path(asked.source)) else asked.source
    return compared(compare, of, made, budget, shape=asked.shape, cache_dir=asked.cache_dir)


def _plan_over(asked: opt.Asked, output: Path | None, *, json: bool) -> None:
    from gascompile.commands.hosts import as_json, hosts_parts, plan_over

    if asked.hosts is None and asked.ranks is None:
        raise typer.BadParameter("--train is beside --hosts or --ranks")
    with reserved_stdout(json):
        made = plan_over(asked)
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


def _placed(
    asked: opt.Asked, device_map: Path | None, layers: tuple[int | None, list[str]]
) -> Plan:
    """Return the plan that --device-map, or --ngl and --ot, say."""
    from gascompile.integrations.device_map import device_map_plan, read_device_map
    from gascompile.integrations.llama_cpp import LlamaCppPlacement, llama_cpp_plan

    plan_it = (
        partial(device_map_plan, read_device_map(device_map))
        if device_map is not None
        else partial(llama_cpp_plan, LlamaCppPlacement.of(layers[0] or 0, layers[1]))
    )
    machine, budget = asked.target(asked.source)
    batch, tokens = asked.shape
    return plan_it(
        asked.source, machine, budget, batch=batch, tokens=tokens, cache_dir=asked.cache_dir
    )


def make_plan_of(asked: opt.Asked) -> Plan:
    """Plan a source as the command line names it."""
    from gascompile.api.plan import plan as plan_source

    machine, budget = asked.target(asked.source)
    path = Path(asked.source)
    source = read_plan(path).workload if opt.is_finished(path) else asked.source
    batch, tokens = asked.shape
    with opt.usage_errors():
        return plan_source(source, budget, machine, batch=batch, tokens=tokens, **asked.config)


def plan_to_look_at(
    asked: opt.Asked, options: str = "--budget, --cpu, --nvme, --place and --machine"
) -> tuple[Plan, bool]:
    """Return the verified plan of a plan file or a bundle, else one that is made; and whether it was finished.

    ``options`` are those that choose a plan: none of them applies to one that is finished.
    """
    from gascompile.passes.verify.walk import verify

    path = Path(asked.source)
    if not opt.is_finished(path):
        return make_plan_of(asked), False
    if asked.limits.is_given or asked.machine is not None or asked.strategy is not None:
        raise typer.BadParameter(
            f"{asked.source} is a finished plan, so {options} do not apply; plan its source again to change them"
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
