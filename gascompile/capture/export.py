"""Capture: an nn.Module and example inputs become a ``Program``.

The module is traced by ``torch.export`` over fake parameters, so no weight is read, copied or computed
with. The graph is left undecomposed: composite ops run faster and the graph is half the size.
"""

from __future__ import annotations

import keyword
import logging
import traceback
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from gascompile.capture.alone import alone
from gascompile.capture.assigned_buffers import like_before
from gascompile.capture.exact_types import require_no_exact_types
from gascompile.capture.fake_twin import fake_twin
from gascompile.capture.fingerprint.code_origin import Origin, origin_of_file
from gascompile.capture.gradients import (
    GradientCall,
    Spaces,
    computes_alike,
    told,
    without_gradients,
)
from gascompile.capture.keyword_names import named_keywords
from gascompile.capture.later.history import History
from gascompile.capture.later.later_calls import Exported, Steady, steady_capture
from gascompile.capture.later.rounds import Rounds
from gascompile.capture.own_weights import OnlyComputed, own_weights
from gascompile.capture.plain_tensors import require_plain_constants
from gascompile.capture.record.asked_inputs import AskedInputs
from gascompile.capture.record.asked_settings import FASTPATH, GRADIENTS, SETTINGS, require_as_told
from gascompile.capture.record.effects import EffectTrace
from gascompile.capture.record.record import Recorder
from gascompile.capture.record.trial import Trial
from gascompile.capture.size_relations import unproven_relation
from gascompile.capture.to_program import Capture, to_program
from gascompile.capture.trace_inputs import overlaps, trace_inputs, with_sharing
from gascompile.capture.tracing import tracing
from gascompile.core.collection import no_collection
from gascompile.core.deferral import deferring
from gascompile.core.errors import CaptureError, UnsupportedOpError
from gascompile.core.model_libraries import warn_of_doubts
from gascompile.passes.graph.mutated_tensors import written_inputs

_TRANSFORMS = "torch._functorch.predispatch"
"""Where the functions are defined that stand for transforms in a trace."""
_log = logging.getLogger("gascompile")


@alone
@deferring
def capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    dynamic_shapes: Any = None,
    device: str = "cpu",
    history: History | None = None,
) -> Capture:
    """Trace ``model`` on example inputs.

    ``args`` and ``kwargs`` are only looked at for their structure and signature. ``dynamic_shapes``
    is what ``torch.export.export`` takes; every dynamic dimension needs a maximum. Wherever the model and
    its inputs are, the program is one for ``device``; ``passes.to_device`` moves it to another. ``history`` is of
    the calls that came before, and gets this one.

    Raises:
        CaptureError: the model cannot be traced, or may compute something else at each call; names its line and the
            way out.
        UnsupportedOpError: an input, or what the model does to it, has no place in a plan.
    """
    leaves = pytree.tree_leaves((args, dict(kwargs)))
    warn_of_doubts(model)
    past = history if history is not None else History()
    call = model, args, kwargs, dynamic_shapes, device, past
    with no_collection():
        captured, steady = _captured(*call, overlapping=False)
    written = written_inputs(captured.program)
    if written and overlaps(leaves):
        if dynamic_shapes is not None:
            raise UnsupportedOpError(
                f"{type(model).__name__} writes to its input '{min(written)}', and inputs overlap in memory, which "
                "dynamic shapes cannot describe; pass clones, or leave out dynamic_shapes"
            )
        with no_collection():
            captured, steady = _captured(*call, overlapping=True)
        written = written_inputs(captured.program)
    past.add(args, kwargs, steady.inert, settles=steady.settles)
    inputs = with_sharing(captured.program.inputs, leaves, written)
    if (asked := steady.record.inputs) is not None and asked.facts:
        pairs = zip(inputs, leaves, strict=True)
        inputs = tuple(replace(spec, facts=asked.of_leaf(leaf)) for spec, leaf in pairs)
    return replace(captured, program=replace(captured.program, inputs=inputs))


def _captured(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    dynamic_shapes: Any,
    device: str,
    history: History,
    *,
    overlapping: bool,
) -> tuple[Capture, Steady]:
    kept: set[str] = set()

    def exported(
        trial: Trial | None = None, rounds: Rounds | None = None, spaces: Spaces | None = None
    ) -> EffectTrace[Exported]:
        twin, canonical = fake_twin(model, device=device)
        inputs = trace_inputs(args, kwargs, device=device, overlapping=overlapping)
        recorder = Recorder(twin, versions=True, trial=trial)
        is_recording = spaces is not None
        recorder.follow(twin, rounds, AskedInputs(args, kwargs, model, is_recording=is_recording))
        names = inputs[1] if dynamic_shapes is not None else ()
        sizes = recorder.noting_sizes() if dynamic_shapes is not None else nullcontext()
        named = named_keywords(twin, names)
        own = OnlyComputed(model)
        alike = like_before(twin)
        words, ran = _in_words(model), recorder.around()
        with words, ran, tracing() as assigned, told(spaces), named, sizes, own, alike:
            program = torch.export.export(
                twin, inputs[0], dict(inputs[1]), dynamic_shapes=dynamic_shapes, strict=False
            )
        kept.update(assigned)
        if dynamic_shapes is not None:
            _require_ranges(recorder, program, model)
        _require_shown(program, recorder, model)
        return EffectTrace(
            captured=(program, {**canonical, **own_weights(program.constants, model)}, *inputs),
            graph_module=program.graph_module,
            recorder=recorder,
            constants=program.constants,
        )

    trace = exported()
    asks, calls = GRADIENTS in trace.recorder.settings, trace.recorder.calls
    digest = trace.digest() if asks else ""
    changes_containers = trace.recorder.changes_containers
    others = history.others(args, kwargs)
    steady = steady_capture(trace, exported, others, model)
    if steady.trace is not None:
        trace = steady.trace
    require_as_told(steady.record.running.settings, type(model).__name__)
    _tell(type(model).__name__, kept, changes_containers=changes_containers)
    if digest and torch.is_grad_enabled():
        call = GradientCall(model, args, kwargs, device, overlapping=overlapping)
        is_proven = dynamic_shapes is None and computes_alike(call, steady.record, calls)
        steady = without_gradients(
            steady, None if is_proven else exported, digest, type(model).__name__
        )
    captured = to_program(type(model).__name__, *trace.captured)
    return replace(captured, record=steady.record), steady


def _tell(name: str, kept: Collection[str], *, changes_containers: bool) -> None:
    """Say what planned calls leave undone, which no result shows."""
    if changes_containers:
        _log.warning(
            "%s changes a list or dict that it is given: planned calls return what it returns, and leave the caller's "
            "as it is",
            name,
        )
    if kept:
        _log.warning(
            "%s: the code that is captured sets %s to tensors that it computes, which planned calls do not; what is "
            "read afterwards is as it was before. Return such tensors, or keep them in buffers",
            name,
            ", ".join(sorted(kept)),
        )


def _require_ranges(
    recorder: Recorder, program: torch.export.ExportedProgram, model: nn.Module
) -> None:
    """Return if sizes of ranges were not taken for what they are in words or by type, nor decide together.

    Raises:
        CaptureError: one was taken for what its symbol is, or several decide something that holds for some alone.
    """
    if recorder.words_of_sizes is not None:
        raise CaptureError(
            f"{recorder.words_of_sizes}, which for a range of sizes is not what it is for each. What to do: leave out "
            f"dynamic_shapes for {type(model).__name__}, or compute with the number alone"
        )
    relation = unproven_relation(program)
    if relation is not None:
        raise CaptureError(
            f"{type(model).__name__} decides by sizes together: the capture holds where {relation}, which is not so "
            "for all sizes of the ranges. What to do: leave out dynamic_shapes, which makes a plan for each size, or "
            "give sizes that are always equal the same torch.export.Dim"
        )


def _require_shown(
    program: torch.export.ExportedProgram, recorder: Recorder, model: nn.Module
) -> None:
    """Return if the graph shows what calls compute; raises as the checks do."""
    _require_no_transforms(program.graph_module)
    _require_writable(program.graph_module)
    require_plain_constants(program.constants)
    require_no_exact_types(recorder.ran)
    _require_no_packing(recorder, model)
    _require_no_fast_path(recorder, model)


def _require_no_packing(recorder: Recorder, model: nn.Module) -> None:
    """Return if no encoder of torch's would take what is padded out of batches.

    Raises:
        CaptureError: one would.
    """
    if recorder.nests:
        raise CaptureError(
            f"{type(model).__name__} gives a nn.TransformerEncoder a padding mask: without gradients torch computes "
            "zeros where it pads, with them something else, by values of the mask, and a plan cannot follow. What to "
            "do: set use_nested_tensor = False on the encoder, which computes as with gradients"
        )


def _require_no_fast_path(recorder: Recorder, model: nn.Module) -> None:
    """Return if no encoder layer would be computed, outside of a trace, by a kernel with results of another type.

    Raises:
        CaptureError: one would.
    """
    kind = nn.TransformerEncoderLayer
    is_there = any(isinstance(module, kind) and not module.training for module in model.modules())
    if not is_there or not torch.is_autocast_enabled("cpu"):
        return
    if recorder.settings.setdefault(FASTPATH, SETTINGS[FASTPATH]()):
        raise CaptureError(
            f"{type(model).__name__} has a nn.TransformerEncoderLayer: under autocast, where no gradients are "
            "recorded, torch computes it by a kernel of its own, whose results have another type. What to do: "
            "torch.backends.mha.set_fastpath_enabled(False), which computes as with gradients"
        )


def _require_no_transforms(graph_module: torch.fx.GraphModule) -> None:
    """Return if nothing in a graph enters a level of ``torch.func``, which would stay so for the whole process.

    Raises:
        UnsupportedOpError: something does.
    """
    for part in graph_module.modules():
        for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
            if getattr(node.target, "__module__", None) == _TRANSFORMS:
                raise UnsupportedOpError(
                    f"op '{node.name}' is a part of a transform of torch.func, and no ATen op. Write vmap as batched "
                    "tensor code, and derivatives as formulas"
                )


def _require_writable(graph_module: torch.fx.GraphModule) -> None:
    """Return if Python code can name all ops: ``aten.random_.from`` is no expression.

    Raises:
        UnsupportedOpError: one has no name.
    """
    parts = [part for part in graph_module.modules() if isinstance(part, torch.fx.GraphModule)]
    for node in (node for part in parts for node in part.graph.nodes):
        if keyword.iskeyword(getattr(node.target, "_overloadname", "")):
            raise UnsupportedOpError(
                f"op '{node.target}' has no name in Python code. Draw numbers of a range by torch.randint(low, high, "
                "shape), or from 0 on by x.random_(high)"
            )


@contextmanager
def _in_words(model: nn.Module) -> Iterator[None]:
    """Say where a capture failed: torch.export raises whatever the model's own code raises."""
    try:
        yield
    except CaptureError:
        raise
    except Exception as error:
        if isinstance(error.__cause__, CaptureError):
            raise error.__cause__ from error
        raise _capture_error(model, error) from error


def _capture_error(model: nn.Module, error: Exception) -> CaptureError:
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if origin_of_file(frame.filename) not in {Origin.TORCH, Origin.OWN, Origin.MADE}
    ]
    where = (
        f" at {frames[-1].filename}:{frames[-1].lineno}: {(frames[-1].line or '').strip()!r}"
        if frames
        else ""
    )
    text = str(error)
    lines = text.strip().splitlines() or [type(error).__name__]
    summary, advice = _summed_up(text, lines, is_ours=bool(frames))
    return CaptureError(
        f"{type(model).__name__} cannot be captured{where}: {type(error).__name__}: {summary}. What to do: {advice}."
    )


def _summed_up(text: str, lines: list[str], *, is_ours: bool) -> tuple[str, str]:
    """Return the reason of an error, and what to do; ``is_ours`` where a line of the program has raised it."""
    summary = lines[0]
    if "Constraints violated" in text or "dynamic_shapes" in text:
        # The lines that follow name the dimension and what the model needs of it.
        summary = " ".join(line.strip() for line in lines[:3])
        advice = (
            "give dynamic_shapes= one entry per argument, as in {'x': {0: torch.export.Dim('batch', max=32)}}, with "
            "ranges and relations that the model keeps"
        )
    elif "fake tensor in the exported program constant" in text:
        summary = "a tensor was read past what is traced"
        advice = (
            "compute with tensors themselves instead of tensor.data, under torch.no_grad() where no gradient shall "
            "flow, and do not keep what is computed outside of buffers"
        )
    elif "pytree" in text:
        advice = (
            "return tensors, tuples, lists, dicts or dataclasses, register the type with "
            "torch.utils._pytree.register_pytree_node, or switch it off (for a cache: use_cache=False)"
        )
    elif "data-dependent" in text.lower() or "unbacked" in text.lower():
        advice = (
            "the model's control flow depends on tensor values: use torch.where there, "
            "or state what holds with torch._check, or compile the part of the model around it"
        )
    elif not is_ours:
        # No line of the program's: an op of torch's modules has failed, or torch with what it had traced.
        advice = (
            "check that model(*args, **kwargs) itself runs on these example inputs; if it does, torch.export cannot "
            "follow it: an input that gets another number of dimensions in place is one cause (write "
            "x = x.unsqueeze(0) for x.unsqueeze_(0)); otherwise compile its submodules one by one"
        )
    else:
        advice = (
            "check that model(*args, **kwargs) itself runs on these example inputs; if it does, compile the "
            "submodules around this line one by one"
        )
    return summary, advice
