"""Giving back: how the values of a step return to the model and the optimizer when it closes."""

from __future__ import annotations

from pathlib import Path

import torch

from gascompile.core.errors import RankError, StorageError
from gascompile.core.sizes import format_size
from gascompile.cost_models.measure.host import memory_limit
from gascompile.runtime.memory.heap_memory import own_bytes
from gascompile.training.capture.unbacked_tensors import become
from gascompile.training.state.open_tensors import behind
from gascompile.training.state.train_state import States

_BESIDE_BYTES = 128 << 20
"""What copies take while they are made, and what a control group counts beside a process's own memory."""


def give_back(states: States, *, moments: bool) -> tuple[list[str], StorageError | None]:
    """Fill the model again, and the optimizer where memory allows it.

    Called again after a ``StorageError``, it goes on with what is not back yet. All of it shows at once, at the end.

    Returns:
        What to warn of, and what to raise once all else is done: values that a file does not have any more.

    Raises:
        StorageError: a value cannot be read.
    """
    own = {name: behind(tensor) for name, tensor in states.tensors.items()}
    if states.values is not None and states.values.stays_out(
        own, states, available_bytes(), states.shut
    ):
        states.storages.restore()
        return [], None
    lost = _values_back(states)
    warned = _divided_back(states)
    # Ranks that are not here for the ones are not for the others.
    warned += _moments_back(states) if moments and not warned else []
    # Forgets the views that moments are told by.
    states.storages.restore()
    states.shut()
    return warned, lost


def _values_back(states: States) -> StorageError | None:
    """Fill the model; what lay in a file that was written to is on the meta device from then on."""
    persistent, lost = states.persistent, None
    for name, tensor in states.tensors.items():
        if name in states.divided:
            continue
        try:
            states.give(name)
        except StorageError as error:
            if not persistent.is_in_place(name) or persistent.has_sources():
                raise
            own = behind(tensor)
            become(own, states.like(name))
            lost = error
    return lost


def _divided_back(states: States) -> list[str]:
    """Fill what is divided among the ranks; where these are not all here it is on the meta device from then on."""
    for name in states.divided.keys() & states.spread.keys():
        # No rank may have memory for the whole model.
        become(behind(states.tensors[name]), states.like(name))
        states.given.add(name)
    try:
        for name in states.divided:
            states.give(name)
    except RankError as error:
        for name in states.divided.keys() - states.given:
            become(behind(states.tensors[name]), states.like(name))
        said = (
            "parameters and the optimizer's state are divided among ranks that are not all here: "
            f"{len(states.divided)} parameters are on the meta device now; load the last checkpoint ({error})"
        )
        return [said]
    return []


def _moments_back(states: States) -> list[str]:
    every = (tile for tiles in states.tiles.values() for tile in tiles)
    tiles = (tile for tile in every if not tile.is_part)
    size_bytes = torch.float32.itemsize * sum(tile.num_elements for tile in tiles)
    available = available_bytes()
    is_short = size_bytes + size_bytes // 16 + _BESIDE_BYTES > available
    if states.agreed(is_short, "whether moments stay out of the optimizer"):
        said = (
            f"the optimizer's state of {format_size(size_bytes)} does not fit the {format_size(available)} of "
            "memory that is free, and stays out of the optimizer; use save before close to keep it"
        )
        return [said]
    try:
        entries = list(states.entries(own=True))
    except RankError as error:
        return [
            f"the optimizer's state is divided among ranks that are not all here, and stays out of it: {error}"
        ]
    for slot, _, entry in entries:
        states.optimizer.state[states.tensor(slot.name)] = entry
    return []


def available_bytes() -> int:
    """Return what this process may still take, control groups included."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    (available_kib,) = (int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    return min(available_kib << 10, memory_limit().size_bytes - own_bytes())
