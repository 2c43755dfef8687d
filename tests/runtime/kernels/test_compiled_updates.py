"""The kernels of optimizer updates, compiled for a Hopper GPU: what comes out is looked at."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.hopper import compiled_by


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory, root: Path) -> list[dict[str, Any]]:
    cache = tmp_path_factory.mktemp("triton")
    return compiled_by("tests.runtime.kernels.hopper_updates", cache=cache, root=root)


def accesses(ptx: str, kind: str) -> list[str]:
    """Return the forms in which a program touches memory: ``v4.b32`` for four words at once."""
    return re.findall(rf"\b{kind}\.global\.([a-z0-9.]+)", ptx)


def test_all_kernels_compile_in_all_forms(compiled: list[dict[str, Any]]) -> None:
    names = Counter(found["kernel"] for found in compiled)
    assert names == {"_adam": 2, "_adam_coded": 2, "_sgd": 3, "_sgd_coded": 2}


def test_memory_is_touched_in_wide_pieces(compiled: list[dict[str, Any]]) -> None:
    """Four values at a time; of codes as many as make a word. Single bytes are bases alone."""
    for found in compiled:
        if not found["kernel"].startswith("_adam"):
            assert accesses(found["ptx"], "st").count("v4.b32") >= 2
            continue
        loads, stores = accesses(found["ptx"], "ld"), accesses(found["ptx"], "st")
        is_coded = found["kernel"] == "_adam_coded"
        # Eight values per thread: two loads of each float32 operand, one of each state's codes at most.
        assert loads.count("v4.b32") >= (4 if is_coded else 8), loads
        assert stores.count("v4.b32") == (2 if is_coded else 6), stores
        if not is_coded:
            assert not [form for form in loads + stores if "b8" in form]
        assert len(loads) <= 16, loads


def test_divisions_and_roots_are_rounded_as_torch_rounds_them(
    compiled: list[dict[str, Any]],
) -> None:
    for found in compiled:
        if not found["kernel"].startswith("_adam"):
            continue
        assert "sqrt.rn.f32" in found["ptx"]
        assert "div.rn.f32" in found["ptx"]
        assert not re.search(r"(sqrt|div)\.(approx|full)", found["ptx"])


def test_no_shared_memory_but_for_the_largest_of_blocks(compiled: list[dict[str, Any]]) -> None:
    for found in compiled:
        assert found["shared_bytes"] <= (4096 if "_coded" in found["kernel"] else 0)
