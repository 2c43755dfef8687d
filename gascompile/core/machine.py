"""Machine (``gascompile.machine/2``): places, links, pipes and compute rates.

Every number says where it comes from: measured, or which datasheet.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import ClassVar

from gascompile.core.serial import json_name
from gascompile.core.sizes import align_up


class PlaceKind(StrEnum):
    """What a memory is: it says which of a machine's places can compute."""

    GPU = "gpu"
    CPU = "cpu"
    NVME = "nvme"
    OTHER = "other"
    """Holds bytes, and nothing else is known of it."""


def kind_by_name(name: str) -> PlaceKind | None:
    """Return the kind that a place's name says: ``gpu``, ``r0.gpu`` and ``h0.nvme1`` do; ``None`` for ``pool``."""
    said = name.rpartition(".")[2].rstrip("0123456789")
    return next((kind for kind in PlaceKind if kind == said), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A memory: what it is called, what it is and how much it holds."""

    name: str
    kind: PlaceKind
    size_bytes: int = field(metadata=json_name("bytes"))
    source: str = ""
    """Where the number comes from: ``measured <date>: <how>`` or ``datasheet: <which>``."""

    @staticmethod
    def named(name: str, size_bytes: int, *, source: str = "") -> Place:
        """Return a place of the kind that its name says; raises ``ValueError`` where it says none."""
        kind = kind_by_name(name)
        if kind is None:
            known = ", ".join(PlaceKind)
            raise ValueError(
                f"the name '{name}' says no kind of memory; give kind=, one of {known}"
            )
        return Place(name=name, kind=kind, size_bytes=size_bytes, source=source)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A one-way path between two places."""

    source_tier: str = field(metadata=json_name("from"))
    target_tier: str = field(metadata=json_name("to"))
    bandwidth_bytes_per_s: float = field(metadata=json_name("bytes_per_second"))
    latency_s: float = field(default=0.0, metadata=json_name("latency_seconds"))
    """Fixed cost of one transfer."""
    shared: tuple[str, ...] = ()
    """Names of the pipes this link shares with others."""
    pipe_bytes_per_byte: float | None = field(default=None, metadata={"left_out": True})
    """What a byte takes of those pipes, 1 where it is ``None``: a written one keeps a drive from several to read."""
    source: str = ""

    @property
    def name(self) -> str:
        """The link's name in plans and reports, e.g. ``nvme->cpu``."""
        return f"{self.source_tier}->{self.target_tier}"

    def transfer_time_s(self, size_bytes: int) -> float:
        """Seconds that one transfer of ``size_bytes`` occupies the link."""
        return self.latency_s + size_bytes / self.bandwidth_bytes_per_s

    def pipe_bytes(self, size_bytes: float) -> float:
        """Bytes that ``size_bytes`` take of the pipes which this link shares."""
        return size_bytes * (1.0 if self.pipe_bytes_per_byte is None else self.pipe_bytes_per_byte)


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
    """Share of speed that is lost beside ops of one arithmetic intensity."""

    flops_per_byte: float
    lost_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Interference:
    """How much ops slow transfers down: readers want the same processors. Without points not at all."""

    points: tuple[InterferencePoint, ...] = ()
    """Of every link's speed."""
    op_s_per_byte: float = 0.0
    """Seconds that ops lose per byte that moves: reading threads take processors from them."""
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contention:
    """How much ops of processors that compute at once slow each other down, and what it takes them to meet."""

    points: tuple[InterferencePoint, ...]
    """Of an op's own speed, while another processor is at ops of the same kind."""
    source: str = ""
    start_s: float = field(default=0.0, metadata=json_name("start_seconds"))
    """From the beginning of an iteration until another processor is at its first op."""
    give_s: float = field(default=0.0, metadata=json_name("give_seconds"))
    """Of a processor, for a copy between two of them that it hands over."""
    give_s_per_byte: float = field(default=0.0, metadata=json_name("give_seconds_per_byte"))
    wake_s: float = field(default=0.0, metadata=json_name("wake_seconds"))
    """From the end of such a copy until who waits for it goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Power:
    """What a processor draws."""

    device: str
    """The place that it computes on."""
    busy_w: float = field(metadata=json_name("busy_watts"))
    """While it runs ops, its memory included."""
    idle_w: float = field(metadata=json_name("idle_watts"))
    """The rest of the time."""
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkEnergy:
    """What moving a byte over a link takes beside the power of processors."""

    link: str
    """Its name, such as ``nvme->cpu``."""
    joules_per_byte: float
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergyModel:
    """What ``plan_energy`` needs to know of a machine."""

    processors: tuple[Power, ...]
    links: tuple[LinkEnergy, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Places, links and rates of one machine."""

    FORMAT: ClassVar[str] = "gascompile.machine/2"

    name: str
    places: tuple[Place, ...]
    links: tuple[Link, ...]
    pipes: tuple[Pipe, ...] = ()
    rates: tuple[ComputeRate, ...] = ()
    memory: tuple[MemoryRate, ...] = ()
    io: IoSettings = field(default_factory=IoSettings)
    interference: Interference = field(default_factory=Interference)
    backend: str = ""
    """What executes: ``cpu``, ``cuda`` or ``emulated``; empty for the one that the computing tier has."""
    energy: EnergyModel | None = field(default=None, metadata={"left_out": True})
    """``None`` where nobody has said what the machine draws."""
    contention: Contention | None = field(default=None, metadata={"left_out": True})
    """``None`` where processors have nothing in common, or nobody has measured it."""

    @staticmethod
    def older(named: str) -> type | None:
        """Return what reads the format ``named``, one of before; see ``serial``."""
        from gascompile.core.older_formats import MachineOne

        return {MachineOne.FORMAT: MachineOne}.get(named)

    @property
    def tiers(self) -> Mapping[str, Place]:
        """The places by name, in their order."""
        return {place.name: place for place in self.places}

    @property
    def compute_backend(self) -> str:
        """The backend that executes: ``cuda`` where a GPU computes, unless it says otherwise."""
        return self.backend or ("cuda" if self._computes_by_kind().kind is PlaceKind.GPU else "cpu")

    @property
    def compute_tier(self) -> str:
        """The place that computes: the GPU where there is one, else RAM."""
        return self._computes_by_kind().name

    def _computes_by_kind(self) -> Place:
        """Return the first GPU, else the first RAM; ``check_machine`` sees to it that there is one, and one alone."""
        places = self.places
        for kind in (PlaceKind.GPU, PlaceKind.CPU):
            for place in places:
                if place.kind is kind:
                    return place
        raise ValueError(f"machine '{self.name}' has no place of the kind gpu or cpu that computes")

    def with_place(self, place: Place) -> Machine:
        """Return the machine with ``place`` in the stead of the one of its name, or added at the end."""
        known = any(own.name == place.name for own in self.places)
        kept = tuple(place if own.name == place.name else own for own in self.places)
        return replace(self, places=kept if known else (*kept, place))

    def with_bandwidths(self, factor: float) -> Machine:
        """Return the machine with links and pipes of so much of their bandwidth."""
        links = tuple(
            replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * factor)
            for link in self.links
        )
        pipes = tuple(
            replace(pipe, bandwidth_bytes_per_s=pipe.bandwidth_bytes_per_s * factor)
            for pipe in self.pipes
        )
        return replace(self, links=links, pipes=pipes)

    def with_drives(self, factor: float, names: Collection[str] = ()) -> Machine:
        """Return the machine with drives of so much of their bandwidth: their links, and pipes that only those share.

        Args:
            factor: of the bandwidth.
            names: of the places; all of the kind ``nvme`` where it is empty.
        """
        places = set(names) or {x.name for x in self.places if x.kind is PlaceKind.NVME}
        own = {x.name for x in self.links if places & {x.source_tier, x.target_tier}}
        others = {pipe for x in self.links if x.name not in own for pipe in x.shared}
        pipes = {pipe for x in self.links if x.name in own for pipe in x.shared} - others
        faster = self.with_bandwidths(factor)
        of_links = zip(self.links, faster.links, strict=True)
        of_pipes = zip(self.pipes, faster.pipes, strict=True)
        return replace(
            self,
            links=tuple(other if x.name in own else x for x, other in of_links),
            pipes=tuple(other if x.name in pipes else x for x, other in of_pipes),
        )

    def links_into(self, tier: str) -> tuple[Link, ...]:
        """Return the links that end at ``tier``, fastest first."""
        links = [link for link in self.links if link.target_tier == tier]
        return tuple(sorted(links, key=lambda link: -link.bandwidth_bytes_per_s))

    def link_from(self, tier: str) -> Link | None:
        """Return the fastest link from ``tier`` to where ops run; ``None`` where there is none."""
        links = self.links_into(self.compute_tier)
        return next((link for link in links if link.source_tier == tier), None)

    def checkpoint_link(self) -> Link | None:
        """Return the link that bytes of checkpoints come over: the fastest from a drive, else the fastest of all."""
        links, places = self.links_into(self.compute_tier), self.tiers
        drives = (link for link in links if places[link.source_tier].kind is PlaceKind.NVME)
        return next(drives, next(iter(links), None))

    def two_hops(self) -> tuple[tuple[Link, Link], ...]:
        """Return the ways in two hops to where ops run: from a place with a slower link of its own, over one nearer.

        The first link of a pair leads to the place in between, the second one on from there.
        """
        last = self.links_into(self.compute_tier)
        return tuple(
            (feed, push)
            for push in last
            for feed in self.links
            if feed.target_tier == push.source_tier
            and any(
                direct.source_tier == feed.source_tier
                and direct.bandwidth_bytes_per_s < push.bandwidth_bytes_per_s
                for direct in last
            )
        )

    def library_bytes(self, tier: str) -> int:
        """Return what libraries allocate on a tier beside the plan's own."""
        return sum(rate.library_bytes for rate in self.memory if rate.device == tier)

    def link(self, name: str) -> Link:
        """Return the link called ``name`` (``nvme->cpu``); ``KeyError`` when there is none."""
        for link in self.links:
            if link.name == name:
                return link
        raise KeyError(name)


def without_host_sizes(machine: Machine) -> Machine:
    """Return ``machine`` without the sizes of its host's places: of those, a plan knows its budget's limits alone.

    An accelerator's stays: what a run takes beside its budget has to fit there, too.
    """
    return replace(
        machine,
        places=tuple(
            place if place.kind is PlaceKind.GPU else replace(place, size_bytes=0)
            for place in machine.places
        ),
    )
