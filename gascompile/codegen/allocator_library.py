"""The library that is torch's CPU allocator while plans run: compiled once per torch and kept.

It counts what runs take, and serves steps of training blocks of pages. A process has one, wherever it is kept.
Without a compiler there is none: runs report what was planned, and steps run on the heap.
"""

from __future__ import annotations

import importlib.resources
import logging
import sys
from pathlib import Path

import torch

from gascompile.codegen.native_library import kept_library
from gascompile.core import serial
from gascompile.core.errors import GASCompileError
from gascompile.runtime.memory.counting import Counter
from gascompile.runtime.memory.pages import Pages

_log = logging.getLogger(__name__)

_SOURCES = ("memory/counting.cpp", "memory/pages.cpp", "transfer/transfers.cpp")
"""Of one library."""
_LOADED: list[tuple[Pages, Counter] | None] = []
"""What the first call found."""


def page_memory(cache_dir: Path, budget_bytes: int) -> Pages | None:
    """Return the process's page memory, or ``None`` where it cannot be had; the log says why."""
    library = _library(cache_dir)
    if library is None:
        return None
    pages, _ = library
    if not pages.install(budget_bytes):
        _log.warning("this kernel cannot move pages (mremap): steps run on the heap, and slower")
        return None
    return pages


def allocation_counter(cache_dir: Path) -> Counter | None:
    """Return what counts the memory of runs, or ``None`` where it cannot be had; the log says why."""
    library = _library(cache_dir)
    if library is None:
        return None
    _, counter = library
    if not counter.install():
        _log.warning(
            "another library is torch's CPU allocator: runs report planned memory, not what they took"
        )
        return None
    return counter


def _library(cache_dir: Path) -> tuple[Pages, Counter] | None:
    if not _LOADED:
        _LOADED.append(_loaded(cache_dir) if sys.platform.startswith("linux") else None)
    return _LOADED[0]


def _loaded(cache_dir: Path) -> tuple[Pages, Counter] | None:
    folder = importlib.resources.files("gascompile.runtime")
    source = "".join(folder.joinpath(name).read_text() for name in _SOURCES)
    digest = serial.digest([source, str(torch.__version__), torch.compiled_with_cxx11_abi()])

    def compiled() -> bytes:
        from gascompile.codegen.build import compile_library

        return compile_library(source, libraries=("c10",))

    path = cache_dir / "native" / f"allocator-{digest[:16]}.so"
    try:
        kept = kept_library(path, compiled)
        assert kept is not None, "what is missing is built"
        return Pages(kept), Counter(kept)
    except (GASCompileError, OSError) as error:
        _log.warning(
            "no allocator of our own: %s; runs report planned memory, not what they took, and training steps run "
            "on the heap, and slower",
            error,
        )
        return None
