"""Joint outputs: what the outputs of a traced forward and backward pass are, and what the latter starts from."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import fx
from torch._functorch._aot_autograd.descriptors import (
    BufferAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)

from gascompile.core.errors import CaptureError
from gascompile.training.capture.traced_loss import MODEL, OUTSIDE


def joint_outputs(
    output: fx.Node, canonical: Mapping[str, str]
) -> tuple[list[fx.Node], dict[str, fx.Node], dict[str, fx.Node]]:
    """Return what the module returns, and what comes out for parameters and buffers by name.

    Raises:
        CaptureError: the trace changes or returns what has no place in a plan.
    """
    results: list[fx.Node] = []
    gradients: dict[str, fx.Node] = {}
    mutations: dict[str, fx.Node] = {}
    (values,) = output.args
    assert isinstance(values, (tuple, list))
    for value, description in zip(values, output.meta["desc"], strict=True):
        match description:
            case PlainAOTOutput():
                assert isinstance(value, fx.Node)
                results.append(value)
            case GradAOTOutput(grad_of=ParamAOTInput(target=target)):
                if isinstance(value, fx.Node):
                    gradients[canonical[target.removeprefix(MODEL)]] = value
            case InputMutationAOTOutput(mutated_input=BufferAOTInput(target=target)) if (
                target.startswith(OUTSIDE)
            ):
                raise CaptureError(
                    "loss_fn changes a tensor from outside the model in place; register it as a buffer of the model"
                )
            case InputMutationAOTOutput(mutated_input=BufferAOTInput(target=target)):
                assert isinstance(value, fx.Node)
                mutations[canonical[target.removeprefix(MODEL)]] = value
            case GradAOTOutput() | None:
                pass  # of the batch: nobody asked for it
            case InputMutationAOTOutput(mutated_input=ParamAOTInput(target=target)):
                raise CaptureError(
                    f"the model changes its parameter '{target.removeprefix(MODEL)}' in its forward pass; only the "
                    "optimizer may change parameters, so make it a buffer or change it between steps"
                )
            case InputMutationAOTOutput():
                raise CaptureError("the loss changes its batch in place; let it change a clone")
            case other:
                raise CaptureError(f"the loss also returns {other}, which has no place in a plan")
    assert results, "what is traced returns something"
    return results, gradients, mutations


def require_dense(graph: fx.Graph) -> None:
    """Refuse sparse gradients."""
    if any("_sparse_" in str(node.target) for node in graph.nodes):
        raise CaptureError("a gradient is sparse, which has no place in a plan; pass sparse=False")


def start_from_one(
    graph: fx.Graph,
    canonical: Mapping[str, str],
    bound: Mapping[str, str],
    written: Collection[str],
) -> None:
    """Make what the backward pass starts from an op; it may be a gradient itself.

    Args:
        bound: names of parameters and buffers by their placeholders.
        written: buffers to which values with gradients are written.

    Raises:
        CaptureError: it starts from more than the loss, or goes on into the step before.
    """
    (loss, *_), _, _ = joint_outputs(graph.output_node(), canonical)
    _require_no_history(loss, {held: name for held, name in bound.items() if name in written})
    starts = [
        node
        for node in graph.nodes
        if node.op == "placeholder" and isinstance(node.meta.get("desc"), TangentAOTInput)
    ]
    if len(starts) > 1:
        raise CaptureError(
            "the backward pass starts from more than the loss: a buffer keeps values with gradients. Write "
            "buffer.copy_(value.detach())"
        )
    for node in starts:
        with graph.inserting_after(loss):
            one = graph.call_function(torch.ops.aten.ones_like.default, (loss,))
        one.meta["val"] = loss.meta["val"]
        node.replace_all_uses_with(one)
        graph.erase_node(node)


def _require_no_history(loss: fx.Node, written: Mapping[str, str]) -> None:
    """Refuse a loss that reads what the step before has written with gradients.

    Eager's backward pass goes on from there into that step, or raises as its values are gone.
    """
    seen, todo = {loss}, [loss]
    while todo:
        node = todo.pop()
        if node.op == "placeholder" and node.name in written:
            raise CaptureError(
                f"the loss reads '{written[node.name]}', a buffer to which the step before has written values with "
                "gradients, so that eager's backward pass would go into that step. Write value.detach() there"
            )
        todo += [source for source in node.all_input_nodes if source not in seen]
        seen.update(node.all_input_nodes)
