"""Machine code for a GPU, compiled where there is none: what comes out, and what a launch is told of it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from gascompile.codegen.build import NoCompilerError
from gascompile.codegen.cubin import Image, compile_image, joined, missing_triton
from gascompile.codegen.triton import TritonSource
from gascompile.core.kernels import GpuFunction
from tests.hopper import compiled_by
from tests.interpreted_gpu import HOPPER


def _without_ptxas() -> str:
    backends = pytest.importorskip("triton.backends").backends
    if "nvidia" not in backends:
        return "this Triton has no backend for NVIDIA GPUs"
    folder = Path(sys.modules["triton.backends.nvidia"].__file__ or "").parent
    return "" if (folder / "bin" / "ptxas").exists() else "this Triton comes without ptxas"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory, root: Path) -> list[dict[str, Any]]:
    if reason := _without_ptxas():
        pytest.skip(reason)
    cache = tmp_path_factory.mktemp("triton")
    return compiled_by("tests.codegen.compile_for_hopper", "9.0", cache=cache, root=root)


def test_every_source_becomes_an_image_for_the_capability(compiled: list[dict[str, Any]]) -> None:
    assert {found["segment"] for found in compiled} == {"chain", "rms", "norms", "whole"}
    for found in compiled:
        assert found["magic"] == "\x7fELF"
        assert 90 in (found["flags"] & 0xFF, found["flags"] >> 8 & 0xFF)
        assert found["has_symbol"]


def test_a_launch_is_told_threads_memory_and_parameters(compiled: list[dict[str, Any]]) -> None:
    for found in compiled:
        assert found["threads"] == 32 * found["warps"]
        assert 0 <= found["extra_parameters"] <= 2
        assert found["arguments"] == [found["own"]]
        assert all(len(grid) == 3 and min(grid) > 0 for grid in found["grids"])
    by_name = {found["segment"]: found for found in compiled}
    # One block per row, whose warps add up through shared memory.
    assert by_name["rms"]["grids"] == [[16, 1, 1]]
    assert by_name["rms"]["shared_bytes"] > 0
    assert by_name["chain"]["shared_bytes"] == 0


def test_images_lie_one_after_the_other() -> None:
    first = Image(cubin=b"abcde", threads=128, shared_bytes=0, num_parameters=3)
    second = Image(cubin=b"fg", threads=64, shared_bytes=8, num_parameters=4)
    code, functions = joined({"a": first, "b": second})
    assert code == b"abcdefg"
    assert functions["b"] == GpuFunction(
        start=5, stop=7, threads=64, shared_bytes=8, num_parameters=4
    )
    assert code[functions["a"].start : functions["a"].stop] == b"abcde"


def test_a_triton_that_interprets_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    source = TritonSource(
        symbol="f", text="", signature={}, constants={}, aligned=(), num_warps=1, num_stages=1
    )
    with pytest.raises(NoCompilerError, match="TRITON_INTERPRET"):
        compile_image(source, HOPPER)


def test_without_triton_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "gascompile[gpu]" in missing_triton()
