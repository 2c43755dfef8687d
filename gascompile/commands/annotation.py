"""``annotate``: the planning problem of a source, to look at or to plan elsewhere."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gascompile.commands import options as opt
from gascompile.commands.output import emit, note, reserved_stdout, warnings_block
from gascompile.commands.plans import Source, read_plan
from gascompile.commands.summary import totals_by_kind, workload_parts, workload_summary
from gascompile.core import serial
from gascompile.core.checks.workload_files import is_workload_file, load_workload
from gascompile.core.config import CompileConfig
from gascompile.core.machine import Machine
from gascompile.core.workload import Workload

_COUNTER = re.compile(r"_\d+$")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Annotated:
    workload: Workload
    kinds: Sequence[str]
    unknown_ops: tuple[str, ...]


def annotate(
    source: Source,
    output: opt.Output = None,
    machine: opt.MachineName = None,
    batch: opt.Batch = 1,
    tokens: opt.Tokens = 128,
    sites: opt.Sites = "one",
    cache_dir: opt.CacheDir = None,
    json: opt.JsonFlag = False,
) -> None:
    """Capture a model and cost its ops: FLOPs, bytes and seconds; needs no weights. Of a plan or a bundle: its own.

    Example: [bold]gascompile annotate Qwen3-8B/ --tokens 1024 -o qwen.workload.json[/bold]
    """
    folder = opt.cache_dir_of(cache_dir)
    with reserved_stdout(json):
        target = opt.machine_of(machine, folder, source)
        with opt.usage_errors():
            config = CompileConfig(cache_dir=folder, sites=sites)
        annotated = _annotated(source, target, (batch, tokens), config)
        if output is not None:
            serial.write_output(output, serial.dumps(annotated.workload))
    totals = totals_by_kind(annotated.workload.ops, annotated.kinds, target.compute_tier)
    data = workload_summary(annotated.workload, totals, annotated.unknown_ops, target.name)
    data["workload_file"] = str(output) if output is not None else None
    unknown = [
        f"no cost formula for {name}: only its bytes count" for name in annotated.unknown_ops
    ]
    written = [note(f"The workload is in {output}.")] if output is not None else []
    emit(
        json,
        data,
        *workload_parts(annotated.workload, totals, target.name),
        *warnings_block(unknown),
        *written,
    )


def _annotated(
    source: str, machine: Machine, shape: tuple[int, int], config: CompileConfig
) -> _Annotated:
    path = Path(source)
    finished = opt.is_finished(path)
    if finished or is_workload_file(source):
        workload = read_plan(path).workload if finished else load_workload(source, machine)
        kinds = [_COUNTER.sub("", op.name) for op in workload.ops]
        return _Annotated(workload=workload, kinds=kinds, unknown_ops=())
    from gascompile.api.model_planning import annotated_source

    _, program, annotation = annotated_source(source, machine, config, shape=shape)
    kinds = [str(node.target) for node in program.op_nodes()]
    return _Annotated(workload=annotation.workload, kinds=kinds, unknown_ops=annotation.unknown_ops)
