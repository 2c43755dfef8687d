"""The library of products with weights on the wire: compiled once per processor and kept; without it, plain torch."""

from __future__ import annotations

import importlib.resources
import logging
from collections.abc import Mapping
from pathlib import Path

from gascompile import serial, wire_ops
from gascompile.errors import StorageError
from gascompile.fusion_build import KernelBuildError, compile_library, processor_features
from gascompile.packing import LAYOUT
from gascompile.runtime import wire

_log = logging.getLogger("gascompile")

_FLAGS = ("-O3", "-march=native", "-fopenmp", "-fno-exceptions", "-nodefaultlibs")
"""Without the OpenMP library itself: torch has loaded one, and two would each keep threads of their own."""


def use_wire_kernels(forms: Mapping[str, object], cache_dir: Path, *, make: bool) -> None:
    """Have products with weights on the wire computed by compiled code from now on, if they can be.

    Args:
        forms: of a program's weights; nothing is done where all move as they are computed in.
        cache_dir: where the library is kept, in ``native/``.
        make: compile it if it is not there; otherwise plain torch serves, which takes two to three times as long.
    """
    if not forms or wire_ops.kernels_for() is not None:
        return
    source = importlib.resources.files("gascompile.runtime").joinpath(wire.SOURCE).read_text()
    digest = serial.digest([source, LAYOUT, list(_FLAGS), processor_features()])
    path = cache_dir / "native" / f"wire-{digest[:16]}.so"
    try:
        if path.exists():
            try:
                wire.install(path)
            except (OSError, AttributeError) as error:
                _log.warning("%s is damaged (%s) and is compiled again", path, error)
            else:
                return
        if make:
            serial.write_atomic(path, compile_library(source, flags=_FLAGS))
            wire.install(path)
    except (KernelBuildError, StorageError, OSError, AttributeError) as error:
        _log.warning("weights on the wire are decoded by plain torch, which is slower: %s", error)
