"""Kept captures: programs as they were traced, beside the plans of the cache, for plans that are still to be made.

A capture is found by what it was made of, which is neither a budget nor an option of planning, and used where what
it depends on is as it was. A damaged one is a miss with a warning, never an error.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import fx

from gascompile.capture.record.dependencies import Dependencies
from gascompile.capture.saved.program_io import program_from_json, program_to_json
from gascompile.capture.saved.values_io import set_values, values_to_json
from gascompile.core import serial
from gascompile.core.errors import FormatError, StorageError, UnsupportedOpError
from gascompile.core.files import MAX_JSON_BYTES, read_regular
from gascompile.core.own_files import fault_of, own_cache
from gascompile.core.program import Dim, Program
from gascompile.weights.memory_layout import with_strides

_log = logging.getLogger("gascompile")
_FORMAT: Final = "gascompile.capture/1"
_TRACE, _HELD = "capture.json", "held.safetensors"
_MOST_HELD_BYTES = 1 << 26
"""A capture with larger constants is not kept: reading them would take as long as tracing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptCapture:
    """A traced program, and what it rests on."""

    program: Program
    """With the values of its nodes."""
    held: Mapping[str, torch.Tensor]
    """Constants of the trace, by name."""
    known: Dependencies
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What the program does not say by itself; JSON data."""


def captures_dir(cache_dir: Path) -> Path:
    """Return the folder of all kept captures."""
    return cache_dir / "captures"


def trace_data(program: Program) -> dict[str, Any]:
    """Return a program and the values of its nodes as JSON data; empty where it holds what no file can.

    Values whose sizes are not fixed follow from the program.
    """
    try:
        values = None if _is_ranged(program) else values_to_json(_valued(program))
        return {"program": program_to_json(program), "values": values}
    except UnsupportedOpError as error:
        _log.info("the capture of %s is not kept: %s", program.name, error)
        return {}


def write_capture(
    folder: Path,
    trace: Mapping[str, Any],
    held: Mapping[str, torch.Tensor],
    known: Dependencies,
    facts: Mapping[str, Any],
) -> None:
    """Keep a capture as ``folder``; one that cannot be written costs time alone.

    Args:
        folder: its place.
        trace: from ``trace_data``.
        held: constants of the trace.
        known: what it depends on.
        facts: JSON data that the program does not say.
    """
    if not trace or sum(tensor.nbytes for tensor in held.values()) > _MOST_HELD_BYTES:
        return
    constants = save_tensors({name: t.detach().contiguous().clone() for name, t in held.items()})
    rest = {"facts": facts, "known": serial.to_json(known), "held": serial.raw_digest(constants)}
    own = {"format": _FORMAT, "key": folder.name}
    text = json.dumps({**own, **trace, **rest}, separators=(",", ":")).encode()
    contents = {_TRACE: b"\n".join([serial.raw_digest(text).encode(), text]), _HELD: constants}
    temporary = ""
    try:
        own_cache(folder.parent)
        temporary = tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}.")
        for name, raw in contents.items():
            (Path(temporary) / name).write_bytes(raw)
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(temporary, folder)
    except OSError as error:
        if not folder.exists():  # Losing a race against an equal writer is no error.
            _log.warning("the capture %s is not kept: %s", folder.name, error)
    finally:
        if temporary:
            shutil.rmtree(temporary, ignore_errors=True)


def read_capture(folder: Path) -> KeptCapture | None:
    """Return the capture that is kept as ``folder``; ``None`` where there is none or it cannot be used."""
    try:
        fault = fault_of(folder.parent.stat()) or fault_of(folder.stat())
    except OSError:
        return None
    if not fault:
        try:
            return _read(folder)
        except (FormatError, StorageError) as error:
            fault = str(error)
    _log.warning("the kept capture %s is not used: %s; capturing again", folder.name, fault)
    shutil.rmtree(folder, ignore_errors=True)
    return None


def _read(folder: Path) -> KeptCapture:
    digest, _, text = read_regular(folder / _TRACE, max_bytes=MAX_JSON_BYTES).partition(b"\n")
    if serial.raw_digest(text) != digest.decode(errors="replace"):
        raise FormatError("its checksum differs")
    data = serial.parse_json(text, where=_TRACE)
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise FormatError(f"it is not of the format {_FORMAT!r}")
    if data.get("key") != folder.name:
        raise FormatError("it was kept under another name")
    raw = read_regular(folder / _HELD, max_bytes=2 * _MOST_HELD_BYTES)
    if serial.raw_digest(raw) != data["held"]:
        raise FormatError("the checksum of its constants differs")
    program = program_from_json(data["program"], where=_TRACE, allow_code=True)  # written here
    _set_values(program, data["values"])
    try:
        held = {n: with_strides(t, program.bound[n]) if n in program.bound else t
                for n, t in load_tensors(raw).items()}  # fmt: skip
    except (SafetensorError, ValueError, RuntimeError) as error:
        raise FormatError(f"its constants are damaged ({error})") from error
    known = serial.from_json(Dependencies, data["known"], where=_TRACE)
    return KeptCapture(program=program, held=held, known=known, facts=data["facts"])


def _set_values(program: Program, data: Any) -> None:
    if not _is_ranged(program):
        set_values(_valued(program), data)
        return
    from gascompile.passes.graph.ranged_values import ranged_values  # it brings torch's tracers

    try:
        values = ranged_values(program)
    except UnsupportedOpError as error:
        raise FormatError(f"what its nodes give is not known ({error})") from error
    for node, value in values.items():
        node.meta["val"] = value


def _is_ranged(program: Program) -> bool:
    return any(isinstance(size, Dim) for spec in program.inputs for size in spec.shape)


def _valued(program: Program) -> Sequence[fx.Node]:
    """Return the nodes that give values, in the order of files: of inputs the bound ones come first."""
    nodes = {node.name: node for node in program.graph_module.graph.nodes}
    first = (*program.bindings, *(spec.name for spec in program.inputs))
    return [*(nodes[name] for name in first), *program.op_nodes()]
