"""What a run measures of memory: the activation bytes that are really alive, the peak of the process.

A tensor is counted with the bytes of the storage that its op really returned, from that op to the last
one that reads it or a view of it; what the model returns counts to the end. While an op runs, the
workspace that the plan reserves for it counts too. The user's inputs are the user's.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from gascompile.core.plan import Plan
from gascompile.core.tiles import base_name
from gascompile.core.workload import TensorKind


class Meter(NamedTuple):
    """What one op does to the live bytes."""

    births: tuple[tuple[int, int], ...]
    """Tensors the op creates: ``(tensor number, element of the result or -1)``."""
    deaths: tuple[int, ...]
    """Numbers of the tensors that the op is the last to read."""
    workspace_bytes: int


def make_meters(plan: Plan) -> tuple[list[Meter | None], int]:
    """Return the meter of each op, ``None`` where nothing changes, and the number of tensors counted."""
    workload = plan.workload
    returned = {t.name for t in workload.tensors if t.kind is TensorKind.OUTPUT}
    number: dict[str, int] = {}
    births: list[tuple[tuple[int, int], ...]] = []
    last_op: dict[int, int] = {}
    for i, op in enumerate(workload.ops):
        # What several tiles write together is born with the first.
        created = {
            name: _element(name, base_name(op.name)) for name in op.writes if name not in number
        }
        born = {name: element for name, element in created.items() if element is not None}
        for name in born:
            number[name] = len(number)
        births.append(tuple((number[name], element) for name, element in born.items()))
        for name in (*op.reads, *op.writes):
            if name in number and name not in returned:
                last_op[number[name]] = i
    deaths: dict[int, list[int]] = {}
    for tensor, i in last_op.items():
        deaths.setdefault(i, []).append(tensor)
    meters = [
        Meter(births[i], tuple(deaths.get(i, ())), op.workspace_bytes)
        if births[i] or i in deaths or op.workspace_bytes
        else None
        for i, op in enumerate(workload.ops)
    ]
    return meters, len(number)


def _element(tensor: str, op: str) -> int | None:
    """Return which element of the op's result a written tensor is, -1 for all of it, ``None`` for an older one."""
    own = f"%{op}"
    if tensor == own:
        return -1
    tail = tensor.removeprefix(f"{own}.")
    return int(tail) if tail != tensor and tail.isdigit() else None


def fused_meter(
    outputs: Sequence[Meter | None], ops: Sequence[Meter | None], scratch_bytes: int
) -> Meter:
    """Return what ops that run as one do to the live bytes: only ``outputs`` are born, all at once.

    Args:
        outputs: meters of the ops whose results are made, in the order of the call's results.
        ops: meters of all its ops.
        scratch_bytes: what the call allocates beside its results.
    """
    numbers = [number for m in outputs if m is not None for number, _ in m.births]
    is_single = len(outputs) == 1
    return Meter(
        births=tuple((number, -1 if is_single else i) for i, number in enumerate(numbers)),
        deaths=tuple(number for m in ops if m is not None for number in m.deaths),
        workspace_bytes=scratch_bytes,
    )


class LiveBytes:
    """Live activation bytes of one run and their peak, workspace included."""

    def __init__(self, num_tensors: int) -> None:
        self._sizes = [0] * num_tensors
        self._live_bytes = 0
        self.peak_bytes = 0

    def adjust(self, change_bytes: int) -> None:
        """Take note of memory that a move has taken or given back."""
        self._live_bytes += change_bytes
        self.peak_bytes = max(self.peak_bytes, self._live_bytes)

    def record(self, meter: Meter, result: Any) -> None:
        """Take note of an op that has just returned ``result``; its inputs are still alive."""
        births, deaths, workspace_bytes = meter
        sizes = self._sizes
        live_bytes = self._live_bytes
        for number, element in births:
            value = result if element < 0 else result[element]
            if isinstance(value, torch.Tensor):
                size_bytes = value.untyped_storage().nbytes()
                sizes[number] = size_bytes
                live_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, live_bytes + workspace_bytes)
        for number in deaths:
            live_bytes -= sizes[number]
        self._live_bytes = live_bytes


def process_peak_bytes() -> int:
    """Return the high-water mark of the process's memory as the kernel knows it; 0 where it does not say."""
    # After each run: as Python's own files, with their buffers, it would take half of the time of a short one.
    try:
        file = os.open("/proc/self/status", os.O_RDONLY | os.O_CLOEXEC)
        try:
            status = os.read(file, 1 << 14)
        finally:
            os.close(file)
    except OSError:
        return 0
    start = status.find(b"\nVmHWM:")
    return int(status[start + 7 :].split(None, 1)[0]) << 10 if start >= 0 else 0
