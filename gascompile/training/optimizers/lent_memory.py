"""Lent memory: what an optimizer's own step finds parameters and gradients in, and what it leaves of that.

The memory is the plan's and has other tensors between updates. So values that a step put elsewhere come back into it,
and what the optimizer keeps of it becomes a copy where that is the same in eager, and is refused elsewhere.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from gascompile.core.errors import UnsupportedOpError
from gascompile.core.signature import same_memory
from gascompile.training.state.open_tensors import OpenTensor


class _Kept(NamedTuple):
    """A tensor that an optimizer keeps."""

    tensor: torch.Tensor
    words: str
    entry: dict[str, Any] | None = None
    """Of the state, where it can be replaced."""
    key: str = ""


def require_apart(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that keeps the memory of parameters before its first step.

    Raises:
        UnsupportedOpError: it does; parameters lie elsewhere while a step is open.
    """
    every = {
        id(own): own
        for group in optimizer.param_groups
        for own in group["params"]
        if not isinstance(own, OpenTensor)
    }
    kept = _kept(optimizer, {*every})
    shared = same_memory([*every.values(), *(one.tensor for one in kept)])
    for one, (first, _) in zip(kept, shared[len(every) :], strict=True):
        if first < len(every):
            shape = list([*every.values()][first].shape)
            raise UnsupportedOpError(
                f"the {type(optimizer).__name__} keeps the memory of a parameter of {shape} in its {one.words}, and "
                "parameters lie elsewhere while a step is open; let it keep a copy, as of clone()"
            )


def take_back(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, torch.Tensor],
    lent: Mapping[str, torch.Tensor],
    gradients: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Let lent memory have all values of parameters, and nobody else have it.

    Returns:
        What the step has put parameters in elsewhere, which nobody may have once they have left it.

    Args:
        optimizer: has taken a step.
        parameters: as the step left them, by name.
        lent: the memory that each was in.
        gradients: likewise.

    Raises:
        UnsupportedOpError: a parameter has another shape or dtype now, or the optimizer keeps the memory of one.
    """
    kind = type(optimizer).__name__
    moved = {
        name: own.data
        for name, own in parameters.items()
        if own.data_ptr() != lent[name].data_ptr() or own.stride() != lent[name].stride()
    }
    for name, data in moved.items():
        if (data.shape, data.dtype) != (lent[name].shape, lent[name].dtype):
            raise UnsupportedOpError(
                f"step() of {kind} gives '{name}' another shape or dtype, which no plan follows; keep "
                f"{list(lent[name].shape)} of {lent[name].dtype}"
            )
    _require_untied(kind, {name: moved.get(name, memory) for name, memory in lent.items()}, lent)
    ended = [*((name, lent[name]) for name in moved), *gradients.items()]
    _require_none_kept(optimizer, [*{**lent, **moved}.items()], ended, parameters)
    for name, data in {name: data.clone() for name, data in moved.items()}.items():
        lent[name].copy_(data)
    every = [*lent.values(), *gradients.values()]
    return {name: data for name, data in moved.items() if not _lies_in(data, every)}


def _require_untied(
    kind: str, now: Mapping[str, torch.Tensor], before: Mapping[str, torch.Tensor]
) -> None:
    """Refuse a step that puts parameters into each other's memory: from then on they would be one in eager."""
    moved = {name for name in now if now[name] is not before[name]}
    by_place = sorted((tensor.data_ptr(), name) for name, tensor in now.items() if tensor.numel())
    for number, (_, name) in enumerate(by_place if moved else ()):
        end = _end(now[name])
        for begin, other in by_place[number + 1 :]:
            if begin >= end:
                break
            is_new = not moved.isdisjoint((name, other))
            if is_new and not _overlap(before[name], before[other]):
                raise UnsupportedOpError(
                    f"step() of {kind} gives '{name}' memory of '{other}', and which parameters are one is settled "
                    "when a step is compiled; give it a copy, as of clone()"
                )


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether the memory that one tensor spans reaches into that of another."""
    if not one.numel() or not other.numel():
        return False
    return one.data_ptr() < _end(other) and other.data_ptr() < _end(one)


def _end(tensor: torch.Tensor) -> int:
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * step for size, step in steps)
    return tensor.data_ptr() + (last + 1) * tensor.itemsize


def _lies_in(tensor: torch.Tensor, every: Sequence[torch.Tensor]) -> bool:
    place = tensor.untyped_storage()._cdata
    return any(place == memory.untyped_storage()._cdata for memory in every)


def _require_none_kept(
    optimizer: torch.optim.Optimizer,
    alive: Sequence[tuple[str, torch.Tensor]],
    ended: Sequence[tuple[str, torch.Tensor]],
    parameters: Mapping[str, torch.Tensor],
) -> None:
    """Refuse what is kept of parameters' own memory, and copy what is kept of memory that eager would not reuse."""
    kept = _kept(optimizer, {id(own) for own in parameters.values()})
    names, lent = zip(*alive, *ended, strict=True) if alive else ((), ())
    shared = same_memory([*lent, *(one.tensor for one in kept)])
    copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for one, (first, _) in zip(kept, shared[len(names) :], strict=True):
        if first >= len(names):
            continue
        tensor, copy = copies.setdefault(first, (one.tensor, one.tensor.clone()))
        if first < len(alive) or one.entry is None or tensor is not one.tensor:
            raise _refusal(optimizer, names[first], f" in its {one.words}")
        one.entry[one.key] = copy


def num_holders(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Return how many have the memory that each tensor lies in."""
    return {
        name: torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
        for name, tensor in tensors.items()
    }


def num_alone(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Return what ``num_holders`` says where nobody but these tensors has their memory."""
    places = {name: tensor.untyped_storage()._cdata for name, tensor in tensors.items()}
    counts = Counter(places.values())
    # One more has it while it is asked.
    return {name: counts[place] + 1 for name, place in places.items()}


def require_returned(
    optimizer: torch.optim.Optimizer, lent: Mapping[str, torch.Tensor], before: Mapping[str, int]
) -> None:
    """Refuse a step after which anybody has memory that was lent, wherever that is kept.

    Args:
        optimizer: has taken the step.
        lent: nobody should have it any more.
        before: ``num_holders`` of before.

    Raises:
        UnsupportedOpError: somebody has.
    """
    if num_holders(lent) == before:
        return
    # Frames and cycles that nobody sees may have had it.
    gc.collect()
    now = num_holders(lent)
    name = next((name for name in lent if now[name] > before[name]), None)
    if name is not None:
        raise _refusal(optimizer, name, "")


def _refusal(optimizer: torch.optim.Optimizer, name: str, where: str) -> UnsupportedOpError:
    return UnsupportedOpError(
        f"step() of {type(optimizer).__name__} keeps the memory of '{name}'{where}, where other tensors lie between "
        "updates; let it keep a copy, as of clone()"
    )


def _kept(optimizer: torch.optim.Optimizer, known: set[int]) -> list[_Kept]:
    """Return the tensors that an optimizer, and those that it has in turn, keep beside parameters."""
    found: list[_Kept] = []
    waiting, seen = [optimizer], {id(optimizer)}
    while waiting:
        own = waiting.pop()
        for entry in own.state.values():
            for key, value in entry.items() if isinstance(entry, dict) else ():
                if _is_apart(value, known):
                    found.append(_Kept(value, f"state as '{key}'", entry, key))
        direct = {id(one.tensor) for one in found}
        for name, table in vars(own).items():
            for value in pytree.tree_leaves(table):
                if isinstance(value, torch.optim.Optimizer) and id(value) not in seen:
                    seen.add(id(value))
                    waiting.append(value)
                elif _is_apart(value, known | direct):
                    found.append(_Kept(value, f"'{name}'"))
    return found


def _is_apart(value: object, known: set[int]) -> bool:
    """Return whether it is a tensor that may lie in any memory: open ones have none."""
    return (
        isinstance(value, torch.Tensor)
        and not isinstance(value, OpenTensor)
        and id(value) not in known
    )
