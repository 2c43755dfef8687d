"""``export``, and what ``plan --onnx`` writes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType

from gascompile.commands import options as opt
from gascompile.commands.output import counted, emit, fields, note, reserved_stdout
from gascompile.core import serial
from gascompile.core.plan import Plan
from gascompile.core.serial import JsonValue
from gascompile.core.sizes import format_size

if TYPE_CHECKING:
    from gascompile.integrations.onnx.annotate_plan import Annotated as AnnotatedPlan
    from gascompile.integrations.onnx.export import OnnxExport

_DYNAMIC = re.compile(r"(\w+)\.([0-9]{1,2})=([A-Za-z_]\w*):([0-9]{1,9})")
_SHOWN_OPS = 8  # names in a line; the others are counted

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Hugging Face directory with weights, .pt2 file, or package.module:callable.",
        show_default=False,
    ),
]
OnnxOutput = Annotated[
    Path,
    typer.Option(
        "-o", "--output", metavar="FILE", help="The .onnx file to write.", show_default=False
    ),
]
Dynamic = Annotated[
    list[str] | None,
    typer.Option(
        "--dynamic",
        metavar="INPUT.AXIS=NAME:MAX",
        help="A size that changes from call to call, as in input_ids.1=tokens:512; from 2 on. Sizes of one name are "
        "equal. May stand several times.",
    ),
]
Opset = Annotated[
    int, typer.Option("--opset", min=18, max=25, metavar="N", help="Operator set of the file.")
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace an ONNX file that is there; its data stays.")
]


def export(
    model: Model,
    output: OnnxOutput,
    batch: opt.Batch = 1,
    tokens: opt.Tokens = 128,
    dynamic: Dynamic = None,
    opset: Opset = 23,
    overwrite: Overwrite = False,
    cache_dir: opt.CacheDir = None,
    json: opt.JsonFlag = False,
) -> None:
    """Write a model as ONNX, through torch's exporter; weights in safetensors files beside it are used in place.

    Example: [bold]gascompile export Qwen3-8B/ -o Qwen3-8B/model.onnx --dynamic input_ids.1=tokens:4096[/bold]
    """
    _require_source(model, "export")
    shapes = _dynamic_shapes(dynamic or [])
    with reserved_stdout(json):
        from gascompile.integrations.onnx.export import export as export_model

        with opt.usage_errors():
            written = export_model(
                model,
                output,
                dynamic_shapes=shapes,
                opset=opset,
                overwrite=overwrite,
                cache_dir=opt.cache_dir_of(cache_dir),
                batch=batch,
                tokens=tokens,
            )
    emit(json, export_json(written), export_part(written))


def _require_source(source: str, what: str) -> None:
    """Refuse a plan or a bundle in the place of a model; wrong usage."""
    if opt.is_finished(Path(source)):
        raise typer.BadParameter(
            f"{source} is a finished plan; {what} takes the model itself, which that was made of"
        )


def _dynamic_shapes(given: list[str]) -> Any:
    """Return what ``torch.export`` takes; wrong usage where a text is not of the form."""
    if not given:
        return None
    matches = []
    for text in given:
        match = _DYNAMIC.fullmatch(text)
        if match is None or int(match[4]) < 3:
            raise typer.BadParameter(
                "--dynamic takes INPUT.AXIS=NAME:MAX with a MAX of 3 or more, such as input_ids.1=tokens:512, not "
                f"{text!r}"
            )
        matches.append(match)
    from torch.export import Dim

    limits: dict[str, int] = {}
    shapes: dict[str, dict[int, Any]] = {}
    for match in matches:
        if limits.setdefault(match[3], int(match[4])) != int(match[4]):
            raise typer.BadParameter(f"--dynamic gives {match[3]!r} two limits; give it one")
    dims = {name: Dim(name, min=2, max=limit) for name, limit in limits.items()}
    for match in matches:
        shapes.setdefault(match[1], {})[int(match[2])] = dims[match[3]]
    return shapes


def export_json(exported: OnnxExport) -> dict[str, Any]:
    """Return what was written as JSON."""
    written = exported.written
    return {
        "onnx": str(written.file),
        "data": None if written.data is None else str(written.data),
        "opset": exported.opset,
        "ir_version": exported.ir_version,
        "inputs": list(exported.inputs),
        "outputs": list(exported.outputs),
        "nodes": exported.num_nodes,
        "weights": written.num_weights,
        "copied_bytes": written.copied_bytes,
        "in_place_bytes": written.in_place_bytes,
        "left": [str(file) for file in written.left],
    }


def export_part(exported: OnnxExport) -> RenderableType:
    """Return what was written for people."""
    written = exported.written
    data = "" if written.data is None else f" in {written.data}"
    rows = [
        (
            "graph",
            f"{counted(exported.num_nodes, 'node')}, operator set {exported.opset}, IR {exported.ir_version}",
        ),
        ("inputs", ", ".join(exported.inputs)),
        ("outputs", ", ".join(exported.outputs)),
        ("weights", counted(written.num_weights, "weight")),
        ("copied", f"{format_size(written.copied_bytes)}{data}"),
        ("used in place", format_size(written.in_place_bytes)),
    ]
    if written.left:
        names = ", ".join(file.name for file in written.left)
        rows.append(("left", f"{names}: delete it unless another model uses it"))
    return fields(f"{written.file}", rows)


def annotated_json(plan: AnnotatedPlan) -> dict[str, Any]:
    """Return as JSON what of a plan stands in a graph."""
    return {
        "devices": list(plan.devices),
        "nodes": plan.num_nodes,
        "placed": plan.num_placed,
        "unplaced": dict(plan.unplaced),
        "ops": plan.num_ops,
        "ops_without_node": list(plan.ops_without_node),
        "home_bytes": dict(plan.home_bytes),
        "weights_without_home": list(plan.weights_without_home),
    }


def annotated_parts(plan: AnnotatedPlan) -> list[RenderableType]:
    """Return for people what of a plan stands in a graph, and what does not."""
    homes = ", ".join(f"{name} {format_size(size)}" for name, size in plan.home_bytes.items())
    parts: list[RenderableType] = [
        note(
            f"{plan.num_placed} of {counted(plan.num_nodes, 'node')} have a device ({', '.join(plan.devices)}); "
            f"homes of weights: {homes or 'none'}."
        )
    ]
    if plan.unplaced:
        counts = ", ".join(f"{number} {op}" for op, number in sorted(plan.unplaced.items()))
        parts.append(note(f"Without one, as they are not proven to be ops of the plan: {counts}."))
    if names := plan.ops_without_node:
        more = f" and {len(names) - _SHOWN_OPS} more" if len(names) > _SHOWN_OPS else ""
        parts.append(
            note(
                f"{counted(len(names), 'op')} of the plan have no node, as they are constants or change no value: "
                f"{', '.join(names[:_SHOWN_OPS])}{more}."
            )
        )
    return parts


def plan_with_onnx(
    asked: opt.Asked, file: Path, *, overwrite: bool
) -> tuple[Plan, JsonValue, list[RenderableType]]:
    """Plan a model and write it as ONNX with the plan; return that, and what is printed as JSON and for people.

    ``overwrite`` replaces a ``file`` that is there.
    """
    _require_source(asked.source, "--onnx")
    from gascompile.api.plan import plan_with_program
    from gascompile.integrations.onnx.export import require_writable, write_plan

    with opt.usage_errors():
        require_writable(file, overwrite=overwrite)
        machine, budget = asked.target(asked.source)
        planned = plan_with_program(
            asked.source, budget, machine, shape=asked.shape, **asked.config
        )
        written, annotated = write_plan(planned, file, overwrite=overwrite)
    data: JsonValue = {
        "plan": serial.to_json(planned.plan),
        "onnx": {**export_json(written), **annotated_json(annotated)},
    }
    return planned.plan, data, [export_part(written), *annotated_parts(annotated)]
