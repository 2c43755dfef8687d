"""Adapter names: where the tensors of a base model went when adapters were put around its layers.

As peft has it, a layer becomes the ``base_layer`` of one that adds to it, and a layer that is trained as a whole
the ``original_module`` beside its copy. Checkpoints of the base know nothing of either.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import nn

from gascompile.core.errors import CheckpointError
from gascompile.core.sources import WeightSource
from gascompile.weights.checkpoint import Checkpoint

_ROOT = "base_model.model."
_WRAPPED = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)\.")


def base_name(name: str) -> str:
    """Return the name that a tensor has in a model without adapters."""
    return _WRAPPED.sub(".", name)


def with_base_names(model: nn.Module, checkpoint: Checkpoint) -> Checkpoint:
    """Return a base model's checkpoint with the names of a model with adapters, and any other as it is.

    Raises:
        CheckpointError: an adapter has no values.
    """
    source_of, moved = dict(checkpoint.sources), set()
    tensors = dict(_named_tensors(model))
    for name, tensor in tensors.items():
        if name in source_of:
            continue
        plain = base_name(name)
        source = source_of.get(plain) or checkpoint.sources.get(plain.removeprefix(_ROOT))
        is_base = plain != name or name.startswith(_ROOT)
        # A copy that is trained, or was, has values of its own.
        if source is not None and is_base and (tensor.is_meta or ".modules_to_save." not in name):
            source_of[name] = _renamed(source, name)
            moved.add(source.name)
        elif plain == name and tensor.is_meta and _is_added(name, tensors):
            raise CheckpointError(
                f"the adapter's '{name}' is on the meta device, and the checkpoint of the base model has no values of "
                "it; give it some before: module.to_empty(device='cpu') and, of peft, reset_lora_parameters(adapter, "
                "True), or load_state_dict(..., assign=True)"
            )
    sources = {name: s for name, s in source_of.items() if name in tensors or name not in moved}
    return replace(checkpoint, sources=sources)


def _is_added(name: str, names: Iterable[str]) -> bool:
    """Return whether a tensor lies beside the layer that an adapter was put around."""
    path = name.split(".")
    return any(
        other.startswith(".".join(path[:depth]) + ".base_layer.")
        for depth in range(1, len(path) - 1)
        for other in names
    )


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _renamed(source: WeightSource, name: str) -> WeightSource:
    return replace(source, name=name)
