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
            found = export_model(
                model,
                output,
                dynamic_shapes=shapes,
                opset=opset,
                overwrite=overwrite,
                cache_dir=opt.cache_dir_of(cache_dir),
                batch=batch,
                tokens=tokens,
            )
    emit(json, export_json(found), export_part(found))


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
        found = _DYNAMIC.fullmatch(text)
        if found is None or int(found[4]) < 3:
            raise typer.BadParameter(
                "--dynamic takes INPUT.AXIS=NAME:MAX with a MAX of 3 or more, such as input_ids.1=tokens:512, not "
                f"{text!r}"
            )
        matches.append(found)
    from torch.export import Dim

    limits: dict[str, int] = {}
    shapes: dict[str, dict[int, Any]] = {}
    for found in matches:
        if limits.setdefault(found[3], int(found[4])) != int(found[4]):
            raise typer.BadParameter(f"--dynamic gives {found[3]!r} two limits; give it one")
    dims = {name: Dim(name, min=2, max=limit) for name, limit in limits.items()}
    for found in matches:
        shapes.setdefault(found[1], {})[int(found[2])] = dims[found[3]]
    return shapes


def export_json(found: OnnxExport) -> dict[str, Any]:
    """Return what was written as JSON."""
    written = found.written
    return {
        "onnx": str(written.file),
        "data": None if written.data is None else str(written.data),
        "opset": found.opset,
        "ir_version": found.ir_version,
        "inputs": list(found.inputs),
        "outputs": list(found.outputs),
        "nodes": found.num_nodes,
        "weights": written.num_weights,
        "copied_bytes": written.copied_bytes,
        "in_place_bytes": written.in_place_bytes,
        "left": [str(file) for file in written.left],
    }


def export_part(found: OnnxExport) -> RenderableType:
    """Return what was written for people."""
    written = found.written
    data = "" if written.data is None else f" in {written.data}"
    rows = [
        (
            "graph",
            f"{counted(found.num_nodes, 'node')}, operator set {found.opset}, IR {found.ir_version}",
        ),
        ("inputs", ", ".join(found.inputs)),
        ("outputs", ", ".join(found.outputs)),
        ("weights", counted(written.num_weights, "weight")),
        ("copied", f"{format_size(written.copied_bytes)}{data}"),
        ("used in place", format_size(written.in_place_bytes)),
    ]
    if written.left:
        names = ", ".join(file.name for file in written.left)
        rows.append(("left", f"{names}: delete it unless another model uses it"))
    return fields(f"{written.file}", rows)


def annotated_json(found: AnnotatedPlan) -> dict[str, Any]:
    """Return as JSON what of a plan stands in a graph."""
    return {
        "devices": list(found.devices),
        "nodes": found.num_nodes,
        "placed": found.num_placed,
        "unplaced": dict(found.unplaced),
        "ops": found.num_ops,
        "ops_without_node": list(found.ops_without_node),
        "home_bytes": dict(found.home_bytes),
        "weights_without_home": list(found.weights_without_home),
    }


def annotated_parts(found: AnnotatedPlan) -> list[RenderableType]:
    """Return for people what of a plan stands in a graph, and what does not."""
    homes = ", ".join(f"{name} {format_size(size)}" for name, size in found.home_bytes.items())
    parts: list[RenderableType] = [
        note(
            f"{found.num_placed} of {counted(found.num_nodes, 'node')} have a device ({', '.join(found.devices)}); "
            f"homes of weights: {homes or 'none'}."
        )
    ]
    if found.unplaced:
        counts = ", ".join(f"{number} {op}" for op, number in sorted(found.unplaced.items()))
        parts.append(note(f"Without one, as they are not proven to be ops of the plan: {counts}."))
    if names := found.ops_without_node:
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
