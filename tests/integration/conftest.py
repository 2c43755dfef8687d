"""A cache of its own per test, with this machine measured once for all of them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from gascompile.machine import resolve_machine
from gascompile.runtime.engine import read_blocks


@pytest.fixture(scope="session")
def measured_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("measured")
    resolve_machine(None, cache_dir=folder, read=read_blocks)
    return folder


@pytest.fixture
def cache(measured_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an empty cache folder that already knows this machine."""
    folder = tmp_path_factory.mktemp("cache")
    shutil.copytree(measured_cache / "machine", folder / "machine")
    return folder
