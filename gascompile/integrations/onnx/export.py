"""``export``: a model as an ONNX file, with its weights as external data; with its plan, where there is one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gascompile.api.sources import Source, open_source
from gascompile.bundles.files import Weights
from gascompile.capture.calls import ExampleInputs, normalize_call, split_inputs
from gascompile.core.config import CompileConfig
from gascompile.core.errors import CaptureError, UnsupportedOpError
from gascompile.core.model_libraries import register_pytrees
from gascompile.core.progress import task
from gascompile.integrations.onnx.annotate_file import graph_of_file, ops_of_nodes
from gascompile.integrations.onnx.annotate_plan import Annotated, annotate_plan
from gascompile.integrations.onnx.from_program import (
    DEFAULT_OPSET,
    OP,
    onnx_graph,
    require_exporter,
)
from gascompile.integrations.onnx.module import OnnxModel
from gascompile.integrations.onnx.write import Written, require_unwritten, write_onnx
from gascompile.weights.checkpoint import open_checkpoint_of
from gascompile.weights.file_kinds import is_onnx
from gascompile.weights.resolve import resolve_weights, with_held_tensors
from gascompile.weights.store import STORE

if TYPE_CHECKING:
    import onnx_ir

    from gascompile.api.model_planning import PlannedModel
    from gascompile.capture.to_program import Capture
    from gascompile.weights.resolve import Resolved


@dataclass(frozen=True, slots=True, kw_only=True)
class OnnxExport:
    """What was written."""

    written: Written
    inputs: tuple[str, ...]
    """Names of the graph's inputs, in the order of the model's."""
    outputs: tuple[str, ...]
    num_nodes: int
    opset: int
    ir_version: int


def export(
    model: nn.Module | str | os.PathLike[str],
    file: str | os.PathLike[str],
    example_inputs: ExampleInputs | None = None,
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    dynamic_shapes: Any = None,
    opset: int = DEFAULT_OPSET,
    overwrite: bool = False,
    cache_dir: str | os.PathLike[str] | None = None,
    batch: int = 1,
    tokens: int = 128,
) -> OnnxExport:
    """Write a model as an ONNX file through torch's exporter.

    Weights become external data: those in safetensors files in the folder of ``file`` are referenced where they lie,
    all others are copied into ``<file>.data`` block by block. A weight is never loaded whole for it.

    Args:
        model: a module, whose weights may be on the meta device, or what ``open_source`` opens.
        file: to be written; its name ends in .onnx.
        example_inputs: tuple or dict; made up for Hugging Face directories from ``batch`` and ``tokens``.
        checkpoint: where the weights of a module on the meta device lie.
        dynamic_shapes: as ``torch.export.export`` takes it.
        opset: of ONNX's ops.
        overwrite: whether a file that is there is replaced; its data stays.
        cache_dir: where weights that lie in no file are kept.
        batch: rows of made-up inputs.
        tokens: tokens per row of made-up inputs.

    Raises:
        CaptureError: the model cannot be traced.
        CheckpointError: weights are missing, extra or do not fit the model; or onnxscript is not installed.
        StorageError: a file is there already, cannot be read, or cannot be written.
        UnsupportedOpError: torch's exporter, or ONNX, cannot express the model; names the op.
        ValueError: ``file`` does not end in .onnx, or ``dynamic_shapes`` names what there is not.
    """
    target = Path(file)
    require_writable(target, overwrite=overwrite)
    opened = _opened(model, checkpoint, (batch, tokens))
    inputs = split_inputs(example_inputs) if example_inputs is not None else opened.inputs
    if inputs is None:
        raise CaptureError(
            f"{type(opened.model).__name__} needs example_inputs=, a tuple or dict of inputs to trace it with"
        )
    register_pytrees()
    from gascompile.capture.export import capture

    args, kwargs = normalize_call(opened.model, *inputs)
    shapes = _shapes_of_all(dynamic_shapes, args, kwargs)
    with task(f"Capturing {type(opened.model).__name__}"):
        captured = capture(opened.model, args, kwargs, dynamic_shapes=shapes)
    store = CompileConfig.of(cache_dir).cache_dir / STORE
    resolved = resolved_weights(opened, captured, store)
    with task("Writing ONNX"):
        graph = onnx_graph(captured.program, resolved.held, opset=opset)
    return written_graph(graph, resolved.weights, target, overwrite=overwrite)


def _shapes_of_all(given: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return ``dynamic_shapes`` with an entry for each named input; raises ``ValueError`` for what there is not."""
    if args or not isinstance(given, dict):
        return given
    for name, dims in given.items():
        if name not in kwargs:
            raise ValueError(f"there is no input {name!r}; the model takes {', '.join(kwargs)}")
        value = kwargs[name]
        if not isinstance(value, torch.Tensor) or not isinstance(dims, dict):
            continue
        for axis in dims:
            if axis >= value.dim() or value.shape[axis] < 2:
                raise ValueError(
                    f"the input {name!r} is {list(value.shape)} in the example, so its axis {axis} cannot change; give "
                    "an example with a size of 2 or more there (--batch, --tokens)"
                )
    return {name: given.get(name) for name in kwargs}


def require_writable(file: Path, *, overwrite: bool) -> None:
    """Refuse what would fail after a capture; raises as ``require_unwritten`` and ``require_exporter`` do."""
    require_unwritten(file, overwrite=overwrite)
    require_exporter()


def _opened(
    model: Any, checkpoint: str | os.PathLike[str] | None, shape: tuple[int, int]
) -> Source:
    if isinstance(model, nn.Module):
        path = Path(checkpoint) if checkpoint is not None else None
        return Source(model=model, checkpoint=path, inputs=None)
    if not isinstance(model, (str, os.PathLike)):
        raise TypeError(f"a model is a torch.nn.Module or a path, not {type(model).__name__}")
    if is_onnx(Path(model)):
        raise UnsupportedOpError(
            f"{Path(model)} is an ONNX file already; gascompile plan {Path(model)} --onnx FILE writes it with a plan"
        )
    opened = open_source(model, batch=shape[0], tokens=shape[1])
    if checkpoint is not None:
        return Source(model=opened.model, checkpoint=Path(checkpoint), inputs=opened.inputs)
    return opened


def resolved_weights(opened: Source, captured: Capture, store: Path) -> Resolved:
    """Return where the values of a captured model's weights lie; raises as ``resolve_weights`` does."""
    program = with_held_tensors(captured.program, opened.model, captured.constants)
    path = opened.checkpoint
    with task("Finding weights"):
        return resolve_weights(
            opened.model,
            program,
            canonical=captured.canonical,
            constants=captured.constants,
            checkpoint=open_checkpoint_of(opened.model, path) if path is not None else None,
            store=store,
            where=str(path or "the checkpoint"),
        )


def written_graph(
    graph: onnx_ir.Model, weights: Weights, file: Path, *, overwrite: bool
) -> OnnxExport:
    """Write a graph and say what it has."""
    written = write_onnx(graph, weights, file, overwrite=overwrite)
    return OnnxExport(
        written=written,
        inputs=tuple(str(value.name) for value in graph.graph.inputs),
        outputs=tuple(str(value.name) for value in graph.graph.outputs),
        num_nodes=len(graph.graph),
        opset=graph.opset_imports[""],
        ir_version=graph.ir_version,
    )


def write_plan(
    planned: PlannedModel,
    file: str | os.PathLike[str],
    *,
    opset: int = DEFAULT_OPSET,
    overwrite: bool = False,
) -> tuple[OnnxExport, Annotated]:
    """Write a model with its plan as an ONNX file; of a model that is one, the same graph with annotations.

    Args:
        planned: the plan and what it was made of.
        file: to be written; its name ends in .onnx.
        opset: of ONNX's ops, for a model that is no ONNX file.
        overwrite: whether a file that is there is replaced; its data stays.

    Raises:
        CheckpointError, StorageError, UnsupportedOpError, ValueError: as those of ``export``.
    """
    target = Path(file)
    require_writable(target, overwrite=overwrite)
    opened, program = planned.source, planned.captured.program
    if isinstance(opened.model, OnnxModel) and opened.checkpoint is not None:
        same = graph_of_file(opened.checkpoint)
        ops = ops_of_nodes(same.model, program)
        held = opened.model.tensors
        annotated = annotate_plan(same.model, planned.plan, ops=ops, weights=held)
        return written_graph(same.model, same.weights, target, overwrite=overwrite), annotated
    resolved = resolved_weights(opened, planned.captured, planned.job.config.cache_dir / STORE)
    graph = onnx_graph(program, resolved.held, opset=opset)
    noted = {n: (n.metadata_props[OP],) for n in graph.graph if OP in n.metadata_props}
    names = {name: name for name in graph.graph.initializers if name in program.bound}
    annotated = annotate_plan(graph, planned.plan, ops=noted, weights=names)
    return written_graph(graph, resolved.weights, target, overwrite=overwrite), annotated
