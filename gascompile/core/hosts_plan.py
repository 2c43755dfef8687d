"""Plan over hosts (``gascompile.hosts-plan/1``): who has which layers or shards, how long it takes and what binds.

It is a decision with its proof, not yet steps: what runs it makes the steps. It holds nothing that depends on how
long the search took, so equal inputs give equal plans, by ``digest``, on every rank.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from gascompile.core import serial
from gascompile.core.hosts import Hosts
from gascompile.core.serial import json_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Layers that follow each other on a rank."""

    first: int
    last: int
    """Of the workload's layers, from 0 on; the last is part of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What one rank of a ring has."""

    rank: str
    gpu_layers: int
    """Layers that stay in the GPU."""
    ram_layers: int
    """Layers that are computed from RAM."""
    windows: tuple[Window, ...]
    """One per round; a rank with less layers than rounds is left out of some."""
    gpu_bytes: int
    cpu_bytes: int
    streamed_bytes: int
    """Of the layers in RAM, what its drive brings for every token."""
    slot_bytes: int
    """Room in RAM for that."""
    compute_s: float = field(metadata=json_name("compute_seconds"))
    drive_s: float = field(metadata=json_name("drive_seconds"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardGroup:
    """Layers of a training step that are treated alike, on every rank."""

    layers: int
    """How many."""
    params_over: int
    """Ranks that hold one copy of the parameters between them; 1: whole on each."""
    params_home: str
    states_over: int
    """Ranks that hold gradients' sums and optimizer state between them."""
    states_home: str
    zero_stage: int
    """ZeRO's name of it: 0 nothing, 1 states and gradients' sums, 3 parameters, too, are sharded."""
    keeps: bool
    """Parameters stay gathered from forward to backward."""
    activations: str
    """Where what backward needs waits: a kind of place, or ``recompute``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How long the busiest of one kind of resources is at work in an iteration."""

    resource: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HostsPlan:
    """Who does what, and what is proven about it."""

    FORMAT: ClassVar[str] = "gascompile.hosts-plan/1"

    workload: str
    workload_digest: str
    hosts: Hosts
    kind: str
    """``ring``: a token goes from rank to rank; ``shards``: a training step of rows and shards."""
    strategy: str
    num_layers: int
    rounds: int = 1
    """How often a token goes around the ring."""
    head: str = ""
    """The rank that has what comes before and after the layers."""
    stages: tuple[Stage, ...] = ()
    groups: tuple[ShardGroup, ...] = ()
    peak_bytes: Mapping[str, int] = field(default_factory=dict)
    """Of the fullest place of each kind."""
    predicted_s: float = field(metadata=json_name("predicted_seconds"))
    lower_bound_s: float = field(metadata=json_name("lower_bound_seconds"))
    holds_over: str
    """What the bound is a bound of, in words."""
    binding: str
    loads: tuple[Load, ...] = ()
    single_s: float | None = field(
        default=None, metadata={"json": "single_seconds", "left_out": True}
    )
    """The same on the best rank alone, where it can."""
    single_rank: str = ""
    notes: tuple[str, ...] = ()

    @property
    def gap(self) -> float:
        """How much faster than this plan another may be, as a share of its time."""
        return max(0.0, 1 - self.lower_bound_s / self.predicted_s) if self.predicted_s > 0 else 0.0

    @property
    def digest(self) -> str:
        """What ranks compare before anything runs."""
        return serial.digest(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON; raises ``StorageError``."""
        serial.write_output(path, serial.dumps(self))

    @staticmethod
    def load(path: str | os.PathLike[str]) -> HostsPlan:
        """Read a plan; raises ``FormatError`` or ``StorageError``."""
        from gascompile.core.checks.hosts_plan import check_hosts_plan

        plan = serial.load(HostsPlan, path)
        check_hosts_plan(plan, where=f"{os.fspath(path)}: $")
        return plan
