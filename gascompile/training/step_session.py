"""Step session: where a training step computes, and the session that all plans of it run in."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from gascompile.core.errors import UnsupportedOpError
from gascompile.core.machine import IoSettings
from gascompile.core.program import Program
from gascompile.passes.graph.to_device import to_device
from gascompile.runtime.memory.device_moves import DeviceMoves
from gascompile.runtime.memory.pages import Pages
from gascompile.runtime.memory.persistent import Persistent
from gascompile.runtime.memory.run_memory import RunMemory
from gascompile.runtime.memory.spill import Spill
from gascompile.runtime.run.session import Session
from gascompile.training.optimizers import updates_at_once
from gascompile.training.planning.row_draws import draws_of
from gascompile.training.planning.step_program import StepProgram


def open_session(
    store: Persistent,
    *,
    folder: Path,
    buffers: memoryview,
    pages: Pages | None,
    moves: DeviceMoves | None,
    in_ram: bool,
    reserved_bytes: int,
) -> Session:
    """Return a session over ``store``, which closes a device that is moved for, but not the store.

    Args:
        store: what outlives steps.
        folder: where activations go that leave memory.
        buffers: page-aligned memory that they pass through, half of it for each direction.
        pages: where large values lie; else on the heap.
        moves: of the device that computes; the host does, if ``None``.
        in_ram: whether what ops take is the host's memory.
        reserved_bytes: of every plan's budget, for others than ops.
    """
    updates_at_once.enter()
    return Session(
        arena_bytes=0,
        residents={},
        sources={},
        io=IoSettings(num_threads=1),
        open_spill=partial(Spill, folder, buffers=buffers, pages=pages, moves=moves),
        store=store,
        memory=RunMemory(pages) if in_ram else None,
        reserved_bytes=reserved_bytes,
        device=moves.device if moves is not None else None,
    )


def on_device(program: StepProgram, moves: DeviceMoves | None) -> Program:
    """Return what runs where the machine computes.

    Raises:
        UnsupportedOpError: an op runs on the processor alone, or draws numbers that no checkpoint would have; or
            the device's autocast is on.
    """
    device = torch.device("cpu") if moves is None else moves.device.torch_device
    if device.type != "cpu" and torch.is_autocast_enabled(device.type):
        raise UnsupportedOpError(
            f"torch.autocast('{device.type}') would cast once more what a planned step computes: it is captured on the "
            "processor; use torch.autocast('cpu'), whose casts are a part of the step"
        )
    drawing = [node.name for node in draws_of(program.program.graph_module.graph)]
    if drawing and device.type != "cpu":
        raise UnsupportedOpError(
            f"op '{drawing[0]}' draws random numbers, and those of '{device}' are kept in no checkpoint: train "
            "without dropout, or on a machine that computes on the processor"
        )
    return to_device(program.program, device)
