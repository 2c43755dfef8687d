"""Joint graph: forward and backward of a loss as one straight line of ATen ops, the ones that eager runs.

Traced by AOTAutograd over fake tensors: nothing is computed and no weight is copied. Its first gradient, a one,
becomes an op; tensors from outside the model become inputs.
"""

from __future__ import annotations

import contextlib
import logging
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch._functorch._aot_autograd.descriptors import (
    BufferAOTInput,
    ParamAOTInput,
    PlainAOTInput,
    TangentAOTInput,
)
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._guards import TracingContext, tracing
from torch._inductor import config as inductor_config
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils import _pytree as pytree

from gascompile.capture.alone import alone
from gascompile.capture.batch_classes import program_parts
from gascompile.capture.exporting import exporting
from gascompile.capture.old_hooks import old_hook
from gascompile.capture.record.effects import EffectProof, EffectTrace, prove
from gascompile.capture.record.record import CaptureRecord, Recorded, Recorder
from gascompile.capture.record.trial import Trial
from gascompile.core.collection import no_collection
from gascompile.core.errors import CaptureError, UnsupportedOpError
from gascompile.core.model_libraries import describable, warn_of_doubts
from gascompile.core.quick_traces import quick_traces
from gascompile.core.true_strides import true_strides
from gascompile.passes.graph.bound_aliases import bound_aliases
from gascompile.passes.parallel.legs import Action
from gascompile.training.capture.backward_code import backward_recorded
from gascompile.training.capture.cumulative_norms import numbered_norms, take_counts
from gascompile.training.capture.effect_tokens import drop_tokens
from gascompile.training.capture.exact_dropout import exact_dropout
from gascompile.training.capture.exact_strides import exact_strides
from gascompile.training.capture.joint_outputs import (
    joint_outputs,
    require_dense,
    start_from_one,
)
from gascompile.training.capture.left_tensors import leaves_no_traced
from gascompile.training.capture.own_kernels import own_kernels, uncompiled
from gascompile.training.capture.trace_errors import in_words
from gascompile.training.capture.trace_substitutes import TraceSubstitutes
from gascompile.training.capture.traced_call import TracedModel, without_copies
from gascompile.training.capture.traced_loss import MODEL, OUTSIDE, LossFunction, TracedLoss, apart
from gascompile.training.state.aliasing import Storages, View, named_tensors, places

_NO_TENSOR = "the loss uses a {}, which has no place in a plan; to draw, leave generator= out"
_NO_OPS = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}

_log = logging.getLogger("gascompile")


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """A parameter's new value, which its owner in a pipeline sends to another stage that has it, too."""

    name: str
    peer: int
    """The other rank."""
    tag: int
    sends: bool
    """Whether this rank is the owner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joint:
    """Forward and backward pass."""

    graph_module: fx.GraphModule
    bound: Mapping[str, str]
    """Placeholder -> name of the parameter or buffer; tied ones have the first name."""
    inputs: tuple[str, ...]
    """Placeholders of the batch's leaves, in their order."""
    outside: Mapping[str, torch.Tensor]
    """Placeholder -> a tensor that is neither the model's nor the batch's; read anew by every step."""
    num_constants: int  # of those, the last, which were made by the trace
    loss: fx.Node
    """Of a call, the first of its results."""
    outputs: tuple[fx.Node | Any, ...]
    """What comes out: the loss, or all that a call returns, flat."""
    out_spec: pytree.TreeSpec
    gradients: Mapping[str, fx.Node]
    """Parameter -> its gradient; several may have the same."""
    mutations: Mapping[str, fx.Node]
    """Buffer -> its value after the forward pass."""
    tensors: Mapping[str, torch.Tensor]
    """What ``bound`` names: parameters and buffers of the model."""
    views: Mapping[str, fx.Node]
    """Parameter that is a view of one of ``tensors`` -> the op that makes it."""
    record: Recorded
    """What the trace read in Python, which a step bakes in; of a kept one, what that depends on."""
    trained: frozenset[str] = frozenset()
    """Of a stage of a pipeline: parameters to which some stage gives a gradient."""
    copies: tuple[Copied, ...] = ()
    actions: Mapping[str, Action] = field(default_factory=dict)
    """In which leg of which micro-batch an op of a stage runs, by its name."""


@dataclass(frozen=True, slots=True)
class _Traced:
    """What was traced, and the counts of its norms by name."""

    wrapped: TracedLoss
    norms: Mapping[float, str]


@alone
@no_collection()
@leaves_no_traced
def capture_joint(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    storages: Storages | None = None,
    *,
    trains: bool = True,
    calls: bool = False,
) -> Joint:
    """Trace ``loss_fn(model, batch)`` and its gradients.

    Args:
        storages: of the model, where some of its tensors share memory.
        trains: False for the value alone, which then may be any scalar and needs no gradient.
        calls: ``loss_fn`` is ``call_of``, and all that it returns counts.

    Raises:
        CaptureError: the loss is no scalar, depends on no parameter, or cannot be traced.
        UnsupportedOpError: the model has tensors that are not on the CPU.
    """
    warn_of_doubts(model)
    storages = storages or Storages(model)
    leaves, spec = pytree.tree_flatten(batch)
    inputs = [leaf if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
    parts = program_parts(batch)
    substitutes = TraceSubstitutes(model, storages)

    def traced(trial: Trial | None = None) -> EffectTrace[_Traced]:
        recorder = Recorder(model, loss_fn, *parts, trial=trial)
        caches = torch.is_autocast_cache_enabled()
        kind = TracedModel if calls else TracedLoss
        wrapped = kind(
            model, loss_fn, spec, leaves, substitutes, recorder, trains=trains, caches=caches
        )
        recorded = backward_recorded(recorder)
        with describable(), recorder.around(), recorded, numbered_norms(model) as norms:
            graph = _captured(wrapped, inputs)
        return EffectTrace(captured=_Traced(wrapped, norms), graph_module=graph, recorder=recorder)

    num_known, asks, recorders = -1, False, list[Recorder]()
    while len(substitutes.outside) > num_known or asks:
        if num_known > 0 and len(substitutes.outside) > num_known:
            raise CaptureError(
                f"loss_fn of {type(model).__name__} uses other tensors from outside the model at every call; pass "
                "them in the batch"
            )
        num_known = len(substitutes.outside)
        trace = traced()
        recorders.append(trace.recorder)
        record = trace.recorder.record()
        # What a first call sets, and later ones read, is another course once.
        asks = not record.is_reproducible and not asks
    if not record.is_reproducible:
        trace = _without_effects(record, traced, recorders, model)
        record = trace.recorder.record()
    if trace.recorder.changes_containers:
        _log.warning(
            "the loss of %s changes a list or dict of its batch: planned steps leave the caller's as it is, and the "
            "next one that is given it computes with what it was",
            type(model).__name__,
        )
    wrapped, norms = trace.captured.wrapped, trace.captured.norms
    return _read(trace.graph_module, wrapped, storages.views, norms, record)


def _without_effects(
    record: CaptureRecord,
    traced: Callable[[Trial], EffectTrace[_Traced]],
    recorders: Sequence[Recorder],
    model: nn.Module,
) -> EffectTrace[_Traced]:
    """Return a trace whose effects do not matter.

    Raises:
        CaptureError: they may, or there is another reason for which a step might take another course.
    """
    name = type(model).__name__
    proof: EffectProof[_Traced] = EffectProof()
    if record.elsewhere is None:
        proof = prove(record, traced, before=recorders, who=f"the loss of {name}")
    if proof.trace is not None:
        return proof.trace
    matters = f", and this counts: {proof.why}" if proof.why else ""
    advice = old_hook(model) or (
        "draw by torch.rand, keep what changes in a buffer, or pass it in the batch, where each value that is no "
        "tensor gets a plan of its own. Only counting, timing and appending to a list are let go"
    )
    raise CaptureError(
        f"the loss of {name} may take another course at every call, and a planned step takes one: {record.why}"
        f"{matters}; {advice}"
    )


def _captured(wrapped: TracedLoss, leaves: list[Any]) -> fx.GraphModule:
    own = [(held, leaf, held[leaf]) for _, (held, leaf) in places(wrapped.model)]
    try:
        try:
            return _traced(wrapped, leaves)
        except DataDependentOutputException:
            # Libraries look at values while nobody compiles them, such as whether a mask masks.
            with exporting():
                return _traced(wrapped, leaves)
    except (CaptureError, UnsupportedOpError):
        raise
    except Exception as error:  # whatever the model's own code raises
        if isinstance(error.__cause__, CaptureError):
            raise error.__cause__ from error
        raise CaptureError(in_words(error, type(wrapped.model).__name__)) from error
    finally:
        # Where a module has two names, torch leaves what it traced in it.
        for held, leaf, tensor in own:
            held[leaf] = tensor


def _traced(wrapped: nn.Module, leaves: list[Any]) -> fx.GraphModule:
    with (
        contextlib.ExitStack() as stack,
        true_strides(),
        quick_traces(),
        own_kernels(),
        uncompiled(),
        # Without one, torch 2.14 reads the values of scalars, which may lie in a file.
        tracing(TracingContext(None)),
        # Within one, torch leaves out draws that nobody reads, after which eager draws other numbers.
        inductor_config.patch(fallback_random=True),
    ):
        if any(isinstance(module, nn.LSTM) for module in wrapped.modules()):
            # The fused kernel hands its backward pass a workspace that no trace has.
            stack.callback(torch._C._set_mkldnn_enabled, torch._C._get_mkldnn_enabled())
            torch._C._set_mkldnn_enabled(False)
        joint = aot_export_joint_with_descriptors(stack, wrapped, apart(leaves), decompositions={})
        graph_module = joint.graph_module
    assert isinstance(graph_module, fx.GraphModule)
    drop_tokens(graph_module.graph)
    return graph_module


def _read(
    graph_module: fx.GraphModule,
    wrapped: TracedLoss,
    views: Mapping[str, View],
    norms: Mapping[float, str],
    record: CaptureRecord,
) -> Joint:
    graph = graph_module.graph
    canonical, tensors = named_tensors(wrapped.model)
    bound: dict[str, str] = {}
    inputs: dict[int, str] = {}
    outside: dict[str, torch.Tensor] = {}
    for node in graph.nodes:
        if node.op != "placeholder":
            continue
        match node.meta["desc"]:
            case BufferAOTInput(target=target) if target.startswith(OUTSIDE):
                outside[node.name] = wrapped.outside[int(target.removeprefix(OUTSIDE))]
            case ParamAOTInput(target=target) | BufferAOTInput(target=target):
                bound[node.name] = canonical[target.removeprefix(MODEL)]
            case PlainAOTInput(idx=index):
                inputs[index] = node.name
            case TangentAOTInput():
                pass
            case other:
                raise CaptureError(f"the loss takes {other}, which has no place in a plan")
    num_constants = _lift_constants(graph_module, outside)
    _drop_aliases(graph)
    take_counts(graph, bound, norms)
    exact_dropout(graph)
    exact_strides(graph)
    made = _make_views(graph, bound, views)
    require_dense(graph)
    start_from_one(graph, canonical, bound, wrapped.with_gradients)
    results, gradients, mutations = joint_outputs(graph.output_node(), canonical)
    outputs, out_spec = tuple[Any, ...](results), pytree.tree_structure((0,))
    if isinstance(wrapped, TracedModel):
        names = {**bound, **{name: name for name in (*inputs.values(), *outside)}}
        results = without_copies(graph, results, names)
        outputs, out_spec = wrapped.outputs(results), wrapped.out_spec
    _require_no_views(mutations, views, made)
    graph.lint()
    return Joint(
        graph_module=graph_module,
        bound=bound,
        inputs=tuple(inputs[i] for i in sorted(inputs)),
        outside=outside,
        num_constants=num_constants,
        loss=results[0],
        outputs=outputs,
        out_spec=out_spec,
        gradients=gradients,
        mutations=mutations,
        tensors={name: tensors[name] for name in dict.fromkeys(bound.values())},
        views=made,
        record=record,
    )


def _require_no_views(
    mutations: Collection[str], views: Mapping[str, View], made: Collection[str]
) -> None:
    """Refuse a forward pass that changes what parameters are views of."""
    for name in set(mutations).intersection(views[name].owner for name in made):
        raise CaptureError(
            f"the model changes '{name}' in its forward pass, of which parameters are views; only the optimizer may "
            "change parameters"
        )


def _make_views(
    graph: fx.Graph, bound: dict[str, str], views: Mapping[str, View]
) -> dict[str, fx.Node]:
    """Let placeholders of views be views of the placeholders of their owners, taken as late as can be."""
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    whole = {bound[node.name]: node for node in reversed(placeholders) if node.name in bound}
    made: dict[str, fx.Node] = {}
    for node in placeholders:
        name = bound.get(node.name)
        if name is not None and name in views:
            del bound[node.name]
            if isinstance(views[name].tensor, nn.Parameter):
                layout = views[name].layout
                args = (whole[views[name].owner], layout.size, layout.stride, layout.offset)
                with graph.inserting_after(placeholders[-1]):
                    made[name] = graph.call_function(torch.ops.aten.as_strided.default, args)
                made[name].meta["val"] = node.meta["val"]
                node.replace_all_uses_with(made[name])
            graph.erase_node(node)
        elif name is not None and node is not whole[name] and not node.users:
            del bound[node.name]
            graph.erase_node(node)
    _sink_views(graph, bound)
    return made


def _sink_views(graph: fx.Graph, bound: Mapping[str, str]) -> None:
    """Take views of parameters and buffers when they are first read, so that these need not be there before."""
    owners = bound_aliases(graph, bound)
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and owners[node] and node.users:
            first = min(node.users)
            if first.op == "call_function":
                first.prepend(node)


def _lift_constants(graph_module: fx.GraphModule, outside: dict[str, torch.Tensor]) -> int:
    """Make tensors in attributes of the graph, which the loss makes of numbers, inputs; return their number."""
    graph = graph_module.graph
    first = next(iter(graph.nodes))
    lifted: dict[str, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "get_attr":
            continue
        target = str(node.target)
        if target not in lifted:
            value = operator.attrgetter(target)(graph_module)
            if not isinstance(value, torch.Tensor):
                raise UnsupportedOpError(_NO_TENSOR.format(type(value).__name__))
            with graph.inserting_before(first):
                lifted[target] = graph.placeholder(f"constant_{len(lifted)}")
            lifted[target].meta["val"] = node.meta.get("val", value)
            outside[lifted[target].name] = value.detach()
        node.replace_all_uses_with(lifted[target])
        graph.erase_node(node)
    return len(lifted)


def _drop_aliases(graph: fx.Graph) -> None:
    """Remove what only hides a tensor from autograd."""
    for node in list(graph.nodes):
        if node.target in _NO_OPS and node.users:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
