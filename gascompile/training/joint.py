"""Joint graph: forward and backward of a loss as one straight line of ATen ops, the ones that eager runs.

Traced by AOTAutograd over fake tensors: nothing is computed and no weight is copied. What the backward pass
starts from, a one, becomes an op; tensors in plain attributes become inputs.
"""

from __future__ import annotations

import contextlib
import operator
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch._functorch._aot_autograd.descriptors import (
    BufferAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from torch.utils import _pytree as pytree

from gascompile.errors import CaptureError, UnsupportedOpError

LossFunction = Callable[[nn.Module, Any], torch.Tensor]
_PREFIX = "model."
_NO_OPS = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}


@dataclass(frozen=True, slots=True, kw_only=True)
class Joint:
    """Forward and backward pass."""

    graph_module: fx.GraphModule
    bound: Mapping[str, str]
    """Placeholder -> name of the parameter, buffer or constant; tied ones have the first name."""
    inputs: tuple[str, ...]
    """Placeholders of the batch's leaves, in their order."""
    loss: fx.Node
    gradients: Mapping[str, tuple[fx.Node, ...]]
    """Parameter -> its gradient, in parts where it is used under several names."""
    mutations: Mapping[str, fx.Node]
    """Buffer -> its value after the forward pass."""
    tensors: Mapping[str, torch.Tensor]
    """What ``bound`` names: parameters and buffers of the model, constants of its code."""


class _Loss(nn.Module):
    """A loss over the flat leaves of a batch."""

    def __init__(self, model: nn.Module, loss_fn: LossFunction, spec: pytree.TreeSpec) -> None:
        super().__init__()
        self.model = model
        self._loss_fn = loss_fn
        self._spec = spec

    def forward(self, *leaves: Any) -> torch.Tensor:
        loss: Any = self._loss_fn(self.model, pytree.tree_unflatten(leaves, self._spec))
        if not isinstance(loss, torch.Tensor) or loss.dim() or not loss.is_floating_point():
            found = (
                f"{tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            )
            raise CaptureError(
                f"loss_fn returned {found}; it has to return one floating-point scalar tensor, such as a mean"
            )
        if not loss.requires_grad:
            raise CaptureError(
                "the loss does not depend on any parameter that requires a gradient; leave out no_grad() and detach()"
            )
        # A loss that is a view, or a parameter itself, would come out as what it is a view of.
        return loss.clone()


def capture_joint(model: nn.Module, loss_fn: LossFunction, batch: Any) -> Joint:
    """Trace ``loss_fn(model, batch)`` and its gradients.

    Raises:
        CaptureError: the loss is no scalar, depends on no parameter, or cannot be traced.
        UnsupportedOpError: the model has hooks or dropout that no trace shows.
    """
    _refuse_untraceable(model)
    leaves, spec = batch_leaves(batch), pytree.tree_structure(batch)
    wrapped = _Loss(model, loss_fn, spec)
    try:
        try:
            graph_module = _traced(wrapped, leaves)
        except DataDependentOutputException:
            # Libraries look at values while nobody compiles them, for example whether a mask masks anything.
            with _as_compiled():
                graph_module = _traced(wrapped, leaves)
    except CaptureError:
        raise
    except Exception as error:  # whatever the model's own code raises
        if isinstance(error.__cause__, CaptureError):
            raise error.__cause__ from error
        raise CaptureError(_in_words(error, type(model).__name__)) from error
    return _read(graph_module, model)


def _refuse_untraceable(model: nn.Module) -> None:
    """Refuse what a trace would leave out without a word."""
    for name, module in model.named_modules():
        if isinstance(module, nn.RNNBase) and module.training and module.dropout:
            raise UnsupportedOpError(
                f"dropout between the layers of '{name or type(module).__name__}' cannot be traced; set its dropout "
                "to 0 and put nn.Dropout between layers of their own"
            )
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise UnsupportedOpError(
                f"'{name}' has a gradient hook, which a planned step does not call; remove it, or clip by max_grad_norm"
            )


def batch_leaves(batch: Any) -> list[Any]:
    """Return a batch's leaves, its tensors contiguous, as steps are planned for them."""
    return [x.contiguous() if isinstance(x, torch.Tensor) else x for x in pytree.tree_leaves(batch)]


def _traced(wrapped: nn.Module, leaves: list[Any]) -> fx.GraphModule:
    with contextlib.ExitStack() as stack:
        if any(isinstance(module, nn.LSTM) for module in wrapped.modules()):
            # The fused kernel hands its backward pass a workspace that no trace has.
            stack.callback(torch._C._set_mkldnn_enabled, torch._C._get_mkldnn_enabled())
            torch._C._set_mkldnn_enabled(False)
        joint = aot_export_joint_with_descriptors(stack, wrapped, tuple(leaves), decompositions={})
        graph_module = joint.graph_module
    assert isinstance(graph_module, fx.GraphModule)
    return graph_module


@contextlib.contextmanager
def _as_compiled() -> Iterator[None]:
    """Let model code see that it is being exported, as ``torch.compiler.is_exporting`` tells it."""
    before = torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag
    torch.compiler._is_compiling_flag = torch.compiler._is_exporting_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag = before


def _in_words(error: Exception, model: str) -> str:
    """Return what went wrong, where in the user's code, and the way out."""
    reason = str(error).split("\n\n", maxsplit=1)[0] or type(error).__name__
    if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
        reason = (
            f"it depends on values of tensors ({reason}), by .item(), by an if or a loop over them, or by a mask as "
            "an index; write it with torch.where, so that the same ops run at every step"
        )
    return f"cannot trace the loss of {model}{_place(error)}: {reason}"


def _place(error: BaseException) -> str:
    """Return the innermost line of the traceback that is neither torch's nor ours."""
    ours = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent))
    lines = [
        f" at {frame.filename}:{frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((*ours, "<"))
    ]
    return lines[-1] if lines else ""


def own_storages(model: nn.Module) -> None:
    """Let every parameter and buffer have memory of its own, dense and from its beginning, as moves take it.

    Raises:
        CaptureError: a parameter has no values, or shares memory with another tensor.
        UnsupportedOpError: a parameter is not on the CPU.
    """
    _, tensors = _named_tensors(model)
    owners: dict[int, str] = {}
    for name, tensor in tensors.items():
        if tensor.is_meta:
            raise CaptureError(
                f"'{name}' is on the meta device and has no values; call model.to_empty(device='cpu') and load "
                "a state_dict before compile_step"
            )
        if tensor.device.type != "cpu":
            raise UnsupportedOpError(f"'{name}' is on {tensor.device}; move the model to the CPU")
        storage = tensor.untyped_storage()
        other = owners.setdefault(storage._cdata, name)
        if other != name and isinstance(tensor, nn.Parameter):
            raise CaptureError(
                f"parameters '{other}' and '{name}' share memory; tie them by assigning the same nn.Parameter"
            )
        is_dense = tensor.is_contiguous() or tensor.permute(_by_stride(tensor)).is_contiguous()
        if other != name or not is_dense or storage.nbytes() != tensor.nbytes:
            tensor.data = tensor.detach().clone(memory_format=torch.contiguous_format)


def _by_stride(tensor: torch.Tensor) -> list[int]:
    return sorted(range(tensor.dim()), key=lambda d: -tensor.stride()[d])


def _read(graph_module: fx.GraphModule, model: nn.Module) -> Joint:
    graph = graph_module.graph
    canonical, tensors = _named_tensors(model)
    bound: dict[str, str] = {}
    inputs: dict[int, str] = {}
    tangents: list[fx.Node] = []
    for node in graph.nodes:
        if node.op != "placeholder":
            continue
        match node.meta["desc"]:
            case ParamAOTInput(target=target) | BufferAOTInput(target=target):
                bound[node.name] = canonical[target.removeprefix(_PREFIX)]
            case PlainAOTInput(idx=index):
                inputs[index] = node.name
            case TangentAOTInput():
                tangents.append(node)
            case other:
                raise CaptureError(f"the loss takes {other}, which has no place in a plan")
    _lift_constants(graph_module, bound, tensors)
    _drop_aliases(graph)
    for node in graph.nodes:
        if "_sparse_" in str(node.target):
            raise CaptureError(
                "a gradient is sparse, which has no place in a plan; pass sparse=False"
            )
    loss, _, _ = _outputs(graph.output_node(), canonical)
    for tangent in tangents:
        with graph.inserting_after(loss):
            one = graph.call_function(torch.ops.aten.ones_like.default, (loss,))
        one.meta["val"] = loss.meta["val"]
        tangent.replace_all_uses_with(one)
        graph.erase_node(tangent)
    # A tangent may have been a gradient itself.
    loss, gradients, mutations = _outputs(graph.output_node(), canonical)
    graph.lint()
    return Joint(
        graph_module=graph_module,
        bound=bound,
        inputs=tuple(inputs[i] for i in sorted(inputs)),
        loss=loss,
        gradients=gradients,
        mutations=mutations,
        tensors={name: tensors[name] for name in dict.fromkeys(bound.values())},
    )


def _named_tensors(model: nn.Module) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """Return the first name of the same tensor for every name, and the tensors by it."""
    first: dict[int, str] = {}
    canonical: dict[str, str] = {}
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        canonical[name] = first.setdefault(id(tensor), name)
        tensors.setdefault(canonical[name], tensor)
    return canonical, tensors


def _outputs(
    output: fx.Node, canonical: Mapping[str, str]
) -> tuple[fx.Node, dict[str, tuple[fx.Node, ...]], dict[str, fx.Node]]:
    """Return the loss, and what comes out for parameters and buffers by name."""
    loss: fx.Node | None = None
    gradients: dict[str, tuple[fx.Node, ...]] = {}
    mutations: dict[str, fx.Node] = {}
    (values,) = output.args
    assert isinstance(values, (tuple, list))
    for value, description in zip(values, output.meta["desc"], strict=True):
        match description:
            case PlainAOTOutput():
                assert isinstance(value, fx.Node)
                loss = value
            case GradAOTOutput(grad_of=ParamAOTInput(target=target)):
                if isinstance(value, fx.Node):
                    name = canonical[target.removeprefix(_PREFIX)]
                    gradients[name] = (*gradients.get(name, ()), value)
            case InputMutationAOTOutput(mutated_input=BufferAOTInput(target=target)):
                assert isinstance(value, fx.Node)
                mutations[canonical[target.removeprefix(_PREFIX)]] = value
            case GradAOTOutput() | None:
                pass  # of the batch: nobody asked for it
            case InputMutationAOTOutput(mutated_input=ParamAOTInput(target=target)):
                raise CaptureError(
                    f"the model changes its parameter '{target.removeprefix(_PREFIX)}' in its forward pass; only the "
                    "optimizer may change parameters, so make it a buffer or change it between steps"
                )
            case InputMutationAOTOutput():
                raise CaptureError("the loss changes its batch in place; let it change a clone")
            case other:
                raise CaptureError(f"the loss also returns {other}, which has no place in a plan")
    assert loss is not None, "what is traced returns its loss"
    return loss, gradients, mutations


def _lift_constants(
    graph_module: fx.GraphModule, bound: dict[str, str], tensors: dict[str, torch.Tensor]
) -> None:
    """Make tensors in attributes of the graph inputs of it."""
    graph = graph_module.graph
    first = next(iter(graph.nodes))
    lifted: dict[str, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "get_attr":
            continue
        target = str(node.target)
        if target not in lifted:
            value = operator.attrgetter(target)(graph_module)
            name = f"constant:{target}"
            with graph.inserting_before(first):
                lifted[target] = graph.placeholder(f"constant_{len(lifted)}")
            lifted[target].meta["val"] = node.meta.get("val", value)
            bound[lifted[target].name] = name
            tensors[name] = value.detach()
        node.replace_all_uses_with(lifted[target])
        graph.erase_node(node)


def _drop_aliases(graph: fx.Graph) -> None:
    """Remove what only hides a tensor from autograd."""
    for node in list(graph.nodes):
        if node.target in _NO_OPS and node.users:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
