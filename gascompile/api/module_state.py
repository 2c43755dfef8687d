"""State dicts of compiled models: values that are in memory as they are, all others as maps of their files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gascompile.bundles.bundle import Bundle
from gascompile.capture.fake_twin import canonical_names
from gascompile.core.errors import CheckpointError, CompiledModelError
from gascompile.core.model_libraries import rebuild_buffers
from gascompile.weights.checkpoint import Checkpoint
from gascompile.weights.values import stored_value

SHARED = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
"""What a compiled model has in common with the model it was made from."""


def stored_state(
    model: nn.Module, open_checkpoint: Callable[[], Checkpoint | None], *args: Any, **kwargs: Any
) -> Any:
    """Return ``model.state_dict(...)`` with the values of parameters that have none in memory.

    Raises:
        CheckpointError: a value lies in no file, or the file cannot be read.
    """
    destination = args[0] if args else kwargs.get("destination")
    prefix = args[1] if len(args) > 1 else kwargs.get("prefix", "")
    before = set(destination or ())
    state = model.state_dict(*args, **kwargs)
    missing = [n for n, t in state.items() if n not in before and _has_no_value(t)]
    if not missing:
        return state
    values = _Values(model, open_checkpoint())
    for name in missing:
        state[name] = values.of(name.removeprefix(prefix), state[name])
    return state


def saved_state(
    bundle: Bundle,
    destination: dict[str, Any] | None = None,
    prefix: str = "",
    keep_vars: bool = False,
) -> dict[str, Any]:
    """Return the values of a bundle by name, in ``destination``.

    Raises:
        CheckpointError: a file cannot be read.
        CompiledModelError: a weight is there in a packed form alone.
    """
    state = {} if destination is None else destination
    for name, value in bundle.held.items():
        state[prefix + name] = value if keep_vars else value.detach()
    for name, source in bundle.weights.sources.items():
        if source.dtype != bundle.program.bound[name].dtype or name in bundle.program.forms:
            raise CompiledModelError(
                f"the bundle holds '{name}' as it moves, as {source.dtype}, and not as it was; take the state_dict of "
                "the model that it was made from"
            )
        state[prefix + name] = stored_value(source)
    return state


class _Values:
    """Values of parameters on the meta device."""

    def __init__(self, model: nn.Module, checkpoint: Checkpoint | None) -> None:
        self._sources = dict(checkpoint.sources) if checkpoint is not None else {}
        for name, first in canonical_names(model).items():
            if name in self._sources:
                self._sources.setdefault(first, self._sources[name])
        self._first = canonical_names(model)
        self._rebuilt = rebuild_buffers(model)
        self._given: dict[str, torch.Tensor] = {}

    def of(self, name: str, like: torch.Tensor) -> torch.Tensor:
        first = self._first.get(name, name)
        if first not in self._given:
            self._given[first] = self._read(name, first, like)
        return self._given[first]

    def _read(self, name: str, first: str, like: torch.Tensor) -> torch.Tensor:
        source = self._sources.get(name) or self._sources.get(first)
        if source is None:
            if name in self._rebuilt:
                return self._rebuilt[name]
            raise CheckpointError(f"'{name}' is on the meta device, and no checkpoint holds it")
        value = stored_value(source)
        if value.shape != like.shape:
            raise CheckpointError(
                f"'{name}' has the shape {list(like.shape)}, stored is {list(value.shape)}"
            )
        return value.to(like.dtype)


def _has_no_value(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "meta"
