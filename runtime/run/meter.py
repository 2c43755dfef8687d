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

from gascompile.core.op_sites import OpSites
from gascompile.core.plan import Plan
from gascompile.core.steps import Compute, Offload, Prefetch, Recompute, Release, Reload, Step
from gascompile.core.tiles import result_name
from gascompile.core.workload import TensorKind


class Meter(NamedTuple):
    """What one op does to the live bytes."""

    births: tuple[tuple[str, int], ...]
    """Tensors the op creates: ``(tensor, element of the result or -1)``."""
    deaths: tuple[str, ...]
    """Tensors that the op is the last to read."""
    workspace_bytes: int


def make_meters(plan: Plan) -> dict[int, Meter]:
    """Return the meter of each step that runs an op, without those where nothing changes."""
    workload = plan.workload
    returned = {t.name for t in workload.tensors if t.kind is TensorKind.OUTPUT}
    made: set[str] = set()
    births: dict[int, dict[str, int]] = {}
    last: dict[str, int] = {}
    for at, step in enumerate(plan.steps):
        number = op_of(step)
        if number is None:
            continue
        op = workload.ops[number]
        # What several tiles write together is born with the first.
        created = op.writes if isinstance(step, Recompute) else set(op.writes) - made
        own = result_name(op.name, op.writes)
        elements = {name: _element(name, own) for name in created}
        births[at] = {name: i for name, i in elements.items() if i is not None}
        made.update(births[at])
        last.update((n, at) for n in (*op.reads, *op.writes) if n in made and n not in returned)
    deaths: dict[int, list[str]] = {}
    for name, at in last.items():
        deaths.setdefault(at, []).append(name)
    return {
        at: Meter(tuple(born.items()), tuple(deaths.get(at, ())), workspace_bytes)
        for at, born in births.items()
        if (workspace_bytes := workload.ops[op_of(plan.steps[at]) or 0].workspace_bytes)
        or born
        or at in deaths
    }


def make_site_meters(plan: Plan, sites: OpSites) -> dict[tuple[int, str], Meter]:
    """Return the meter of each step at each site, for a plan whose ops run on several.

    A copy that comes to the tier that computes is born there; what is at a site dies after the last step there.
    """
    ops, machine = plan.workload.ops, plan.machine
    returned = {t.name for t in plan.workload.tensors if t.kind is TensorKind.OUTPUT}
    births: dict[tuple[int, str], list[tuple[str, int]]] = {}
    last: dict[tuple[str, str], int] = {}
    ends: dict[str, tuple[str, str]] = {}
    for at, step in enumerate(plan.steps):
        if (number := op_of(step)) is not None:
            op, site = ops[number], sites.of[number]
            again = isinstance(step, Recompute)
            for name in dict.fromkeys(op.writes):
                element = _element(name, result_name(op.name, op.writes))
                if element is not None and (again or (name, site) not in last):
                    births.setdefault((at, site), []).append((name, element))
                    last[name, site] = at
            last.update({(n, site): at for n in op.reads if (n, site) in last})
        elif sites.is_crossing(step):
            assert not isinstance(step, (Compute, Recompute, Prefetch, Release)), "it crosses"
            if isinstance(step, (Offload, Reload)):
                link = machine.link(step.link)
                ends[step.tensor] = (link.source_tier, link.target_tier)
                if link.target_tier == sites.own:  # on the host it has a slot
                    births.setdefault((at, sites.own), []).append((step.tensor, -1))
            last.update({(step.tensor, site): at for site in ends.get(step.tensor, ())})
    deaths: dict[tuple[int, str], list[str]] = {}
    for (name, site), at in last.items():
        if not (name in returned and site == sites.own):
            deaths.setdefault((at, site), []).append(name)
    workspace = {
        (at, sites.of[number]): ops[number].workspace_bytes
        for at, step in enumerate(plan.steps)
        if (number := op_of(step)) is not None
    }
    return {
        key: Meter(tuple(births.get(key, ())), tuple(deaths.get(key, ())), workspace.get(key, 0))
        for key in {*births, *deaths, *(k for k, size in workspace.items() if size)}
    }


def op_of(step: Step) -> int | None:
    """Return the op that a step runs, again or not; ``None`` for a move."""
    if isinstance(step, Recompute):
        return step.source
    return step.op if isinstance(step, Compute) else None


def _element(tensor: str, own: str) -> int | None:
    """Return which element of the result ``own`` a written tensor is, -1 for all of it, ``None`` for an older one."""
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
    names = [name for m in outputs if m is not None for name, _ in m.births]
    is_single = len(outputs) == 1
    return Meter(
        births=tuple((name, -1 if is_single else i) for i, name in enumerate(names)),
        deaths=tuple(name for m in ops if m is not None for name in m.deaths),
        workspace_bytes=scratch_bytes,
    )


class LiveBytes:
    """Live bytes of one run and their peak, workspace included."""

    def __init__(self, live_bytes: int = 0) -> None:
        """Begin with what is there before the run."""
        self._sizes: dict[str, int] = {}
        self.live_bytes = self.peak_bytes = live_bytes

    def take(self, tensor: str, size_bytes: int) -> None:
        """Take note of memory that a move has taken."""
        self._sizes[tensor] = size_bytes
        self.live_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def drop(self, tensor: str, size_bytes: int) -> None:
        """Take note of memory that a move has given back."""
        self._sizes.pop(tensor, None)
        self.live_bytes -= size_bytes

    def bear(self, births: tuple[tuple[str, int], ...], result: Any) -> None:
        """Take note of what an op has just returned; once more makes no difference."""
        sizes = self._sizes
        for name, element in births:
            value = result if element < 0 else result[element]
            if isinstance(value, torch.Tensor):
                size_bytes = value.untyped_storage().nbytes()
                self.live_bytes += size_bytes - sizes.get(name, 0)
                sizes[name] = size_bytes

    def record(self, meter: Meter, result: Any) -> None:
        """Take note of an op that has just returned ``result``; its inputs are still alive."""
        births, deaths, workspace_bytes = meter
        self.bear(births, result)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + workspace_bytes)
        for name in deaths:
            self.live_bytes -= self._sizes.pop(name, 0)


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
