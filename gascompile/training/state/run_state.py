"""Run state: what a checkpoint says of a run beside tensors, read whole before anything of it is taken over."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gascompile.core import serial
from gascompile.core.errors import CheckpointError, FormatError
from gascompile.training.optimizers.kept_state import is_row
from gascompile.training.state.extra_values import TAGGED, decoded

STATE = "state.json"


def read_state(folder: Path) -> dict[str, Any]:
    """Return what a checkpoint says beside tensors.

    Raises:
        CheckpointError: it cannot be read, or a value is none that a save writes.
    """
    file = folder / STATE
    try:
        state = serial.read_json(file)
    except FormatError as error:
        raise CheckpointError(f"{error}; take the folder from a backup") from error
    wrong = ["what it is"] if not isinstance(state, dict) else _wrong_in(state)
    if wrong:
        raise CheckpointError(f"{file} is damaged in {wrong[0]}; take the folder from a backup")
    checked: dict[str, Any] = state
    if checked.get(TAGGED):
        try:
            checked["extra"] = decoded(checked["extra"])
        except ValueError as error:
            raise CheckpointError(
                f"{file} is damaged in extra ({error}); take the folder from a backup"
            ) from error
    return checked


def _wrong_in(state: Mapping[str, Any]) -> list[str]:
    missing = [name for name in _NEEDED if name not in state]
    return missing + [
        name for name, is_sound in _SOUND.items() if name in state and not is_sound(state[name])
    ]


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _are_counts(value: object) -> bool:
    return isinstance(value, dict) and all(map(_is_count, value.values()))


def _are_names(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _are_groups(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(group, dict) and isinstance(group.get("params"), list) for group in value
    )


def _are_kept(value: object) -> bool:
    return isinstance(value, list) and all(map(is_row, value))


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_object(value: object) -> bool:
    return isinstance(value, dict)


_SOUND: Mapping[str, Callable[[object], bool]] = MappingProxyType(
    {
        "step": _is_count,
        "num_batches": _is_count,
        "updates": _are_counts,
        "pending": _are_names,
        "optimizer": _is_text,
        "states": _is_text,
        "param_groups": _are_groups,
        "optimizer_state": _are_kept,
        "extra": _is_object,
        TAGGED: _is_flag,
    }
)
_NEEDED = frozenset(_SOUND) - {"states", "optimizer_state", TAGGED}
"""What older versions wrote, too."""
