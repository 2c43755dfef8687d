"""Formats of before, as they were: each reads its files by its own fields, and says what they are in today's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from gascompile.core.machine import (
    ComputeRate,
    Interference,
    IoSettings,
    Link,
    Machine,
    MemoryRate,
    Pipe,
    Place,
    PlaceKind,
)
from gascompile.core.serial import json_name


@dataclass(frozen=True, slots=True, kw_only=True)
class TierOne:
    """A memory of ``gascompile.machine/1``, whose name was its kind."""

    size_bytes: int = field(metadata=json_name("bytes"))
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineOne:
    """``gascompile.machine/1``: memories by name, of which ``gpu`` and ``cpu`` alone could compute."""

    FORMAT: ClassVar[str] = "gascompile.machine/1"

    name: str
    tiers: Mapping[str, TierOne]
    links: tuple[Link, ...]
    pipes: tuple[Pipe, ...] = ()
    rates: tuple[ComputeRate, ...] = ()
    memory: tuple[MemoryRate, ...] = ()
    io: IoSettings = field(default_factory=IoSettings)
    interference: Interference = field(default_factory=Interference)
    backend: str = ""

    def now(self) -> Machine:
        """Return the machine with its memories as places."""
        return Machine(
            name=self.name,
            places=tuple(
                Place(
                    name=name,
                    kind=next((kind for kind in PlaceKind if kind == name), PlaceKind.OTHER),
                    size_bytes=tier.size_bytes,
                    source=tier.source,
                )
                for name, tier in self.tiers.items()
            ),
            links=self.links,
            pipes=self.pipes,
            rates=self.rates,
            memory=self.memory,
            io=self.io,
            interference=self.interference,
            backend=self.backend,
        )
