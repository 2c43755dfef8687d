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
    persistent = states.persistent
    own = {name: behind(tensor) for name, tensor in states.tensors.items()}
    if states.values is not None and states.values.stays_out(
        own, persistent, available_bytes(), states.shut
    ):
        states.storages.restore()
        return [], None
    lost = _values_back(states)
    warned = _moments_back(states) if moments else []
    # Forgets the views that moments are told by.
    states.storages.restore()
    states.shut()
    return warned, lost


def _values_back(states: States) -> StorageError | None:
    """Fill the model; what lay in a file that was written to is on the meta device from then on."""
    persistent, lost = states.persistent, None
    for name, tensor in states.tensors.items():
        try:
            states.give(name)
        except StorageError as error:
            if not persistent.is_in_place(name) or persistent.has_sources():
                raise
            own = behind(tensor)
            become(own, torch.empty_like(persistent.tensors[name], device="meta"))
            lost = error
    return lost


def _moments_back(states: States) -> list[str]:
    tiles = (tile for tiles in states.tiles.values() for tile in tiles)
    size_bytes = torch.float32.itemsize * sum(tile.num_elements for tile in tiles)
    available = available_bytes()
    if size_bytes + size_bytes // 16 + _BESIDE_BYTES > available:
        said = (
            f"the optimizer's state of {format_size(size_bytes)} does not fit the {format_size(available)} of "
            "memory that is free, and stays out of the optimizer; use save before close to keep it"
        )
        return [said]
    try:
        entries = list(states.entries())
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
    (found,) = (int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    return min(found << 10, memory_limit().size_bytes - own_bytes())
