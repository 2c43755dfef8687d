"""Traced call: the forward pass of a model alone, with all that it returns, as a module that AOTAutograd can trace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from gascompile.core.errors import CaptureError
from gascompile.core.model_libraries import register_pytrees
from gascompile.passes.graph.bound_aliases import bound_aliases
from gascompile.training.capture.traced_loss import TracedLoss

_CONSTANTS = (type(None), bool, int, float, str)
"""What may stand beside tensors in what a model returns."""


def call_of(model: nn.Module, call: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
    """Return what ``model`` returns; a loss function whose batch are the arguments of a call."""
    args, kwargs = call
    return model(*args, **kwargs)


class TracedModel(TracedLoss):
    """A call over the flat leaves of its arguments, without gradients."""

    out_spec: pytree.TreeSpec
    """The structure of what the model returns; there once it has been traced."""
    leaves: list[Any]
    """Its leaves that are no tensors, and ``None`` where one is."""
    is_tensor: list[bool]

    def forward(self, *leaves: Any) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        """Return the tensors of what the model returns, each a copy: none is the view of another one in a trace."""
        register_pytrees()
        with torch.no_grad():
            result = self.computed(leaves)
            leaves_out, self.out_spec = pytree.tree_flatten(result)
            for leaf in leaves_out:
                if not isinstance(leaf, (torch.Tensor, *_CONSTANTS)):
                    raise CaptureError(
                        f"the model returns a {type(leaf).__module__}.{type(leaf).__qualname__}, whose parts are not "
                        "known; let it return tensors in tuples, lists, dicts or outputs of transformers"
                    )
            tensors = [leaf for leaf in leaves_out if isinstance(leaf, torch.Tensor)]
            if not tensors:
                raise CaptureError("the model returns no tensor, so there is nothing to compute")
            _require_written(self.out_spec)
            self.leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves_out]
            self.is_tensor = [isinstance(leaf, torch.Tensor) for leaf in leaves_out]
            return tuple(tensor.clone() for tensor in tensors)

    def outputs(self, tensors: list[fx.Node]) -> tuple[fx.Node | Any, ...]:
        """Return the flat outputs of a program, of which ``tensors`` are those that it computes."""
        left = iter(tensors)
        return tuple(
            next(left) if is_tensor else leaf
            for is_tensor, leaf in zip(self.is_tensor, self.leaves, strict=True)
        )


def _require_written(spec: pytree.TreeSpec) -> None:
    """Refuse a structure that no file can hold."""
    try:
        pytree.treespec_dumps(spec)
    except NotImplementedError as error:
        raise CaptureError(
            f"the model returns a structure that cannot be kept ({error}); let it return tensors in tuples, lists, "
            "dicts or outputs of transformers"
        ) from error


def without_copies(
    graph: fx.Graph, outputs: list[fx.Node], names: Mapping[str, str]
) -> list[fx.Node]:
    """Return ``outputs``, copies all of them, without those that are for nothing.

    A result that is whole in memory of its own is the caller's as it is. ``names`` are those of placeholders.
    """
    owners = bound_aliases(graph, names)
    results: list[fx.Node] = []
    for copied in outputs:
        (source,) = copied.all_input_nodes
        if owners[source] or not _is_whole(source):
            results.append(copied)
            continue
        copied.replace_all_uses_with(source)
        graph.erase_node(copied)
        results.append(source)
    return results


def _is_whole(node: fx.Node) -> bool:
    """Return whether a value fills the memory that it lies in."""
    value = node.meta.get("val")
    return (
        node.op == "call_function"
        and isinstance(value, torch.Tensor)
        and value.untyped_storage().nbytes() == value.numel() * value.itemsize
    )
