"""A small planning problem as JSON data, and ways to spoil it."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

import gascompile
from gascompile.core import serial
from gascompile.core.checks.machine_files import preset
from gascompile.core.plan import Plan
from gascompile.core.workload import OpSpec, TensorKind, TensorSpec, Workload

BUDGET = "6MiB"
MACHINE = preset("h100-gen5")


def tensor(name: str, size_bytes: int, kind: TensorKind) -> TensorSpec:
    """Return a tensor."""
    return TensorSpec(name=name, size_bytes=size_bytes, kind=kind)


WORKLOAD = Workload(
    name="three ops",
    repeats=True,
    tensors=(
        *(tensor(f"w{i}", (i + 1) << 20, TensorKind.WEIGHT) for i in range(4)),
        tensor("x", 4096, TensorKind.INPUT),
        tensor("s", 4096, TensorKind.STATE),
        tensor("a", 8192, TensorKind.ACTIVATION),
        tensor("b", 8192, TensorKind.ACTIVATION),
        tensor("o", 8192, TensorKind.OUTPUT),
    ),
    ops=(
        OpSpec(
            name="p", time_s={"gpu": 1e-3, "cpu": 5e-3}, reads=("x", "w0"), writes=("a",), workspace_bytes=100,
            splits={"w0": 16},
        ),
        OpSpec(name="q", time_s={"gpu": 1e-3}, reads=("a", "w1", "s"), writes=("b", "s")),
        OpSpec(name="r", time_s={"gpu": 1e-3}, reads=("b", "w2", "w3"), writes=("o",), gathers={"w2": 4096}),
    ),
)  # fmt: skip


@functools.cache
def plan() -> Plan:
    """Return the plan of the problem."""
    return gascompile.plan(WORKLOAD, BUDGET, MACHINE, time_limit_s=5)


def data_of(kind: str) -> Any:
    """Return the JSON data of the ``workload``, the ``machine`` or the ``plan``, to be spoilt."""
    if kind == "plan":
        return serial.to_json(plan())
    return serial.to_json({"workload": WORKLOAD, "machine": MACHINE}[kind])


def changed(data: Any, path: str, value: Any) -> Any:
    """Return a copy of ``data`` with ``value`` at ``path``: ``ops.0.reads.1``; the last part may be new."""
    copied = copy.deepcopy(data)
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    place = copied
    for part in parents:
        place = place[part]
    place[last] = value
    return copied


def write(path: Path, data: Any) -> Path:
    """Write JSON as Python does, ``NaN`` and ``Infinity`` included."""
    path.write_text(json.dumps(data))
    return path
