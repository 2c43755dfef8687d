"""Plan ring: the cut of a model over ranks as a plan, with its proof and what one request gains by it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gascompile.core import serial
from gascompile.core.errors import InfeasiblePlanError
from gascompile.core.hosts import Hosts
from gascompile.core.hosts_plan import HostsPlan, Load, Stage, Window
from gascompile.core.workload import Workload
from gascompile.passes.parallel.chain import chain
from gascompile.passes.parallel.cut_ring import RingCut, cut_ring, cuts_of_one
from gascompile.passes.parallel.halda import halda
from gascompile.passes.parallel.ring_clock import Ring, drives_s, ring_seconds, windows
from gascompile.passes.parallel.ring_problem import RingProblem, ring_problem

STRATEGIES = ("cut", "halda")
HOLDS_OVER = (
    "all rings in which one request runs at a time, a token passes every layer once, a layer is computed from the GPU "
    "or the RAM of its rank, and eighths of layers stay there or come from the rank's own drive for every token"
)
_SPEED_UP = 0.02
"""Less than this share of the time saved is no speed-up: below what predictions are right to."""


def plan_ring(workload: Workload, hosts: Hosts, *, strategy: str = "cut") -> HostsPlan:
    """Return who has which layers for one request at a time, and what no such plan beats.

    Args:
        workload: a forward pass, of one token where it is a decoder's.
        hosts: checked.
        strategy: ``cut``, or ``halda`` for what prima.cpp's rule chooses with the first rank as the head.

    Raises:
        InfeasiblePlanError: the ranks have no room and no drive for the layers.
        UnsupportedOpError: the workload is no chain of layers, or a device has no rate.
        ValueError: there is no such strategy.
    """
    if strategy not in STRATEGIES:
        raise ValueError(
            f"no strategy over hosts is called '{strategy}'; choose one of {', '.join(STRATEGIES)}"
        )
    problem = ring_problem(chain(workload), hosts)
    cut = cut_ring(problem)
    if strategy == "halda":
        ring = halda(problem, 0)
        if ring is None:
            raise InfeasiblePlanError(
                required_bytes=problem.layer_bytes * problem.chain.num_layers,
                limit_bytes=sum(d.gpu_bytes + d.ram_bytes for d in problem.devices),
                tier="all ranks",
                op="prima.cpp's rule",
            )
        cut = RingCut(ring, ring_seconds(problem, ring), cut.bound_s)
    alone = cuts_of_one(problem)
    return _as_plan(workload, hosts, problem, cut, alone, strategy)


def _as_plan(
    workload: Workload,
    hosts: Hosts,
    problem: RingProblem,
    cut: RingCut,
    alone: dict[int, RingCut],
    strategy: str,
) -> HostsPlan:
    ring = cut.ring
    fastest = min(alone, key=lambda i: alone[i].seconds, default=None)
    single_s = None if fastest is None else alone[fastest].seconds
    loads = _loads(problem, ring)
    stages = _stages(problem, ring)
    return HostsPlan(
        workload=workload.name,
        workload_digest=serial.digest(workload),
        hosts=hosts,
        kind="ring",
        strategy=strategy,
        num_layers=problem.chain.num_layers,
        rounds=ring.rounds,
        head=problem.devices[ring.head[0]].rank,
        stages=stages,
        peak_bytes={
            "gpu": max(stage.gpu_bytes for stage in stages),
            "cpu": max(stage.cpu_bytes for stage in stages),
        },
        predicted_s=cut.seconds,
        lower_bound_s=cut.bound_s,
        holds_over=HOLDS_OVER,
        binding=max(loads, key=lambda load: load.seconds).resource,
        loads=loads,
        single_s=single_s,
        single_rank="" if fastest is None else problem.devices[fastest].rank,
        notes=_notes(problem, cut, single_s, fastest, stages),
    )


def _loads(problem: RingProblem, ring: Ring) -> tuple[Load, ...]:
    """Return what a token's time is made of: compute in turn, hops, and the busiest drive."""
    compute_s = problem.head_s(ring.head)
    for share, device in zip(ring.shares, problem.devices, strict=True):
        compute_s += share.gpu * device.gpu_s if share.gpu else 0.0
        compute_s += share.beside * device.ram_s if share.beside else 0.0
    drives = drives_s(problem, ring)
    busiest = drives.index(max(drives))
    loads = [Load(resource="compute of all ranks in turn", seconds=compute_s)]
    loads.append(Load(resource="hops", seconds=_hops_s(problem, ring)))
    if drives[busiest]:
        name = f"drive of {problem.devices[busiest].rank}"
        loads.append(Load(resource=name, seconds=drives[busiest]))
    return tuple(loads)


def _hops_s(problem: RingProblem, ring: Ring) -> float:
    """Return the seconds of all hops of a token."""
    head, total, at = ring.head[0], 0.0, ring.head[0]
    count = len(problem.devices)
    for window in windows(ring):
        for i in (*range(head, count), *range(head)):
            if window[i].layers:
                total, at = total + problem.hops_s[at][i], i
    return total + problem.hops_s[at][head]


def _stages(problem: RingProblem, ring: Ring) -> tuple[Stage, ...]:
    spans: list[list[Window]] = [[] for _ in problem.devices]
    at, count, head = 0, len(problem.devices), ring.head[0]
    for window in windows(ring):
        for i in (*range(head, count), *range(head)):
            if layers := window[i].layers:
                spans[i].append(Window(first=at, last=at + layers - 1))
                at += layers
    drives = drives_s(problem, ring)
    layer, size = problem.chain.layer, problem.layer_bytes
    stages = []
    for i, (share, device) in enumerate(zip(ring.shares, problem.devices, strict=True)):
        ends = problem.chain.head_bytes if i == head else 0
        compute_s = share.gpu * device.gpu_s if share.gpu else 0.0
        compute_s += share.beside * device.ram_s if share.beside else 0.0
        in_ram = share.beside * problem.parts - share.streamed + share.slots
        stages.append(
            Stage(
                rank=device.rank,
                gpu_layers=share.gpu,
                ram_layers=share.beside,
                windows=tuple(spans[i]),
                gpu_bytes=share.gpu * size + (ends if ring.head[1] else 0),
                cpu_bytes=share.beside * layer.state_bytes
                + in_ram * problem.part_bytes
                + (0 if ring.head[1] else ends),
                streamed_bytes=share.streamed * problem.part_bytes,
                slot_bytes=share.slots * problem.part_bytes,
                compute_s=compute_s + (problem.head_s(ring.head) if i == head else 0.0),
                drive_s=drives[i],
            )
        )
    return tuple(stages)


def _notes(
    problem: RingProblem,
    cut: RingCut,
    single_s: float | None,
    fastest: int | None,
    stages: Sequence[Stage],
) -> tuple[str, ...]:
    """Say what a ring gives one request, and who is left out."""
    notes = []
    used = [stage.rank for stage in stages if stage.windows]
    if len(problem.devices) > 1:
        if single_s is None or fastest is None or math.isinf(single_s):
            notes.append("No rank can run the model alone: the ring is what makes it possible.")
        elif cut.seconds >= single_s * (1 - _SPEED_UP):
            name = problem.devices[fastest].rank
            notes.append(
                f"Several ranks give one request no speed-up: {name} alone takes {single_s:.4g} s. A token is computed "
                f"by one rank at a time; they pay where memory is short, or where several requests are under way."
            )
        else:
            gain = single_s / cut.seconds
            name = problem.devices[fastest].rank
            notes.append(
                f"One request is {gain:.2f} times as fast as on {name} alone: layers stay in memory, or come from "
                f"several drives at once. No two ranks compute at a time."
            )
    idle = [device.rank for device in problem.devices if device.rank not in used]
    if idle:
        notes.append(f"Without layers, as they would be slower with: {', '.join(idle)}.")
    return tuple(notes)
