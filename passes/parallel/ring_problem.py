"""Ring problem: what one layer costs on each rank, and how many layers each has room for.

One token at a time goes around: ranks compute one after the other, drives bring parts of layers all the time. A layer
stays in the GPU, or is computed beside it (by the processor, or copied to the GPU, whichever is faster) from parts that
stay in RAM or come from the drive into one of a few slots there. Caches stay where their layer is computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gascompile.core.errors import UnsupportedOpError
from gascompile.core.hosts import Hosts, Rank
from gascompile.core.machine import Link, Machine, PlaceKind
from gascompile.cost_models.formulas.op_time import op_time_s
from gascompile.passes.parallel.chain import Block, Chain

MAX_DEVICES = 64
"""Ranks of one ring. More than that add a hop each for a share of layers that rounds to nothing."""
_DTYPES = ("bfloat16", "float16", "float32")
"""The first that a device has a rate for is what its products run in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RingDevice:
    """One rank, in seconds per layer and in bytes."""

    rank: str
    host: str
    gpu_bytes: int
    ram_bytes: int
    """Its even share of the host's RAM."""
    gpu_s: float
    """Of a layer in the GPU; infinite without one."""
    ram_s: float
    """Of a layer in RAM."""
    load_s: float
    """Of a layer from the drive to RAM, at the rank's share of the drive; infinite without a drive."""
    head_gpu_s: float
    """Of what comes before and after the layers, in the GPU."""
    head_ram_s: float
    on_gpu: bool
    """Layers in RAM are copied to the GPU, which is faster than the processor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RingProblem:
    """A chain on ranks in the order of the ring."""

    chain: Chain
    devices: tuple[RingDevice, ...]
    hops_s: tuple[tuple[float, ...], ...]
    """From rank to rank, for what layers hand on."""
    parts: int = 8
    """Of a layer, that may come from a drive by themselves. [Empirical] With whole layers 70B on home machines took
    1.114 s a token, with eighths 0.625."""

    @property
    def layer_bytes(self) -> int:
        """Weights and states of a layer where it stays."""
        return self.chain.layer.weight_bytes + self.chain.layer.state_bytes

    @property
    def part_bytes(self) -> int:
        """Weights of a part of a layer."""
        return -(-self.chain.layer.weight_bytes // self.parts)

    def free_bytes(self, device: int, head: tuple[int, bool]) -> tuple[int, int]:
        """Return the bytes of GPU and RAM beside the head's; negative where it does not fit.

        Args:
            device: its number.
            head: which device has the head, and whether in its GPU.
        """
        held_by = self.devices[device]
        gpu, ram = held_by.gpu_bytes, held_by.ram_bytes
        if head[0] == device:
            size = self.chain.head_bytes
            # Rows of a table are read from the drive as they are needed; without one, the table lies in memory.
            size += self.chain.table_bytes if math.isinf(held_by.load_s) else 0
            gpu -= size if head[1] else 0
            ram -= 0 if head[1] else size
        return gpu, ram

    def room(self, device: int, head: tuple[int, bool]) -> tuple[int, int]:
        """Return how many whole layers fit in the GPU and in RAM; negative where the head does not."""
        gpu, ram = self.free_bytes(device, head)
        return gpu // self.layer_bytes, ram // self.layer_bytes

    def parts_room(self, device: int, head: tuple[int, bool], beside: int) -> int:
        """Return how many parts fit in RAM beside the caches of ``beside`` layers; negative where those do not."""
        ram = self.free_bytes(device, head)[1] - beside * self.chain.layer.state_bytes
        return (
            ram // self.part_bytes if self.part_bytes else (beside * self.parts if ram >= 0 else -1)
        )

    def heads(self) -> Iterable[tuple[int, bool]]:
        """Yield every device and site that has room for the head; of devices that are the same, the first."""
        seen = set()
        for i, device in enumerate(self.devices):
            for in_gpu in (True, False):
                costs = device.head_gpu_s if in_gpu else device.head_ram_s
                fits = min(self.free_bytes(i, (i, in_gpu))) >= 0
                alike = (device.gpu_bytes, device.ram_bytes, device.gpu_s, device.ram_s)
                key = (*alike, device.load_s, costs, in_gpu)
                if costs < float("inf") and fits and key not in seen:
                    seen.add(key)
                    yield i, in_gpu

    def head_s(self, head: tuple[int, bool]) -> float:
        """Return the seconds of what is not a layer."""
        device = self.devices[head[0]]
        return device.head_gpu_s if head[1] else device.head_ram_s


def ring_problem(chain: Chain, hosts: Hosts) -> RingProblem:
    """Return ``chain`` on every rank of ``hosts``.

    Raises:
        UnsupportedOpError: there are more ranks than one ring takes, or a device has no rate for what it has to do.
    """
    if hosts.num_ranks > MAX_DEVICES:
        raise UnsupportedOpError(
            f"a ring of {hosts.num_ranks} ranks is not planned: {MAX_DEVICES} are the most; for one token at a time "
            f"fewer are as fast, so describe some of the hosts, or plan a training step with --train"
        )
    ranks = list(hosts.ranks())
    devices = tuple(_device(chain, rank) for rank in ranks)
    hops = tuple(tuple(_hop_s(chain, hosts, a, b) for b in ranks) for a in ranks)
    return RingProblem(chain=chain, devices=devices, hops_s=hops)


def _hop_s(chain: Chain, hosts: Hosts, sender: Rank, receiver: Rank) -> float:
    size = chain.layer.out_bytes
    if sender.name == receiver.name:
        return 0.0
    if sender.host == receiver.host:
        assert sender.kind.peers is not None, "checked with the file"
        return sender.kind.peers.transfer_s(size)
    assert hosts.network is not None, "checked with the file"
    return hosts.network.transfer_s(size)


def _device(chain: Chain, rank: Rank) -> RingDevice:
    machine, ranks = rank.kind.machine, rank.kind.ranks
    places = machine.places
    gpu = next((place for place in places if place.kind is PlaceKind.GPU), None)
    cpu = next((place for place in places if place.kind is PlaceKind.CPU), None)
    layer, head = chain.layer, (chain.first, chain.last)
    inf = float("inf")
    gpu_s = block_s(layer, machine, gpu.name) if gpu else inf
    ram_s = block_s(layer, machine, cpu.name) if cpu else inf
    copied_s = inf
    if gpu and cpu and (link := _link(machine, cpu.name, gpu.name)):
        copied_s = gpu_s + link.transfer_time_s(layer.weight_bytes)
    rate = _drive_rate(machine, cpu.name) if cpu else 0.0
    free = {
        place.name: place.size_bytes - machine.library_bytes(place.name) - layer.workspace_bytes
        for place in places
    }
    return RingDevice(
        rank=rank.name,
        host=rank.host,
        gpu_bytes=max(0, free[gpu.name]) if gpu else 0,
        ram_bytes=max(0, free[cpu.name] // ranks) if cpu else 0,
        gpu_s=gpu_s,
        ram_s=min(ram_s, copied_s),
        load_s=layer.weight_bytes * ranks / rate if rate else inf,
        head_gpu_s=sum(block_s(block, machine, gpu.name) for block in head) if gpu else inf,
        head_ram_s=sum(block_s(block, machine, cpu.name) for block in head) if cpu else inf,
        on_gpu=copied_s < ram_s,
    )


def _link(machine: Machine, source: str, target: str) -> Link | None:
    ends = (source, target)
    return next((at for at in machine.links if (at.source_tier, at.target_tier) == ends), None)


def _drive_rate(machine: Machine, memory: str) -> float:
    """Return the bytes per second that all drives bring to ``memory`` together, within the pipes they share."""
    drives = {place.name for place in machine.places if place.kind is PlaceKind.NVME}
    links = [x for x in machine.links if x.target_tier == memory and x.source_tier in drives]
    pipes = {pipe.name: pipe.bandwidth_bytes_per_s for pipe in machine.pipes}
    return together([(link, link.bandwidth_bytes_per_s) for link in links], pipes)


def together(rates: Sequence[tuple[Link, float]], pipes: Mapping[str, float]) -> float:
    """Return the bytes per second of links that all carry something, within the pipes that they share; 0 without links.

    Args:
        rates: links, with what each carries by itself.
        pipes: what each pipe carries.
    """
    alone = [(x, min([rate, *(pipes[name] for name in x.shared)])) for x, rate in rates]
    total = sum(rate for _, rate in alone)
    for name, most in pipes.items():
        total -= max(0.0, sum(rate for x, rate in alone if name in x.shared) - most)
    return max(0.0, total)


def block_s(block: Block, machine: Machine, device: str) -> float:
    """Return the seconds of a block on a device; a block that only says seconds takes them everywhere.

    Raises:
        UnsupportedOpError: the machine has no rate for the device.
    """
    if block.time_s is not None:
        return block.time_s
    if not block.num_ops:
        return 0.0
    rates = {rate.dtype for rate in machine.rates if rate.device == device}
    dtype = next((name for name in _DTYPES if name in rates), None)
    if dtype is None:
        raise UnsupportedOpError(
            f"machine '{machine.name}' has no rate of {' or '.join(_DTYPES)} for '{device}'; add one to its rates"
        )
    seconds = op_time_s(
        flops=block.flops,
        read_bytes=block.moved_bytes,
        write_bytes=0,
        dtype=dtype,
        device=device,
        machine=machine,
    )
    overhead = next(m.op_overhead_s for m in machine.memory if m.device == device)
    return seconds + (block.num_ops - 1) * overhead
