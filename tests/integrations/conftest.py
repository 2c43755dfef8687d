"""Compiled models of these tests, which are closed after each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import gascompile


@pytest.fixture
def compiled(run_cache: Path) -> Iterator[Callable[..., Any]]:
    found: list[Any] = []

    def compile_it(model: Any, budget: str = "16MiB") -> Any:
        found.append(gascompile.compile(model, budget, machine="cpu-nvme", cache_dir=run_cache))
        return found[-1]

    yield compile_it
    for one in found:
        one.close()
