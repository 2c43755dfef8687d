"""A package of a few texts, imported as a new process would."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType


def fresh(folder: Path, texts: dict[str, str]) -> ModuleType:
    """Write a package and import it as a new process would."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "pkg"]:
        del sys.modules[name]
    package = folder / "pkg"
    package.mkdir(exist_ok=True)
    for name, text in texts.items():
        (package / name).write_text(text)
    importlib.invalidate_caches()
    return importlib.import_module("pkg.main")
