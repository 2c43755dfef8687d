"""The library of products with packed weights: compiled once per processor and kept; without it, plain torch."""

from __future__ import annotations

import importlib.resources
import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from gascompile.codegen.build import KernelBuildError, compile_library, processor_features
from gascompile.codegen.native_library import kept_library
from gascompile.core import serial
from gascompile.core.errors import StorageError
from gascompile.formats import ops as format_ops
from gascompile.formats.layout import LAYOUT
from gascompile.runtime.kernels import packed as wire

_log = logging.getLogger("gascompile")

_FLAGS = ("-O3", "-march=native", "-fopenmp", "-fno-exceptions", "-nodefaultlibs")
"""Without the OpenMP library itself: torch has loaded one, and two would each keep threads of their own."""
_FAILED: set[Path] = set()
"""Folders for which it could not be made: trying again takes seconds."""


def use_packed_kernels(forms: Mapping[str, object], cache_dir: Path, *, make: bool) -> None:
    """Have products with packed weights computed by compiled code from now on, if they can be.

    Args:
        forms: of a program's weights; nothing is done where all move as they are computed in.
        cache_dir: where the library is kept, in ``native/``.
        make: compile it if it is not there; otherwise plain torch serves, which takes two to three times as long.
    """
    if not forms or format_ops.kernels_for() is not None or cache_dir in _FAILED:
        return
    source = (
        importlib.resources.files("gascompile.runtime.kernels").joinpath(wire.SOURCE).read_text()
    )
    try:
        digest = serial.digest([source, LAYOUT, list(_FLAGS), processor_features()])
        path = cache_dir / "native" / f"wire-{digest[:16]}.so"
        library = kept_library(
            path, partial(compile_library, source, flags=_FLAGS) if make else None
        )
        if library is not None:
            wire.install(library)
            return
        reason = f"{path} is not there; compile a model with such weights here once"
    except (KernelBuildError, StorageError, OSError, AttributeError) as error:
        reason = str(error)
    if make:
        _FAILED.add(cache_dir)
    _log.warning("packed weights are decoded by plain torch, which is slower: %s", reason)
