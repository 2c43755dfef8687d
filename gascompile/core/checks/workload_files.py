"""Workload files: which paths name one, and how it is read and checked. Needs no torch."""

from __future__ import annotations

import os
from typing import TypeGuard

from gascompile.core import serial
from gascompile.core.checks.workload import check_content, check_count, check_times
from gascompile.core.machine import Machine
from gascompile.core.workload import Workload


def is_workload_file(source: object) -> TypeGuard[str | os.PathLike[str]]:
    """Return whether ``source`` is a path that is read as a workload, by its ending."""
    return isinstance(source, (str, os.PathLike)) and os.fspath(source).endswith(".json")


def load_workload(path: str | os.PathLike[str], machine: Machine | None) -> Workload:
    """Read a workload file and check that it can be planned for ``machine``, or where ops' times do not matter.

    Raises:
        FormatError: it is no workload, or makes no sense as one; names the place.
        StorageError: it cannot be read.
        UnsupportedOpError: an op has no time on the tier that computes.
    """
    data = serial.read_json(path)
    where = f"{os.fspath(path)}: $"
    # Lists are counted before a million objects are made from them.
    for field in ("tensors", "ops"):
        items = data.get(field) if isinstance(data, dict) else None
        if isinstance(items, list):
            check_count(len(items), f"{where}.{field}")
    workload = serial.from_json(Workload, data, where=where)
    check_content(workload, where=where)
    if machine is not None:
        check_times(workload, machine, where=where)
    return workload
