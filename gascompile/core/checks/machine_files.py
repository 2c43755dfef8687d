"""Machines by name or file: what ships with the package and what a user wrote. Needs no torch."""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path

from gascompile.core import serial
from gascompile.core.checks.machine import check_machine
from gascompile.core.errors import StorageError
from gascompile.core.files import is_file
from gascompile.core.machine import Machine


def named_machine(machine: Machine | str | os.PathLike[str]) -> Machine:
    """Return a machine given as itself, by the name of a preset or by its file, checked.

    Raises:
        TypeError: it is something else, such as inputs that were meant for ``example_inputs``.
        ValueError: a name that is neither a preset nor a file.
        FormatError: it is not a machine, or its numbers make no sense.
        StorageError: the file cannot be read.
    """
    if isinstance(machine, Machine):
        check_machine(machine, where=f"machine '{machine.name}': $")
        return machine
    if not isinstance(machine, (str, os.PathLike)):
        raise TypeError(
            f"machine is the name of a preset, a machine file or a Machine, not {type(machine).__name__}; example "
            "inputs are given as example_inputs=(x,)"
        )
    name = os.fspath(machine)
    if isinstance(machine, str) and name in preset_names():
        return preset(name)
    if is_file(name):
        return load_machine(Path(name))
    if isinstance(machine, str) and Path(name).name == name and not name.endswith(".json"):
        raise ValueError(
            f"no machine is called '{name}'; the presets are {', '.join(preset_names())}. "
            f"Name one of them, a file of format {Machine.FORMAT}, or none to measure this machine"
        )
    raise StorageError(
        f"the machine file {name} does not exist; give an existing file or one of the presets "
        f"{', '.join(preset_names())}"
    )


def preset_names(below: str = "") -> tuple[str, ...]:
    """Return the names of what ships with the package, from datasheets: machines, or another folder's presets."""
    folder = resources.files("gascompile.cost_models") / "presets" / below
    names = (entry.name for entry in folder.iterdir())
    return tuple(sorted(name.removesuffix(".json") for name in names if name.endswith(".json")))


def preset(name: str) -> Machine:
    """Return a preset by name; ``KeyError`` when there is none of that name."""
    if name not in preset_names():
        raise KeyError(name)
    with resources.as_file(
        resources.files("gascompile.cost_models") / "presets" / f"{name}.json"
    ) as path:
        return load_machine(path)


def load_machine(path: str | os.PathLike[str]) -> Machine:
    """Read a machine file and check it; raises ``FormatError`` or ``StorageError``."""
    machine = serial.load(Machine, path)
    check_machine(machine, where=f"{path}: $")
    return machine
