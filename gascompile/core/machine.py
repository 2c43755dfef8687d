"""Machine (``gascompile.machine/1``) and budget: tiers, links, pipes, compute rates, and how much of them to use.

Every number says where it comes from: measured, or which datasheet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from gascompile.core.serial import json_name
from gascompile.core.sizes import align_up, parse_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """A memory: how much it holds."""

    size_bytes: int = field(metadata=json_name("bytes"))
    source: str = ""
    """Where the number comes from: ``measured <date>: <how>`` or ``datasheet: <which>``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A one-way path between two tiers."""

    source_tier: str = field(metadata=json_name("from"))
    target_tier: str = field(metadata=json_name("to"))
    bandwidth_bytes_per_s: float = field(metadata=json_name("bytes_per_second"))
    latency_s: float = field(default=0.0, metadata=json_name("latency_seconds"))
    """Fixed cost of one transfer."""
    shared: tuple[str, ...] = ()
    """Names of the pipes this link shares with others."""
    source: str = ""

    @property
    def name(self) -> str:
        """The link's name in plans and reports, e.g. ``nvme->cpu``."""
        return f"{self.source_tier}->{self.target_tier}"

    def transfer_time_s(self, size_bytes: int) -> float:
        """Seconds that one transfer of ``size_bytes`` occupies the link."""
        return self.latency_s + size_bytes / self.bandwidth_bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipe:
    """Bandwidth that several links share, such as a PCIe switch uplink."""

    name: str
    bandwidth_bytes_per_s: float = field(metadata=json_name("bytes_per_second"))
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RatePoint:
    """What a device reached with products of one arithmetic intensity: few rows are slower than many."""

    flops_per_byte: float
    flops_per_s: float = field(metadata=json_name("flops_per_second"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeRate:
    """Matrix rate of a device for one dtype (torch's name without the ``torch.`` prefix)."""

    device: str
    dtype: str
    flops_per_s: float = field(metadata=json_name("flops_per_second"))
    """The best that any product reaches."""
    source: str = ""
    points: tuple[RatePoint, ...] = ()
    """Rates by growing intensity; without any, ``flops_per_s`` holds for every product."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRate:
    """Bandwidth of a device to its own memory, and the fixed cost of launching one op."""

    device: str
    bandwidth_bytes_per_s: float = field(metadata=json_name("bytes_per_second"))
    op_overhead_s: float = field(default=0.0, metadata=json_name("op_overhead_seconds"))
    source: str = ""
    library_bytes: int = 0
    """What libraries allocate there beside the plan's own: the workspace of cuBLAS. It is part of the budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IoSettings:
    """How the slow tier is read best on this machine, found by the same engine that will read it."""

    num_threads: int = 4
    chunk_bytes: int = 8 << 20
    source: str = ""
    engine: str = "reads"
    """What brings bytes from the drive to a GPU: ``reads`` through pinned buffers, or ``kvikio``."""
    path: str = ""
    """How they came when that was measured, in the engine's words."""
    least_bytes: int = 0
    """Smaller tensors come by ``reads`` even where the engine is another."""

    @property
    def staging_bytes(self) -> int:
        """Host memory between a drive and a device: two chunks for each thread."""
        return 2 * max(1, self.num_threads) * align_up(self.chunk_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class InterferencePoint:
    """Share of every link's speed that is lost while ops of one arithmetic intensity run."""

    flops_per_byte: float
    lost_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Interference:
    """How much ops slow transfers down: readers want the same processors. Without points not at all."""

    points: tuple[InterferencePoint, ...] = ()
    op_s_per_byte: float = 0.0
    """Seconds that ops lose per byte that moves: reading threads take processors from them."""
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Tiers, links and rates of one machine."""

    FORMAT: ClassVar[str] = "gascompile.machine/1"

    name: str
    tiers: Mapping[str, Tier]
    links: tuple[Link, ...]
    pipes: tuple[Pipe, ...] = ()
    rates: tuple[ComputeRate, ...] = ()
    memory: tuple[MemoryRate, ...] = ()
    io: IoSettings = field(default_factory=IoSettings)
    interference: Interference = field(default_factory=Interference)
    backend: str = ""
    """What executes: ``cpu``, ``cuda`` or ``emulated``; empty for the one that the computing tier has."""

    @property
    def compute_backend(self) -> str:
        """The backend that executes: ``cuda`` where a GPU computes, unless it says otherwise."""
        return self.backend or ("cuda" if self.compute_tier == "gpu" else "cpu")

    @property
    def compute_tier(self) -> str:
        """The tier that computes: the GPU where there is one, else RAM."""
        return "gpu" if "gpu" in self.tiers else "cpu"

    def links_into(self, tier: str) -> tuple[Link, ...]:
        """Return the links that end at ``tier``, fastest first."""
        found = [link for link in self.links if link.target_tier == tier]
        return tuple(sorted(found, key=lambda link: -link.bandwidth_bytes_per_s))

    def library_bytes(self, tier: str) -> int:
        """Return what libraries allocate on a tier beside the plan's own."""
        return sum(rate.library_bytes for rate in self.memory if rate.device == tier)

    def link(self, name: str) -> Link:
        """Return the link called ``name`` (``nvme->cpu``); ``KeyError`` when there is none."""
        for link in self.links:
            if link.name == name:
                return link
        raise KeyError(name)


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes the runtime may allocate per tier; ``None`` leaves a tier at what the machine holds.

    Sizes are read by ``sizes.parse_size``: ``Budget(gpu="24GiB", cpu="64GiB")``.
    """

    gpu: int | str | None = None
    cpu: int | str | None = None
    nvme: int | str | None = None
    nvme_path: str | None = None

    def limits_bytes(self, machine: Machine) -> dict[str, int]:
        """Return the limit of every tier of ``machine`` in bytes."""
        given = {"gpu": self.gpu, "cpu": self.cpu, "nvme": self.nvme}
        limits: dict[str, int] = {}
        for tier, spec in machine.tiers.items():
            value = given.get(tier)
            limits[tier] = spec.size_bytes if value is None else parse_size(value)
        return limits

    @staticmethod
    def of(value: Budget | int | str | None, machine: Machine) -> Budget:
        """Return a ``Budget`` from what a user may pass; a bare size means the tier that computes."""
        if isinstance(value, Budget):
            return value
        if value is None:
            return Budget()
        size_bytes = parse_size(value)
        return Budget(gpu=size_bytes) if machine.compute_tier == "gpu" else Budget(cpu=size_bytes)


def without_host_sizes(machine: Machine) -> Machine:
    """Return ``machine`` without the sizes of its host's tiers: of those, a plan knows its budget's limits alone.

    An accelerator's stays: what a run takes beside its budget has to fit there, too.
    """
    return replace(
        machine,
        tiers={
            name: tier if name == "gpu" else replace(tier, size_bytes=0)
            for name, tier in machine.tiers.items()
        },
    )
