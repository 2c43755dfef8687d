"""The library of the page memory: compiled once per torch and kept; without a compiler, the heap serves."""

from __future__ import annotations

import functools
import importlib.resources
import logging
import sys
import tempfile
from pathlib import Path

import torch

from gascompile import serial
from gascompile.fusion_build import KernelBuildError, compile_library
from gascompile.runtime.pages import Pages

_LOG = logging.getLogger(__name__)


def page_memory(cache_dir: Path, budget_bytes: int) -> Pages | None:
    """Return the process's page memory, or ``None`` where it cannot be had; the log says why."""
    if not sys.platform.startswith("linux"):
        return None
    pages = _loaded(cache_dir)
    if pages is not None and not pages.install(budget_bytes):
        _LOG.warning("this kernel cannot move pages (mremap): steps run on the heap, and slower")
        return None
    return pages


@functools.cache
def _loaded(cache_dir: Path) -> Pages | None:
    source = importlib.resources.files("gascompile.runtime").joinpath("pages.cpp").read_text()
    digest = serial.digest([source, str(torch.__version__), torch.compiled_with_cxx11_abi()])
    path = cache_dir / "native" / f"pages-{digest[:16]}.so"
    try:
        if path.exists():
            try:
                return Pages(path)
            except OSError as error:
                _LOG.warning("%s is damaged (%s) and is compiled again", path, error)
        data = compile_library(source, libraries=("c10",))
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(data)
        Path(file.name).rename(path)
        return Pages(path)
    except (KernelBuildError, OSError) as error:
        _LOG.warning("no page memory: %s; steps run on the heap, and slower", error)
        return None
