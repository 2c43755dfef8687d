"""Sensitivities of a model's weights, measured once per checkpoint and remembered beside the weight store.

The first inputs that a plan is made for decide: plans for other inputs and budgets find what was measured, so
that all of them take the same converted weights.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from torch.utils import _pytree as pytree

from gascompile.bundles.files import Weights
from gascompile.core import serial
from gascompile.core.config import CompileConfig
from gascompile.core.program import Program
from gascompile.core.progress import task
from gascompile.core.remembered import remembered
from gascompile.formats.layout import FORMS, LAYOUT
from gascompile.precision.choice import matrices_to_pack
from gascompile.precision.sensitivity import Sensitivity, measure_sensitivities
from gascompile.precision.sensitivity_walk import Setting, UnmeasurableError
from gascompile.weights.resolve import Resolved

_log = logging.getLogger("gascompile")

_FORMAT = "gascompile.sensitivities/1"
_FOLDER = "sensitivities"


def calibrate(
    program: Program,
    resolved: Resolved,
    inputs: tuple[tuple[Any, ...], Mapping[str, Any]],
    config: CompileConfig,
    limit_bytes: int,
) -> Mapping[str, Sensitivity] | None:
    """Return the sensitivities of the weights that may be packed; ``None`` where they cannot be measured.

    Args:
        program: with its weights as they are computed in.
        resolved: where they lie, as stored, and the values of what lies in no file.
        inputs: positional ones and the others, to measure on if nothing is remembered.
        config: what is measured is kept in a folder of its ``cache_dir``.
        limit_bytes: most that values between ops may take.

    Raises:
        StorageError: a weight cannot be read, or the folder not written to.
    """
    matrices = matrices_to_pack(program)
    weights = resolved.weights
    path = config.cache_dir / _FOLDER / f"{_key(matrices, weights)}.json"
    known = remembered(path, _FORMAT, "the sensitivities", _sensitivities)
    if known is not None and known.keys() == set(matrices):
        return known
    setting = Setting(
        program=program,
        sources=weights.sources,
        held=resolved.held,
        matrices=frozenset(matrices),
        forms=FORMS,
        limit_bytes=limit_bytes,
    )
    try:
        with task("Measuring which weights matter most"):
            measured = measure_sensitivities(
                setting, pytree.tree_leaves((inputs[0], dict(inputs[1])))
            )
    except UnmeasurableError as error:
        _log.warning("the first layers are taken to matter most, as measuring failed: %s", error)
        return None
    data = {name: asdict(value) for name, value in sorted(measured.items())}
    text = json.dumps({"format": _FORMAT, "weights": data}, indent=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    serial.write_atomic(path, text + "\n")
    return measured


def _key(matrices: Sequence[str], weights: Weights) -> str:
    """Return a hash of the weights' files and places; where the files lie does not matter."""
    known = {
        stamp.path: [stamp.digest, stamp.size_bytes, stamp.mtime_ns] for stamp in weights.stamps
    }
    parts = [
        [name, [[known[e.path], e.offset, e.size_bytes] for e in weights.sources[name].extents]]
        for name in sorted(matrices)
    ]
    text = json.dumps([_FORMAT, LAYOUT, list(FORMS), parts])
    return serial.raw_digest(text.encode())


def _sensitivities(data: Any) -> dict[str, Sensitivity]:
    return {
        str(name): Sensitivity(
            gain=float(value["gain"]),
            errors={str(form): float(error) for form, error in value["errors"].items()},
        )
        for name, value in data["weights"].items()
    }
