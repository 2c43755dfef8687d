"""The library that is torch's CPU allocator while plans run: compiled once per torch and kept.

It counts what runs take, and serves steps of training blocks of pages. A process has one, wherever it is kept.
Without a compiler there is none: runs report what was planned, and steps run on the heap.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.resources
import logging
import sys
from functools import partial
from pathlib import Path

import torch

from gascompile.codegen.native_library import kept_library
from gascompile.core import serial
from gascompile.core.errors import GASCompileError
from gascompile.core.waiting import OwnThread
from gascompile.runtime.memory.counting import Counter
from gascompile.runtime.memory.pages import Pages

_log = logging.getLogger(__name__)

_SOURCES = ("memory/counting.cpp", "memory/pages.cpp", "transfer/transfers.cpp")
"""Of one library."""
_LOADED: list[tuple[Pages, Counter] | None] = []
"""What the first call found."""
_BUILDING: list[OwnThread] = []
"""That compile a library, in the background."""


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


def begin_building(cache_dir: Path) -> None:
    """Have the library compiled by a thread of its own where it is missing; whoever needs it waits for that."""
    await_building()
    if _LOADED or not sys.platform.startswith("linux"):
        return
    path, source = _at(cache_dir)
    if not path.exists():
        _BUILDING.append(OwnThread(partial(_build, path, source), "gascompile-allocator"))


def await_building() -> None:
    """Block until no library is being compiled in the background."""
    for thread in list(_BUILDING):
        thread.join()
        with contextlib.suppress(ValueError):
            _BUILDING.remove(thread)


# Its compiler and its folder would outlive the process.
atexit.register(await_building)


def _build(path: Path, source: str) -> None:
    # Who needs it tries again, and says why there is none.
    with contextlib.suppress(GASCompileError, OSError):
        _kept(path, source)


def _library(cache_dir: Path) -> tuple[Pages, Counter] | None:
    await_building()
    if not _LOADED:
        _LOADED.append(_loaded(cache_dir) if sys.platform.startswith("linux") else None)
    return _LOADED[0]


def _at(cache_dir: Path) -> tuple[Path, str]:
    """Return where the library is kept, and its source."""
    folder = importlib.resources.files("gascompile.runtime")
    source = "".join(folder.joinpath(name).read_text() for name in _SOURCES)
    digest = serial.digest([source, str(torch.__version__), torch.compiled_with_cxx11_abi()])
    return cache_dir / "native" / f"allocator-{digest[:16]}.so", source


def _kept(path: Path, source: str) -> Path:
    def compiled() -> bytes:
        from gascompile.codegen.build import compile_library

        return compile_library(source, libraries=("c10",))

    kept = kept_library(path, compiled)
    assert kept is not None, "what is missing is built"
    return kept


def _loaded(cache_dir: Path) -> tuple[Pages, Counter] | None:
    try:
        kept = _kept(*_at(cache_dir))
        return Pages(kept), Counter(kept)
    except (GASCompileError, OSError) as error:
        _log.warning(
            "no allocator of our own: %s; runs report planned memory, not what they took, and training steps run "
            "on the heap, and slower",
            error,
        )
        return None
