"""Open optimizer: its states while a step has its moments are whole, for who saves or loads them in torch's way."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from gascompile.core.errors import CheckpointError
from gascompile.core.machinery import Machinery

State = dict[str, Any]
_is_own: ContextVar[bool] = ContextVar("_is_own", default=False)
"""The step itself asks, for what the optimizer has beside its moments."""


class OpenOptimizer(Machinery):
    """Hooks of an optimizer whose moments a step has, until ``close``."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        whole: Callable[[State], State],
        take: Callable[[State], State],
        moments: Callable[[], Mapping[torch.Tensor, State]],
        settle: Callable[[], object],
    ) -> None:
        """Add the hooks.

        Args:
            optimizer: without its moments.
            whole: adds them to its state.
            take: takes them from a state and returns the rest.
            moments: returns copies by parameter, for who copies or pickles the optimizer itself.
            settle: blocks while moments go back into the optimizer, whose asker was interrupted.
        """

        def saved(own: torch.optim.Optimizer, state: State) -> State | None:
            if _is_own.get():
                return None
            self._settle(settle)
            return listed(own) if self._is_closed else whole(state)

        def loaded(_: torch.optim.Optimizer, state: State) -> State | None:
            if _is_own.get():
                return None
            self._settle(settle)
            return None if self._is_closed else take(state)

        def copied() -> State:
            self._settle(settle)
            state: State = type(optimizer).__getstate__(optimizer)
            if self._is_closed:
                return state
            return {**state, "state": defaultdict(dict, {**optimizer.state, **moments()})}

        # Copy and pickle ask the object itself for it, before its class.
        vars(optimizer)["__getstate__"] = copied
        self._optimizer = optimizer
        self._is_closed = self._is_settling = False
        self._handles = [
            optimizer.register_state_dict_post_hook(saved),
            optimizer.register_load_state_dict_pre_hook(loaded),
        ]

    def close(self) -> None:
        """Remove the hooks; idempotent."""
        self._is_closed = True
        vars(self._optimizer).pop("__getstate__", None)
        if self._is_settling:
            # Torch is going through the hooks: what is left of them does nothing.
            return
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _settle(self, settle: Callable[[], object]) -> None:
        self._is_settling = True
        try:
            settle()
        finally:
            self._is_settling = False


@contextmanager
def _own() -> Iterator[None]:
    token = _is_own.set(True)
    try:
        yield
    finally:
        _is_own.reset(token)


def listed(optimizer: torch.optim.Optimizer) -> State:
    """Return the state that is in the optimizer, without what a step has of it."""
    with _own():
        return optimizer.state_dict()


def restore(optimizer: torch.optim.Optimizer, state: State) -> None:
    """Load a state that leaves out what a step has."""
    with _own():
        optimizer.load_state_dict(state)


def plain_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group as a file has it: numbers in the place of tensors, which may be parts of tuples."""
    return {key: _plain(value) for key, value in group.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def group_of_file(group: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group of a file as torch has it: tensors, lists and tuples where ``own``, the group of now, has such.

    Lists that it does not have are tuples, as most of torch's are.

    Raises:
        CheckpointError: a value cannot be what the group of now has.
    """
    lists: dict[str, list[Any]] = {"params": [], "param_names": []}
    return {key: _like(value, own.get(key, lists.get(key, ()))) for key, value in group.items()}


def _like(value: Any, own: Any) -> Any:
    if isinstance(own, torch.Tensor):
        try:
            made = torch.tensor(value, dtype=own.dtype, device=own.device)
        except (TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"the optimizer has a tensor where the checkpoint has {value!r}; make the optimizer as it was"
            ) from error
        return made
    if not isinstance(value, list):
        return value
    parts = own if isinstance(own, (list, tuple)) and len(own) == len(value) else [()] * len(value)
    items = [_like(*pair) for pair in zip(value, parts, strict=True)]
    return items if isinstance(own, list) else tuple(items)
