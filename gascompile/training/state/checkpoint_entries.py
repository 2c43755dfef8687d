"""Checkpoint entries: which tensors of a run a checkpoint has, and where each one's value is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from gascompile.training.optimizers.slots import PART, TOTAL, StateTile
from gascompile.training.state.tensor_files import Entry, Own, joined, made_of, of_tensor
from gascompile.training.state.train_state import States


def entries_of(
    states: States, changing: frozenset[str], counts: Mapping[str, int], pending: frozenset[str]
) -> tuple[dict[str, Entry], dict[str, Entry], dict[str, Entry]]:
    """Return the tensors of the files: of the model those that change and the others, and all else.

    Random numbers are not among them: those of each rank have a name of their own.

    Args:
        counts: updates of each parameter; what was never updated has zeros, which are not written.
        pending: parameters whose totals hold a gradient.
    """
    persistent = states.persistent
    trained: dict[str, Entry] = {}
    frozen: dict[str, Entry] = {}
    optimizer: dict[str, Entry] = {}
    kept, seen = states.model.state_dict(keep_vars=True), set()
    unheld = {id(tensor): name for name, tensor in states.unheld.items()}
    for name, here in states.names().items():
        own = here or unheld.get(id(kept[name]), "")
        if own and own not in seen:
            (trained if _changes(states, own, changing) else frozen)[name] = _of_model(states, own)
            seen.add(own)
        elif not own and isinstance(kept[name], torch.Tensor):
            trained[name] = of_tensor(kept[name])
    for name in sorted({*states.tensors, *states.unheld} - seen):
        optimizer[f"other:{name}"] = _of_model(states, name)
    for (parameter, key), tiles in states.tiles.items():
        if key == PART or not (parameter in pending if key == TOTAL else counts[parameter]):
            continue
        if parameter in states.spread:
            optimizer[f"{parameter}:{key}"] = _of_stage(states, parameter, key)
            continue
        like = states.like(parameter)
        if tiles[0].code is not None:
            # As they are: only the same tiles of a parameter laid out the same way can take them.
            order = "" if like.is_contiguous() else f" of strides {like.stride()}"
            for tile in tiles:
                optimizer[f"{tile.name}{order}"] = made_of(persistent, tile.name)
            continue
        lies = states.like_kept(parameter, key)
        entry = joined(lies.shape, [tile.name for tile in tiles])
        bounds = states.rules.slots[parameter].bounds
        if bounds or states.rules.is_scalar(key) or not lies.is_contiguous():
            entry = replace(
                entry,
                parts=(),
                own=_own(tiles) if bounds else (),
                order=_order(lies),
                made=partial(states.kept, parameter, key),
                assign=partial(states.keep, parameter, key),
            )
        optimizer[f"{parameter}:{key}"] = entry
    return trained, frozen, optimizer


def random_numbers() -> Entry:
    """Return the entry of torch's random numbers of this process."""
    random = torch.get_rng_state()
    return Entry(
        dtype=torch.uint8,
        shape=tuple(random.shape),
        made=lambda: random,
        assign=torch.set_rng_state,
    )


def _own(tiles: Sequence[StateTile]) -> tuple[Own, ...]:
    return tuple(Own(name=tile.name, begin=tile.begin, end=tile.end) for tile in tiles)


def _order(like: torch.Tensor) -> tuple[int, ...]:
    """Return the dimensions of a dense tensor as its memory has them, the slowest first; nothing in order of rows."""
    if like.is_contiguous():
        return ()
    # Of equal strides the longer dimension is the outer one: the other has one element.
    strides, sizes = like.stride(), like.shape
    return tuple(sorted(range(like.dim()), key=lambda dim: (-strides[dim], -sizes[dim])))


def _changes(states: States, name: str, changing: frozenset[str]) -> bool:
    """Return whether steps change a tensor of the model, as all ranks see it."""
    if states.spread:
        return name in states.spread
    return name in states.divided or states.owner(name) in changing


def _of_stage(states: States, parameter: str, key: str) -> Entry:
    """Return the entry of a moment that one stage of a pipeline has."""
    slot, lies = states.spread[parameter], states.like_kept(parameter, key)
    tiles = states.tiles[parameter, key]
    if states.rules.is_scalar(key) or not lies.is_contiguous():
        entry = Entry(
            dtype=torch.float32,
            shape=tuple(lies.shape),
            made=partial(states.kept, parameter, key, own=True),
            assign=partial(states.keep, parameter, key) if tiles else None,
        )
    else:
        entry = joined(lies.shape, [tile.name for tile in tiles])
    return replace(entry, owner=slot.owner)


def _of_model(states: States, name: str) -> Entry:
    """Return the entry of a parameter or buffer."""
    slot = states.spread.get(name)
    if slot is not None and name in states.divided:
        like = states.like(name)
        return Entry(dtype=like.dtype, shape=tuple(like.shape), owner=slot.owner)
    if slot is not None:
        return replace(made_of(states.persistent, name), owner=slot.owner)
    if name in states.unheld:
        return of_tensor(states.unheld[name])
    made = states.storages.views.keys() | states.divided.keys() | states.packed.keys()
    if name not in made:
        return made_of(states.persistent, name)
    like = states.like(name)
    parts = states.tiles[name, PART] if name in states.divided else ()
    return Entry(
        dtype=like.dtype,
        shape=tuple(like.shape),
        own=_own(parts),
        order=_order(like) if parts else (),
        made=partial(states.value, name),
        assign=partial(states.assign, name),
    )
