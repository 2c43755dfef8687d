"""The library of the page memory: compiled once per torch and kept; without a compiler, the heap serves."""

from __future__ import annotations

import importlib.resources
import logging
import sys
from functools import partial
from pathlib import Path

import torch

from gascompile import serial
from gascompile.errors import StorageError
from gascompile.fusion_build import KernelBuildError, compile_library
from gascompile.native_library import kept_library
from gascompile.runtime.pages import Pages

_log = logging.getLogger(__name__)

_SOURCES = ("pages.cpp", "transfers.cpp")
"""Of one library."""
_LOADED: list[Pages | None] = []
"""What the first call found: a process has one page memory, wherever its library is kept."""


def page_memory(cache_dir: Path, budget_bytes: int) -> Pages | None:
    """Return the process's page memory, or ``None`` where it cannot be had; the log says why."""
    if not sys.platform.startswith("linux"):
        return None
    pages = _LOADED[0] if _LOADED else _loaded(cache_dir)
    if not _LOADED:
        _LOADED.append(pages)
    if pages is not None and not pages.install(budget_bytes):
        _log.warning("this kernel cannot move pages (mremap): steps run on the heap, and slower")
        return None
    return pages


def _loaded(cache_dir: Path) -> Pages | None:
    folder = importlib.resources.files("gascompile.runtime")
    source = "".join(folder.joinpath(name).read_text() for name in _SOURCES)
    digest = serial.digest([source, str(torch.__version__), torch.compiled_with_cxx11_abi()])
    path = cache_dir / "native" / f"pages-{digest[:16]}.so"
    try:
        kept = kept_library(path, partial(compile_library, source, libraries=("c10",)))
        assert kept is not None, "what is missing is built"
        return Pages(kept)
    except (KernelBuildError, StorageError, OSError) as error:
        _log.warning("no page memory: %s; steps run on the heap, and slower", error)
        return None
