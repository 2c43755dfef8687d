"""Remembered: what was measured once and lies in a file, which may be of another version or damaged."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from gascompile.core.errors import FormatError, StorageError
from gascompile.core.serial import read_json

_log = logging.getLogger("gascompile")
Read = TypeVar("Read")


def remembered(path: Path, form: str, what: str, take: Callable[[Any], Read]) -> Read | None:
    """Return what ``take`` makes of a JSON file's object; ``None`` where there is none of this format.

    Args:
        path: the file's.
        form: its format, as the object's ``format`` says.
        what: said in a warning where it is damaged, and will be measured again.
        take: raises what a lookup or a conversion raises for what it cannot take.
    """
    if not os.path.exists(path):
        return None
    try:
        data = read_json(path)
        return take(data) if data["format"] == form else None
    except (StorageError, FormatError, ValueError, KeyError, TypeError, AttributeError) as error:
        _log.warning("%s %s are damaged and measured again: %s", what, path, error)
        return None
