"""A page memory that tests of one module share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gascompile.codegen.allocator_library import page_memory
from gascompile.codegen.build import has_compiler
from gascompile.runtime.memory.pages import Pages

BUDGET_BYTES = 64 << 20
"""For which units are pages, and blocks of 16 pages are the smallest."""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pages]:
    """Return a memory of this module's own: what other tests have left alive lies in another."""
    if not has_compiler():
        pytest.skip("needs a C++ compiler")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gascompile.codegen.allocator_library._LOADED", [])
        found = page_memory(tmp_path_factory.mktemp("native"), BUDGET_BYTES)
        assert found is not None
        yield found
