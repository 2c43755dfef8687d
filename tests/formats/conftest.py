"""Both ways to decode weights: by compiled code and in plain torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gascompile.codegen.build import has_compiler
from gascompile.codegen.packed_kernels import use_packed_kernels
from gascompile.formats import ops as format_ops


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in which the library is compiled once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(params=["compiled", "plain"])
def kernels(request: pytest.FixtureRequest, folder: Path) -> Iterator[format_ops.Kernels | None]:
    """Both ways to decode; the process has the one that it had before again."""
    if request.param == "compiled" and not has_compiler():
        pytest.skip("needs a C++ compiler")
    before = format_ops.kernels_for()
    format_ops.use_kernels(None)
    if request.param == "compiled":
        use_packed_kernels({"weight": "q8_0"}, folder, make=True)
    yield format_ops.kernels_for()
    format_ops.use_kernels(before)
