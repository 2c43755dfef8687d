"""Hosts (``gascompile.hosts/1``): machines with their ranks, and what lies between ranks and between hosts.

A host's machine is what one of its ranks sees when it is alone. GPUs, and links and pipes that only one rank uses,
are each rank's own; every other place, and the pipes that ``shared`` names, are the host's, which its ranks share.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from gascompile.core.machine import Machine, Place, PlaceKind
from gascompile.core.serial import json_name


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderPoint:
    """What a collective of one size reached: bytes that each rank received, by the seconds it took."""

    size_bytes: int = field(metadata=json_name("bytes"))
    bandwidth_bytes_per_s: float = field(metadata=json_name("bytes_per_second"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Interconnect:
    """The way between ranks of a host, or between hosts: as fast in both directions, each by itself."""

    bandwidth_bytes_per_s: float = field(metadata=json_name("bytes_per_second"))
    """Of each end: a rank's, between ranks; a host's, between hosts."""
    latency_s: float = field(default=0.0, metadata=json_name("latency_seconds"))
    """Fixed cost of one message."""
    total_bytes_per_s: float = field(default=0.0, metadata=json_name("total_bytes_per_second"))
    """What all ends share, such as a switch; 0 where nothing is shared."""
    through_memory: bool = False
    """What ranks exchange is written to the host's memory and read from it, beside all else that passes there."""
    points: tuple[LadderPoint, ...] = ()
    """Measured collectives by growing size; without any, the bandwidth holds for every size."""
    source: str = ""

    def rate_at(self, size_bytes: float) -> float:
        """Return bytes per second of a collective in which each end receives ``size_bytes``.

        Between two points the seconds grow linearly with the bytes; below the first, the rate stays the same, and
        beyond the last.
        """
        if not self.points:
            return self.bandwidth_bytes_per_s
        sizes = [point.size_bytes for point in self.points]
        i = bisect_left(sizes, size_bytes)
        if i in {0, len(sizes)}:
            return self.points[min(i, len(sizes) - 1)].bandwidth_bytes_per_s
        before, after = self.points[i - 1], self.points[i]
        share = (size_bytes - before.size_bytes) / (after.size_bytes - before.size_bytes)
        begun_s = before.size_bytes / before.bandwidth_bytes_per_s
        ended_s = after.size_bytes / after.bandwidth_bytes_per_s
        seconds = begun_s + share * (ended_s - begun_s)
        return size_bytes / seconds if seconds > 0 else after.bandwidth_bytes_per_s

    def transfer_s(self, size_bytes: float, *, ends: int = 1) -> float:
        """Return the seconds in which each of ``ends`` at once receives ``size_bytes``."""
        rate = self.rate_at(size_bytes)
        if self.total_bytes_per_s:
            rate = min(rate, self.total_bytes_per_s / ends)
        return self.latency_s + size_bytes / rate if size_bytes > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One kind of host: its machine as one rank sees it, how many ranks it has, and how many such hosts there are."""

    name: str
    machine: Machine
    ranks: int = 1
    count: int = 1
    shared: tuple[str, ...] = ()
    """Pipes of the machine that the host's ranks share, beside its places: a switch, DRAM, a drive's own."""
    peers: Interconnect | None = field(default=None, metadata={"left_out": True})
    """Between its ranks; missing where a host has one rank."""


class Rank(NamedTuple):
    """One rank of one host."""

    name: str
    """``h0.r1``, or ``h0`` where the host has one rank."""
    host: str
    kind: Host
    number: int
    """In its host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """Hosts and the network between them."""

    FORMAT: ClassVar[str] = "gascompile.hosts/1"

    name: str
    hosts: tuple[Host, ...]
    network: Interconnect | None = field(default=None, metadata={"left_out": True})
    """Between hosts; missing where there is one."""

    @property
    def num_hosts(self) -> int:
        """All hosts of all kinds."""
        return sum(host.count for host in self.hosts)

    @property
    def num_ranks(self) -> int:
        """All ranks of all hosts."""
        return sum(host.count * host.ranks for host in self.hosts)

    def ranks(self) -> Iterator[Rank]:
        """Yield every rank, host by host."""
        for kind in self.hosts:
            for number in range(kind.count):
                host = f"{kind.name}{number}" if kind.count > 1 else kind.name
                for index in range(kind.ranks):
                    yield Rank(f"{host}.r{index}" if kind.ranks > 1 else host, host, kind, index)

    def places(self) -> Iterator[tuple[str, Place]]:
        """Yield every place with its full name: ``h0.r1.gpu`` is a rank's own, ``h0.cpu`` is its host's."""
        for rank in self.ranks():
            for place in rank.kind.machine.places:
                if place.kind is PlaceKind.GPU:
                    yield f"{rank.name}.{place.name}", place
                elif rank.number == 0:
                    yield f"{rank.host}.{place.name}", place


def equal_ranks(machine: Machine, count: int) -> Hosts:
    """Return one host of ``count`` equal ranks, each of which sees ``machine``.

    They share all its pipes and all its places but the GPU. Between ranks without a link of their own, bytes go
    through the host's memory: out over one rank's link, in over the other's.
    """
    into = [link for link in machine.links if link.target_tier == machine.compute_tier]
    memory = {rate.device: rate.bandwidth_bytes_per_s for rate in machine.memory}
    dram = memory.get("cpu", 0.0)
    rate = max((link.bandwidth_bytes_per_s for link in into), default=0.0)
    ways = [rate] if rate and machine.compute_tier != "cpu" else []
    # A copy through shared memory is written once and read once.
    ways += [dram / 2] if dram else []
    peers = Interconnect(
        bandwidth_bytes_per_s=min(ways, default=1e9),
        latency_s=2e-5,
        total_bytes_per_s=dram / 2,
        through_memory=True,
        source="assumed: through the host's memory, at the slower of a rank's link and half of DRAM; 20 us",
    )
    shared = tuple(pipe.name for pipe in machine.pipes if not pipe.name.startswith("gpu"))
    host = Host(
        name="h0", machine=machine, ranks=count, shared=shared, peers=peers if count > 1 else None
    )
    return Hosts(name=f"{count} ranks on {machine.name}", hosts=(host,))
