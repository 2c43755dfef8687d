"""Workload (``gascompile.workload/1``): ops in execution order and the tensors that they read and write.

No torch in it: a planning problem that can be a file. JSON names that differ from the Python ones stand in the
field's metadata.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar

from gascompile.core.serial import json_name


class TensorKind(StrEnum):
    """What a tensor is to the model; decides whether it persists and whether it is ever dirty."""

    WEIGHT = "weight"
    ACTIVATION = "activation"
    GRADIENT = "gradient"
    STATE = "state"
    INPUT = "input"
    OUTPUT = "output"
    WORKSPACE = "workspace"


PERSISTENT = frozenset({TensorKind.WEIGHT, TensorKind.STATE})
"""Kinds of tensors that outlive an iteration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forms:
    """In which form a weight lies in its file, moves, and is computed in: ``float32``, ``int8`` and so on."""

    stored: str
    wire: str
    compute: str
    interleaved_heads: int | None = field(default=None, metadata={"left_out": True})
    """Heads whose rows lie pair by pair, as ``WeightSource`` has it; the graph brings results in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor of a workload. Aliases (views) are folded into the tensor whose storage they share."""

    name: str
    size_bytes: int = field(metadata=json_name("bytes"))
    """Bytes of the transfer format: what moves, and what lies in the arena."""
    kind: TensorKind
    forms: Forms | None = field(default=None, metadata={"left_out": True})
    """Set where the tensor moves in another form than it is computed in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpSpec:
    """One op in execution order. ``reads`` and ``writes`` name storages, never views of them."""

    name: str
    time_s: Mapping[str, float] = field(metadata=json_name("seconds"))
    """Seconds per device that can run the op; device names are tier names."""
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    workspace_bytes: int = 0
    flops: int = 0
    read_bytes: int = 0
    write_bytes: int = 0
    splits: Mapping[str, int] = field(default_factory=dict, metadata={"left_out": True})
    """Weights along whose rows the op may be split, with the number of rows: a linear's output features."""
    cuts: Mapping[str, int] = field(default_factory=dict, metadata={"left_out": True})
    """The weight, and the bias if any, along whose rows the op may be divided among processors, with the number of
    rows: each part makes a tensor of its own. Of a pointwise op the results that it reads, whose parts it may take as
    they are. Empty where that was not asked for."""
    gather_tier: str = field(default="", metadata={"left_out": True})
    """Where gathered rows lie; empty for the usual tier."""
    gathers: Mapping[str, int] = field(default_factory=dict, metadata={"left_out": True})
    """Weights of which the op needs only some rows, with the bytes that it needs: an embedding's."""
    patches: Mapping[str, int] = field(default_factory=dict, metadata={"left_out": True})
    """States among ``writes`` that it changes a part of, with the bytes of the pages of that part: a cache's rows."""

    @property
    def arithmetic_intensity(self) -> float:
        """FLOPs per byte read or written; 0 for an op that moves nothing."""
        moved_bytes = self.read_bytes + self.write_bytes
        return self.flops / moved_bytes if moved_bytes else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The planning problem: ops in execution order over tensors. No torch in it."""

    FORMAT: ClassVar[str] = "gascompile.workload/1"

    name: str
    repeats: bool
    """Iterations follow each other: weights and states persist, a prefetch may cross the end."""
    tensors: tuple[TensorSpec, ...]
    ops: tuple[OpSpec, ...]
