"""Small random planning problems whose sizes and times are small integers.

Everything stays on the heap model's ground: weights, states, activations, gradients and outputs that
move as whole tensors. Bandwidths and latencies are powers of two, so that sums of times are exact.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from gascompile.core.machine import Link, Machine, Pipe, Place
from gascompile.core.workload import OpSpec, TensorKind, TensorSpec, Workload

PERSISTENT = (TensorKind.WEIGHT, TensorKind.STATE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One planning problem: what to run, where, within which bytes per tier."""

    seed: int
    workload: Workload
    machine: Machine
    limits_bytes: dict[str, int]

    def with_budget(self, size_bytes: int) -> Case:
        """Return the case with another limit of the tier that computes."""
        limits = {**self.limits_bytes, self.machine.compute_tier: size_bytes}
        return replace(self, limits_bytes=limits)

    def on(self, machine: Machine) -> Case:
        """Return the case on another machine with the same tiers."""
        return replace(self, machine=machine)

    def scaled(self, unit_bytes: int) -> Case:
        """Return the case with every byte worth ``unit_bytes`` and all times as they are."""
        workload = replace(
            self.workload,
            tensors=tuple(
                replace(t, size_bytes=t.size_bytes * unit_bytes) for t in self.workload.tensors
            ),
            ops=tuple(
                replace(at, workspace_bytes=at.workspace_bytes * unit_bytes)
                for at in self.workload.ops
            ),
        )
        limits = {tier: size * unit_bytes for tier, size in self.limits_bytes.items()}
        return replace(
            self,
            workload=workload,
            machine=faster(self.machine, unit_bytes, unit_bytes),
            limits_bytes=limits,
        )


def draw_case(
    seed: int, *, max_tensors: int = 6, max_ops: int = 6, repeats: bool | None = None
) -> Case:
    """Return the problem of ``seed``; the same seed and sizes always give the same problem."""
    chance = random.Random(seed)
    flavour = chance.choice((_inference, _training, _anything))
    tensors, ops = flavour(chance, max_tensors, max_ops)
    total = sum(t.size_bytes for t in tensors if t.kind is not TensorKind.INPUT)
    machine = draw_machine(chance, total)
    center = machine.compute_tier
    workload = Workload(
        name=f"random {seed}",
        repeats=chance.random() < 0.6 if repeats is None else repeats,
        tensors=tuple(tensors),
        ops=tuple(replace(at, time_s={center: at.time_s["cpu"]}) for at in ops),
    )
    least, most = footprint_bytes(workload)
    limits = {tier: spec.size_bytes for tier, spec in machine.tiers.items()}
    least -= chance.random() < 0.15
    limits[machine.compute_tier] = chance.randint(max(0, least), max(least, most))
    return Case(seed=seed, workload=workload, machine=machine, limits_bytes=limits)


def cases(
    *, max_tensors: int = 6, max_ops: int = 6, repeats: bool | None = None
) -> st.SearchStrategy[Case]:
    """Draw problems; only a seed is drawn, so examples are as different as chance makes them."""
    return st.integers(0, 2**32).map(
        lambda seed: draw_case(seed, max_tensors=max_tensors, max_ops=max_ops, repeats=repeats)
    )


def draw_machine(chance: random.Random, total_bytes: int) -> Machine:
    """Return a machine with one or two slow tiers, of which some links may be missing."""
    two = chance.random() < 0.25
    slow = ["cpu", "nvme"] if two else ["nvme"]
    center = "gpu" if two else "cpu"
    shared = ("bus",) if chance.random() < 0.2 else ()
    links: list[Link] = []
    for tier in slow:
        for source, target, kept in ((tier, center, 0.95), (center, tier, 0.85)):
            if chance.random() < kept:
                speed = chance.choice((0.5, 1.0, 1.0, 2.0, 4.0))
                links.append(
                    Link(
                        source_tier=source,
                        target_tier=target,
                        bandwidth_bytes_per_s=speed,
                        latency_s=chance.choice((0.0, 0.0, 0.0, 0.5, 1.0)),
                        shared=shared,
                        pipe_bytes_per_byte=3.0
                        if shared and source == center and speed == 1.0
                        else None,
                    )
                )
    roomy = chance.random() < 0.85
    room = 2 * total_bytes if roomy else chance.randint(total_bytes // 3, total_bytes)
    sizes = {center: 4 * total_bytes + 16, **dict.fromkeys(slow, room)}
    places = tuple(Place.named(name, size) for name, size in sizes.items())
    rate = chance.choice((1.0, 2.0, 4.0))
    pipes = (Pipe(name="bus", bandwidth_bytes_per_s=rate),) if shared else ()
    return Machine(name="random", places=places, links=tuple(links), pipes=pipes)


def faster(machine: Machine, factor: float, size_factor: int = 1) -> Machine:
    """Return the machine with every link and pipe ``factor`` times as fast."""
    places = tuple(replace(p, size_bytes=p.size_bytes * size_factor) for p in machine.places)
    return replace(machine.with_bandwidths(factor), places=places)


def footprint_bytes(workload: Workload) -> tuple[int, int]:
    """Return the largest sum of bytes that one op touches, and the peak with everything in place."""
    size = {t.name: t.size_bytes for t in workload.tensors if t.kind is not TensorKind.INPUT}
    kind = {t.name: t.kind for t in workload.tensors}
    least = most = sum(size[name] for name in size if kind[name] in PERSISTENT)
    least = 0
    for i, op in enumerate(workload.ops):
        touched = {*op.reads, *op.writes} & size.keys()
        least = max(least, op.workspace_bytes + sum(size[name] for name in touched))
        live = {name for name in size if kind[name] in PERSISTENT} | touched
        for name in size.keys() - live:
            uses = [j for j, at in enumerate(workload.ops) if name in (*at.reads, *at.writes)]
            stays = kind[name] is TensorKind.OUTPUT or (uses and max(uses) >= i)
            if uses and min(uses) <= i and stays:
                live.add(name)
        most = max(most, op.workspace_bytes + sum(size[name] for name in live))
    return least, most


def op(
    name: str, time_s: float, reads: str = "", writes: str = "", workspace_bytes: int = 0
) -> OpSpec:
    """Return an op on the CPU that reads and writes the tensors named by the words of two texts."""
    return OpSpec(
        name=name,
        time_s={"cpu": time_s},
        reads=tuple(reads.split()),
        writes=tuple(writes.split()),
        workspace_bytes=workspace_bytes,
    )


def _tensor(chance: random.Random, name: str, kind: TensorKind, largest: int = 4) -> TensorSpec:
    return TensorSpec(name=name, size_bytes=chance.randint(1, largest), kind=kind)


def _seconds(chance: random.Random) -> float:
    return float(chance.choice((0, 1, 1, 2, 3, 5)))


def _inference(
    chance: random.Random, max_tensors: int, max_ops: int
) -> tuple[list[TensorSpec], list[OpSpec]]:
    """Weights read once or more by ops that pass one activation on; perhaps a cache that grows."""
    num_ops = chance.randint(2, max_ops)
    num_weights = chance.randint(1, max(1, min(5, max_tensors - 2)))
    tensors = [_tensor(chance, f"w{i}", TensorKind.WEIGHT) for i in range(num_weights)]
    names = [t.name for t in tensors]
    cached = len(tensors) + 2 < max_tensors and chance.random() < 0.5
    if cached:
        tensors.append(_tensor(chance, "kv", TensorKind.STATE))
    tensors.append(_tensor(chance, "x", TensorKind.INPUT))
    room = max_tensors + 1 - len(tensors)
    before, ops = "x", list[OpSpec]()
    for i in range(num_ops):
        reads = [before, chance.choice(names)]
        writes: list[str] = []
        if cached and chance.random() < 0.4:
            reads.append("kv")
            writes.append("kv")
        if i == num_ops - 1 or (room > 1 and chance.random() < 0.6):
            kind = TensorKind.OUTPUT if i == num_ops - 1 else TensorKind.ACTIVATION
            tensors.append(_tensor(chance, f"a{i}", kind, 2))
            writes.append(f"a{i}")
            before, room = f"a{i}", room - 1
        ops.append(_op(chance, i, reads, writes))
    return tensors, ops


def _training(
    chance: random.Random, max_tensors: int, max_ops: int
) -> tuple[list[TensorSpec], list[OpSpec]]:
    """A pass up that keeps activations, one down that reads them, and updates on the way."""
    depth = max(1, min((max_ops - 1) // 2, (max_tensors - 1) // 2))
    depth = chance.randint(1, depth)
    stateful = max_tensors > 2 * depth + 1 and chance.random() < 0.5
    tensors = [_tensor(chance, f"w{i}", TensorKind.WEIGHT, 3) for i in range(depth)]
    tensors += [_tensor(chance, f"a{i}", TensorKind.ACTIVATION) for i in range(depth)]
    tensors += [
        _tensor(chance, "x", TensorKind.INPUT),
        _tensor(chance, "g", TensorKind.GRADIENT, 2),
    ]
    if stateful:
        tensors.append(_tensor(chance, "m", TensorKind.STATE))
    ops: list[OpSpec] = []
    for i in range(depth):
        ops.append(_op(chance, len(ops), ["x" if not i else f"a{i - 1}", f"w{i}"], [f"a{i}"]))
    ops.append(_op(chance, len(ops), [f"a{depth - 1}"], ["g"]))
    for i in reversed(range(depth)):
        reads, writes = [f"a{i}", f"w{i}", "g"], ["g"]
        if chance.random() < 0.6:
            writes.append(f"w{i}")
        if stateful and chance.random() < 0.7:
            reads.append("m")
            writes.append("m")
        ops.append(_op(chance, len(ops), reads, writes))
    return tensors, ops


def _anything(
    chance: random.Random, max_tensors: int, max_ops: int
) -> tuple[list[TensorSpec], list[OpSpec]]:
    """Ops that read and write tensors at random; what they read has been written before."""
    kinds = [TensorKind.WEIGHT, TensorKind.WEIGHT, TensorKind.STATE, TensorKind.INPUT]
    kinds += [TensorKind.ACTIVATION, TensorKind.ACTIVATION, TensorKind.GRADIENT, TensorKind.OUTPUT]
    num = chance.randint(2, max_tensors)
    tensors = [_tensor(chance, f"t{i}", chance.choice(kinds)) for i in range(num)]
    existing = [t.name for t in tensors if t.kind in (*PERSISTENT, TensorKind.INPUT)]
    unborn = [t.name for t in tensors if t.name not in existing]
    kind = {t.name: t.kind for t in tensors}
    ops: list[OpSpec] = []
    for i in range(chance.randint(2, max_ops)):
        reads = chance.sample(existing, min(len(existing), chance.randint(0, 2)))
        writes = [n for n in reads if kind[n] is not TensorKind.INPUT and chance.random() < 0.25]
        if unborn and chance.random() < 0.6:
            born = unborn.pop(0)
            writes.append(born)
            existing.append(born)
        ops.append(_op(chance, i, reads, writes))
    # What no op touches would only be dead weight, or an output that is never written.
    return [t for t in tensors if t.name not in unborn], ops


def _op(chance: random.Random, i: int, reads: list[str], writes: list[str]) -> OpSpec:
    space = chance.choice((0, 0, 0, 0, 1, 2))
    return op(f"op{i}", _seconds(chance), " ".join(reads), " ".join(writes), space)
