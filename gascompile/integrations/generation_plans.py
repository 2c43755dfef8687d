"""The two plans of generation, prefill and decode, made to share weights, arena and budget.

Decode is planned first, as it runs once per token, with as much of the budget left free as prefill's
larger activations need. Prefill is then planned onto decode's arena and resident weights. Where a long
prefill does not fit, shorter ones are tried; at the smallest budgets decode reads the prompt as well.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from gascompile.api.compile import Job
from gascompile.api.device_budget import graphs_room_bytes, placed_bytes
from gascompile.api.unit import Unit
from gascompile.capture.to_program import Capture
from gascompile.core import serial
from gascompile.core.errors import FormatError, InfeasiblePlanError, StorageError
from gascompile.core.workload import TensorKind, Workload
from gascompile.machines.op_memory import annotate_memory
from gascompile.passes.model.liveness import liveness

_log = logging.getLogger("gascompile")

_SHRINK = 4
_SHORTEST = 3
"""Fewer tokens than this gain nothing over decode, and a dynamic dimension starts at two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """How prefill and decode share a budget; remembered, so that a second start captures nothing."""

    FORMAT: ClassVar[str] = "gascompile.generation/1"

    prefill_tokens: int
    """Most tokens of one prefill; 1 where decode reads the prompt token by token."""
    decode_reserved_bytes: int = 0
    prefill_reserved_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """The plans of a generator."""

    decode: Unit
    prefill: Unit | None
    prefill_tokens: int


@dataclass(frozen=True, kw_only=True)
class _Stage(Job):
    """A job for one of the two programs, which captures it once."""

    prefix: str
    """Sets the constants of this program apart from those of the other."""
    tokens: int
    captures: list[Capture] = field(default_factory=list)

    @property
    def inputs(self) -> dict[str, Any]:
        """Example inputs of the longest call."""
        return {
            "input_ids": torch.zeros(1, self.tokens, dtype=torch.long),
            "position": torch.tensor(0),
        }

    def capture(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Capture:
        """Trace the model unless that has been done."""
        if not self.captures:
            self.captures.append(_prefixed(Job.capture(self, args, kwargs), self.prefix))
        return self.captures[0]

    def unit(self) -> Unit:
        """Return the verified plan, from the cache where it is there."""
        return self.prepare((), self.inputs)

    def workload(self) -> Workload:
        """Return the planning problem of this program."""
        program = self.capture((), self.inputs).program
        return annotate_memory(program, self.machine, self.config.cache_dir).workload


def plan_generation(job: Job, prefill_tokens: int, *, again: bool = False) -> Units:
    """Return the plans of decode and of a prefill of at most ``prefill_tokens`` tokens.

    ``job.model`` is a ``DecodingStep``. The tokens of one prefill shrink where the budget asks for it. ``again``
    divides the budget anew, as runs have taught more about the memory of ops.

    Raises:
        InfeasiblePlanError: the budget is too small for decode alone; names the smallest feasible one.
        CaptureError: the model cannot be traced.
    """
    decode = _stage(job, 1)
    prints = decode.fingerprint((), decode.inputs, decode.open_checkpoint())
    memo = job.config.cache_dir / "generation" / f"{serial.digest([prints, prefill_tokens])}.json"
    known = None if again else _recall(memo)
    if known is not None:
        return _units(decode, _prefill_stage(job, known.prefill_tokens), known)
    tokens = prefill_tokens
    while tokens >= _SHORTEST:
        prefill = _stage(job, tokens)
        split = _split(decode, prefill)
        try:
            units = _units(decode, prefill, split)
        except InfeasiblePlanError:
            tokens //= _SHRINK
            continue
        _remember(memo, split)
        return units
    split = Split(prefill_tokens=1)
    units = _units(decode, None, split)
    _remember(memo, split)
    return units


def _stage(job: Job, tokens: int) -> _Stage:
    shared = {name: getattr(job, name) for name in Job.__dataclass_fields__}
    shared["in_arena"] = True
    if tokens > 1:
        length = torch.export.Dim("tokens", min=2, max=tokens)
        shared["dynamic_shapes"] = {"input_ids": {1: length}, "position": None}
    return _Stage(**shared, prefix="prefill." if tokens > 1 else "", tokens=tokens)


def _prefill_stage(job: Job, tokens: int) -> _Stage | None:
    return _stage(job, tokens) if tokens > 1 else None


def _units(decode: _Stage, prefill: _Stage | None, split: Split) -> Units:
    first = replace(decode, reserved_bytes=split.decode_reserved_bytes).unit()
    second = None
    if prefill is not None:
        second = replace(
            prefill, reserved_bytes=split.prefill_reserved_bytes, pinned=first.bundle.plan
        ).unit()
    return Units(decode=first, prefill=second, prefill_tokens=split.prefill_tokens)


def _split(decode: _Stage, prefill: _Stage) -> Split:
    """Return what each plan leaves free for the other: its activations, and states it does not know."""
    workloads = (decode.workload(), prefill.workload())
    lives = [liveness(workload) for workload in workloads]
    states = [
        {t.name: t.size_bytes for t in w.tensors if t.kind is TensorKind.STATE} for w in workloads
    ]
    union_bytes = sum((states[0] | states[1]).values())
    # A job adds its own inputs.
    own_bytes = [
        live.peak_bytes + placed_bytes(workload, decode.machine)
        for live, workload in zip(lives, workloads, strict=True)
    ]
    needed_bytes = union_bytes + max(own_bytes)
    # Decoding finds what prefill keeps in its arena: it, too, leaves the room that decoding's graphs take.
    room_bytes = graphs_room_bytes(workloads[0], decode.machine, decode.budget)
    return Split(
        prefill_tokens=prefill.tokens,
        decode_reserved_bytes=needed_bytes - lives[0].state_bytes - own_bytes[0],
        prefill_reserved_bytes=needed_bytes - lives[1].state_bytes - own_bytes[1] + room_bytes,
    )


def _prefixed(captured: Capture, prefix: str) -> Capture:
    """Return ``captured`` with its constants renamed."""
    if not prefix or not captured.constants:
        return captured
    new = {name: f"{prefix}{name}" for name in captured.constants}
    program = captured.program
    program = replace(
        program,
        bindings={node: new.get(name, name) for node, name in program.bindings.items()},
        bound={new.get(name, name): spec for name, spec in program.bound.items()},
        states=frozenset(new.get(name, name) for name in program.states),
    )
    constants = {new[name]: tensor for name, tensor in captured.constants.items()}
    return replace(captured, program=program, constants=constants)


def _recall(memo: Path) -> Split | None:
    if not memo.exists():
        return None
    try:
        return serial.load(Split, memo)
    except (FormatError, StorageError) as error:
        _log.warning("%s cannot be used (%s); planning again", memo, error)
        return None


def _remember(memo: Path, split: Split) -> None:
    try:
        serial.write_atomic(memo, serial.dumps(split))
    except StorageError as error:
        _log.warning("the split of the budget is not kept: %s", error)
