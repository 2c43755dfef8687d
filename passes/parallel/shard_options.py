"""Shard options: every way to treat a layer of a training step, and what it costs each rank.

All ranks are equal and do the same, so that one rank stands for all: what a host's ranks share, each has an even part
of. Seconds are per layer and phase on the lanes below; bytes are per rank in its GPU, per host in RAM and on drives.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from gascompile.core.errors import UnsupportedOpError
from gascompile.core.hosts import Host, Hosts, Interconnect
from gascompile.core.machine import Link, PlaceKind
from gascompile.passes.parallel.chain import Block
from gascompile.passes.parallel.ring_problem import block_s, together

COMPUTE = "compute"
LANES = (
    "peers", "network", "to gpu", "from gpu", "dram", "drive read", "drive write",
)  # fmt: skip
"""What works beside compute: ways between ranks and places, and the host's memory, which also updates on the host."""
FORWARD, BACKWARD = 0, 1
NEEDED, LEFT = 0, 1
"""Before a layer's compute, and after it."""
Loads = tuple[float, float, float, float]
"""Seconds of a lane: needed in forward, left by it, needed in backward, left by it."""
_PASSES = 2
"""Times that memory is passed by what is updated in it, or exchanged through it: written and read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What a training step has beside its forward pass, in bytes per parameter."""

    param_bytes: int = 2
    """Of the forward pass's weights, and of their gradients."""
    state_bytes: int = 12
    """Master copy and two moments in float32: Adam's."""
    backward: float = 2.0
    """Of the forward pass's seconds."""

    @staticmethod
    def adam(param_bytes: int) -> Training:
        """Return Adam over parameters of a size: two moments in float32 or wider, a master copy of narrower ones."""
        wide = max(4, param_bytes)
        return Training(
            param_bytes=param_bytes, state_bytes=2 * wide + (4 if param_bytes < 4 else 0)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """One rank's ways and places, with its even part of what is shared."""

    host: Host
    num_hosts: int
    network: Interconnect | None
    rates: dict[str, float]
    """Bytes per second per rank of the ways to and from the GPU, of DRAM and of drives; missing where there is none."""
    sizes: dict[str, int]
    """Bytes: ``gpu`` per rank, ``cpu`` and ``nvme`` per host."""
    gpu_bytes_per_s: float
    """Of the GPU's own memory."""

    @property
    def ranks(self) -> int:
        """Of a host."""
        return self.host.ranks

    @property
    def total(self) -> int:
        """All ranks."""
        return self.ranks * self.num_hosts


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One way to treat a layer."""

    params_over: int
    params_home: str
    states_over: int
    states_home: str
    direct: bool
    """Ranks exchange through the host's memory, not with each other."""
    keeps: bool
    activations: str
    """``gpu``, ``cpu``, ``nvme``; or ``recompute``, with the layer's input there: ``recompute, cpu``."""
    compute_s: tuple[float, float] = (0.0, 0.0)
    """Forward and backward."""
    loads_s: dict[str, Loads] = field(default_factory=dict)
    """By lane."""
    held_bytes: dict[str, int] = field(default_factory=dict)

    def load_s(self, lane: str, phase: int) -> float:
        """Return the seconds of compute or of a lane in a phase."""
        if lane == COMPUTE:
            return self.compute_s[phase]
        return sum(self.loads_s.get(lane, (0.0,) * 4)[2 * phase : 2 * phase + 2])

    @property
    def zero_stage(self) -> int:
        """What ZeRO calls it."""
        if self.params_over > 1:
            return 3
        return 1 if self.states_over > 1 else 0


def world_of(hosts: Hosts) -> World:
    """Return one rank's view of equal hosts.

    Raises:
        UnsupportedOpError: the hosts are of several kinds, or a rank has no GPU beside RAM.
    """
    if len(hosts.hosts) != 1:
        raise UnsupportedOpError(
            f"'{hosts.name}' has {len(hosts.hosts)} kinds of hosts; training steps are planned over equal ranks, so "
            f"describe one kind with its count"
        )
    host = hosts.hosts[0]
    machine = host.machine
    names = {place.name: place.kind.value for place in machine.places}
    memory = {rate.device: rate.bandwidth_bytes_per_s for rate in machine.memory}
    for kind in ("gpu", "cpu"):
        if not any(names[device] == kind for device in memory if device in names):
            raise UnsupportedOpError(
                f"host '{host.name}' needs a {kind} with a rate of its memory; training steps are planned for GPUs "
                f"beside RAM"
            )
    rates = {
        lane: _lane_rate(host, [x for x in machine.links if _ends(x, names) == ends])
        for ends, lane in _LANES.items()
    }
    rates["dram"] = sum(rate for at, rate in memory.items() if names.get(at) == "cpu") / host.ranks
    sizes: dict[str, int] = {}
    for place in machine.places:
        size = max(0, place.size_bytes - machine.library_bytes(place.name))
        sizes[names[place.name]] = sizes.get(names[place.name], 0) + size
    return World(
        host=host,
        num_hosts=host.count,
        network=hosts.network,
        rates=rates,
        sizes=sizes,
        gpu_bytes_per_s=next(rate for at, rate in memory.items() if names.get(at) == "gpu"),
    )


_LANES = {
    ("cpu", "gpu"): "to gpu",
    ("gpu", "cpu"): "from gpu",
    ("nvme", "cpu"): "drive read",
    ("cpu", "nvme"): "drive write",
}


def _ends(link: Link, names: dict[str, str]) -> tuple[str, str]:
    return names[link.source_tier], names[link.target_tier]


def _lane_rate(host: Host, links: list[Link]) -> float:
    """Return a rank's part of what links carry together, within the pipes that they share; 0 without any."""
    gpus = {place.name for place in host.machine.places if place.kind is PlaceKind.GPU}
    users = [1 if {x.source_tier, x.target_tier} & gpus else host.ranks for x in links]
    pipes = {
        pipe.name: pipe.bandwidth_bytes_per_s / (host.ranks if pipe.name in host.shared else 1)
        for pipe in host.machine.pipes
    }
    rates = (x.bandwidth_bytes_per_s / n for x, n in zip(links, users, strict=True))
    return together(list(zip(links, rates, strict=True)), pipes)


def layer_options(
    block: Block, world: World, training: Training, allowed: tuple[str, ...] = ()
) -> list[Option]:
    """Return every way to treat a layer on a rank; ways that need a lane that is missing are left out.

    Args:
        block: the layer.
        world: what a rank sees.
        training: what a step has beside its forward pass.
        allowed: where parameters and states may lie; anywhere where it is empty.
    """
    homes = [home for home in ("gpu", "cpu", "nvme") if world.sizes.get(home)]
    shards = sorted({1, world.ranks, world.total})
    options = []
    for params_over, home, states_over, states_home, direct, keeps in itertools.product(
        shards, homes, shards, homes, (False, True), (False, True)
    ):
        if allowed and not {home, states_home}.issubset(allowed):
            continue
        if states_over < params_over or (direct and states_home == home == "gpu"):
            continue
        # Off the GPU, a host holds one copy for its ranks at least.
        if home != "gpu" and params_over < world.ranks:
            continue
        if states_home != "gpu" and states_over < world.ranks:
            continue
        if keeps and params_over == 1:
            continue
        base = Option(
            params_over=params_over,
            params_home=home,
            states_over=states_over,
            states_home=states_home,
            direct=direct and world.ranks > 1,
            keeps=keeps,
            activations="",
        )
        for activations in _activations(homes):
            option = replace(base, activations=activations)
            if (costed := _costed(option, block, world, training)) is not None:
                options.append(costed)
    return _undominated(options)


def _activations(homes: list[str]) -> Iterator[str]:
    for home in homes:
        yield home
        yield f"recompute, {home}"


class _Bill:
    """Adds up what an option costs."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.loads: dict[str, list[float]] = {}
        self.held = dict.fromkeys(("gpu", "cpu", "nvme"), 0.0)
        self.possible = True

    def move(self, lane: str, size: float, phase: int, side: int) -> None:
        """Send ``size`` bytes per rank over a lane; what passes the host's memory is read or written there, too."""
        if size <= 0:
            return
        rate = self.world.rates.get(lane, 0.0)
        if rate <= 0:
            self.possible = False
            return
        self._add(lane, size / rate, phase, side)
        if lane != "dram" and self.world.rates["dram"]:
            self._add("dram", size / self.world.rates["dram"], phase, side)

    def exchange(self, size: float, phase: int, side: int, over: int, *, within: int = 1) -> None:
        """Gather or reduce ``size`` bytes over ``over`` ranks, of which ``within`` hold the same already."""
        world = self.world
        in_host = min(over, world.ranks)
        if in_host > 1 and within < in_host and world.host.peers is not None:
            seconds = world.host.peers.transfer_s(size * (in_host - 1) / in_host, ends=world.ranks)
            self._add("peers", seconds, phase, side)
            if world.host.peers.through_memory and world.rates["dram"]:
                passed = _PASSES * size * (in_host - 1) / in_host
                self._add("dram", passed / world.rates["dram"], phase, side)
        hosts = max(1, over // world.ranks)
        if hosts > 1 and world.network is not None:
            # Each rank fetches its part of what the host lacks; the peers' exchange spreads it.
            part = size * (hosts - 1) / hosts / world.ranks
            rate = world.network.rate_at(part * world.ranks) / world.ranks
            self._add("network", world.network.latency_s + part / rate, phase, side)

    def _add(self, lane: str, seconds: float, phase: int, side: int) -> None:
        self.loads.setdefault(lane, [0.0] * 4)[2 * phase + side] += seconds


def _costed(option: Option, block: Block, world: World, training: Training) -> Option | None:
    """Return the option with its costs, or ``None`` where a way is missing."""
    bill = _Bill(world)
    _bring_params(option, block, bill)
    _update(option, block, bill, training)
    _keep_activations(option, block, bill)
    if not bill.possible:
        return None
    machine = world.host.machine
    gpu = next(place.name for place in machine.places if place.kind is PlaceKind.GPU)
    forward_s = block_s(block, machine, gpu)
    backward_s = forward_s * training.backward
    if option.activations.startswith("recompute"):
        backward_s += forward_s
    states = block.weight_bytes / training.param_bytes * training.state_bytes
    if option.states_home == "gpu":
        moved = _PASSES * (states + block.weight_bytes) / option.states_over
        backward_s += moved / world.gpu_bytes_per_s
    return replace(
        option,
        compute_s=(forward_s, backward_s),
        loads_s={
            lane: (loads[0], loads[1], loads[2], loads[3]) for lane, loads in bill.loads.items()
        },
        held_bytes={home: int(size) for home, size in bill.held.items()},
    )


def _bring_params(option: Option, block: Block, bill: _Bill) -> None:
    """Parameters come to the rank in forward and, unless they were kept, again in backward."""
    world, size = bill.world, block.weight_bytes
    phases = (FORWARD,) if option.keeps else (FORWARD, BACKWARD)
    per_host = size * min(1.0, world.ranks / option.params_over)
    if option.params_home == "gpu":
        bill.held["gpu"] += size if option.keeps else size / option.params_over
    else:
        bill.held["gpu"] += size if option.keeps else 0
        bill.held[option.params_home] += per_host
    for phase in phases:
        if option.params_home == "gpu":
            bill.exchange(size, phase, NEEDED, option.params_over)
            continue
        part = size / option.params_over
        if option.params_home == "nvme":
            bill.move("drive read", part, phase, NEEDED)
        if option.direct:
            # One host's copy is read by all of its ranks; what other hosts have comes over the network first.
            bill.exchange(size, phase, NEEDED, option.params_over, within=world.ranks)
            bill.move("to gpu", size, phase, NEEDED)
        else:
            bill.move("to gpu", part, phase, NEEDED)
            bill.exchange(size, phase, NEEDED, option.params_over)


def _update(option: Option, block: Block, bill: _Bill, training: Training) -> None:
    """Gradients are summed over all ranks, states updated where they lie, parameters brought back."""
    world, size = bill.world, block.weight_bytes
    states = size / training.param_bytes * training.state_bytes
    part = size / option.states_over
    if option.direct and option.states_home != "gpu":
        bill.move("from gpu", size, BACKWARD, LEFT)
        bill.move("dram", 2 * size, BACKWARD, LEFT)
        bill.exchange(size, BACKWARD, LEFT, world.total, within=world.ranks)
    else:
        bill.exchange(size, BACKWARD, LEFT, world.total)
        if option.states_over < world.total:
            # The sum goes back to those that hold the same states.
            bill.exchange(
                size / option.states_over, BACKWARD, LEFT, world.total // option.states_over
            )
    held = states / option.states_over
    if option.states_home == "gpu":
        bill.held["gpu"] += held + part
        if option.params_home != "gpu":
            bill.move("from gpu", part, BACKWARD, LEFT)
    else:
        bill.held[option.states_home] += held * world.ranks
        if not option.direct:
            bill.move("from gpu", part, BACKWARD, LEFT)
        bill.move("dram", _PASSES * held + part, BACKWARD, LEFT)
        if option.states_home == "nvme":
            bill.move("drive read", held, BACKWARD, LEFT)
            bill.move("drive write", held, BACKWARD, LEFT)
        if option.params_home == "gpu":
            bill.move("to gpu", part, BACKWARD, LEFT)
    if option.params_home == "nvme":
        bill.move("drive write", part, BACKWARD, LEFT)
    if option.params_over < option.states_over and option.params_home == "gpu":
        bill.exchange(size, BACKWARD, LEFT, option.states_over, within=option.params_over)


def _keep_activations(option: Option, block: Block, bill: _Bill) -> None:
    """What backward needs waits somewhere: everything, or the layer's input alone."""
    home = option.activations.rpartition(" ")[2]
    recomputed = option.activations.startswith("recompute")
    size = block.out_bytes if recomputed else max(block.saved_bytes, block.out_bytes)
    if home == "gpu":
        bill.held["gpu"] += size
        return
    bill.held[home] += size * bill.world.ranks
    bill.move("from gpu", size, FORWARD, LEFT)
    bill.move("to gpu", size, BACKWARD, NEEDED)
    if home == "nvme":
        bill.move("drive write", size, FORWARD, LEFT)
        bill.move("drive read", size, BACKWARD, NEEDED)


def _undominated(options: list[Option]) -> list[Option]:
    """Leave out options that cost at least as much of everything as another."""
    lanes = [(lane, phase) for lane in LANES for phase in (FORWARD, BACKWARD)]
    costs = []
    for option in options:
        row = [*option.compute_s, *option.held_bytes.values()]
        row += [option.load_s(lane, phase) for lane, phase in lanes]
        costs.append(row)
    kept: list[int] = []
    for i in sorted(range(len(options)), key=lambda i: (sum(costs[i][:2]), costs[i])):
        if not any(all(a <= b for a, b in zip(costs[k], costs[i], strict=True)) for k in kept):
            kept.append(i)
    return [options[i] for i in sorted(kept)]
