"""Plan shards: how each layer of a training step is sharded, kept and moved, over ranks that are equal.

Integers x_o: layers treated by option o (of the ends, which are not layers, one y_o = 1).

    minimise T_f + T_b + (rest)
    T_f >= sum x_o load_f(o, lane),  T_b >= sum x_o load_b(o, lane)            for compute and every lane
    sum x_o = L,  sum x_o held(o, place) + buffers <= size(place)              for the GPU, RAM and drives

The bound leaves out what separates forward from backward and lets x be fractional: T >= sum x_o (load_f + load_b). As
ranks are equal and layers alike, an average over ranks and layers of any plan is a point of that program, so that it
bounds plans in which they differ, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gascompile.core import serial
from gascompile.core.errors import InfeasiblePlanError, SolverError, UnsupportedOpError
from gascompile.core.hosts import Hosts
from gascompile.core.hosts_plan import HostsPlan, Load, ShardGroup
from gascompile.core.workload import Workload
from gascompile.passes.bounds.linear_program import Ending, LinearProgram, Outcome
from gascompile.passes.parallel.chain import Chain, chain
from gascompile.passes.parallel.shard_clock import AHEAD, interleaved, step_seconds
from gascompile.passes.parallel.shard_options import (
    BACKWARD,
    COMPUTE,
    FORWARD,
    LANES,
    Option,
    Training,
    World,
    layer_options,
    world_of,
)

HOLDS_OVER = (
    "all steps in which each layer's parameters, states and activations are whole or evenly sharded over the ranks, a "
    "host or all, in a place each; by symmetry of {ranks} equal ranks and {layers} like layers solved for one of each: "
    "an average over ranks and layers of any such plan is a point of the program"
)
_GAP = 1e-3  # far below what a prediction is true to
_TIE = 1e-3
"""Of the seconds of all lanes together, added to the time: among plans that are as fast, the one that moves least. The
clock knows latencies and turns that the program does not; [Empirical] without it 405B took 56 % more by the clock."""
_MAX_NODES = 2_000
"""In place of a time limit, so that equal inputs give equal plans. [Empirical] 405B takes below 50."""


@dataclass(frozen=True, slots=True)
class _Problem:
    chain: Chain
    world: World
    training: Training
    layers: Sequence[Option]
    ends: Sequence[Option]
    buffer_bytes: int
    """In the GPU: what is asked for early, and one layer's results while it is computed."""


def plan_shards(
    workload: Workload,
    hosts: Hosts,
    *,
    training: Training | None = None,
    homes: tuple[str, ...] = (),
) -> HostsPlan:
    """Return how a training step is sharded over equal ranks, and what no such step beats.

    Args:
        workload: the forward pass of one rank's rows.
        hosts: checked; of one kind.
        training: what a step has beside its forward pass; by default Adam in mixed precision.
        homes: where parameters and states may lie, as others' systems have it; by default anywhere.

    Raises:
        InfeasiblePlanError: the places are too small together.
        SolverError: the search ended without a plan, and without a proof that there is none.
        UnsupportedOpError: the workload is no chain of layers, or the hosts are not equal.
    """
    made = _planned(workload, hosts, training or Training(), homes)
    host = hosts.hosts[0]
    if made.binding == COMPUTE or host.ranks == 1:
        return made
    fewer = replace(hosts, hosts=(replace(host, ranks=host.ranks // 2),))
    try:
        halved = _planned(workload, fewer, training or Training(), homes)
    except (InfeasiblePlanError, SolverError):
        return made
    if fewer.num_ranks / halved.predicted_s <= hosts.num_ranks / made.predicted_s:
        return made
    note = (
        f"With {fewer.hosts[0].ranks} ranks per host as many rows take less time: a step of {fewer.num_ranks} ranks "
        f"takes {halved.predicted_s:.4g} s, of {hosts.num_ranks} ranks {made.predicted_s:.4g} s ({made.binding} binds)."
    )
    return replace(made, notes=(*made.notes, note))


def planned_with(
    workload: Workload, hosts: Hosts, training: Training, allows: Callable[[Option], bool]
) -> HostsPlan:
    """Return the plan for so many ranks whose layers are all treated by options that ``allows`` lets.

    Raises:
        InfeasiblePlanError: the places are too small together.
        SolverError: the search ended without a plan, and without a proof that there is none.
        UnsupportedOpError: the workload is no chain of layers, or the hosts are not equal; or no option is let.
    """
    return _planned(workload, hosts, training, (), allows)


def _planned(
    workload: Workload,
    hosts: Hosts,
    training: Training,
    homes: tuple[str, ...],
    allows: Callable[[Option], bool] | None = None,
) -> HostsPlan:
    """Return the plan for so many ranks."""
    problem = _problem(workload, hosts, training, homes)
    if allows is not None:
        problem = replace(problem, layers=[option for option in problem.layers if allows(option)])
        if not problem.layers:
            raise UnsupportedOpError("so many ranks have no such way to treat a layer")
    program, columns = _program(problem, phases=True)
    outcome = program.solve(time_limit_s=120.0, gap=_GAP, max_nodes=_MAX_NODES)
    if outcome.ending is Ending.INFEASIBLE:
        raise _too_small(problem)
    if not outcome.values:
        raise SolverError(
            f"the search for shards of '{workload.name}' ended after {_MAX_NODES} nodes without a plan: give the GPU "
            f"or RAM more, or fewer rows per rank"
        )
    counted, head = _read(problem, columns, outcome)
    seconds = step_seconds(interleaved(counted), head)
    relaxed = _program(problem, phases=False)[0].solve(time_limit_s=120.0, relaxed=True)
    bound_s = min(relaxed.bound, seconds)
    return _as_plan(workload, hosts, problem, counted, head, (seconds, bound_s))


def _problem(
    workload: Workload, hosts: Hosts, training: Training, homes: tuple[str, ...]
) -> _Problem:
    layers_of, world = chain(workload), world_of(hosts)
    layer = layers_of.layer
    early = AHEAD * layer.weight_bytes
    return _Problem(
        chain=layers_of,
        world=world,
        training=training,
        layers=layer_options(layer, world, training, homes),
        ends=layer_options(layers_of.ends, world, training, homes),
        buffer_bytes=early + max(layer.saved_bytes, layer.out_bytes) + layer.workspace_bytes,
    )


def _program(
    problem: _Problem, *, phases: bool
) -> tuple[LinearProgram, tuple[list[int], list[int]]]:
    """Return the program, and the columns of layers' and of ends' options."""
    program = LinearProgram("shards")
    layers = problem.chain.num_layers
    times = [program.add_variable(cost=1.0) for _ in range(2 if phases else 1)]
    share = _TIE if phases else 0.0
    rest = [
        program.add_variable(0, layers, cost=share * _traffic(o), integer=True)
        for o in problem.layers
    ]
    ends = [
        program.add_variable(0, 1, cost=share * _traffic(o), integer=True) for o in problem.ends
    ]
    held = [*zip(rest, problem.layers, strict=True), *zip(ends, problem.ends, strict=True)]
    program.add_row(layers, layers, [(column, 1.0) for column in rest])
    program.add_row(1, 1, [(column, 1.0) for column in ends])
    spans = ((FORWARD,), (BACKWARD,)) if phases else ((FORWARD, BACKWARD),)
    for lane in (COMPUTE, *LANES):
        for time, span in zip(times, spans, strict=True):
            terms = [(c, -sum(o.load_s(lane, phase) for phase in span)) for c, o in held]
            terms = [(column, factor) for column, factor in terms if factor]
            if terms:
                program.add_row(0, math.inf, [(time, 1.0), *terms])
    for home, room in _rooms(problem, buffers=phases).items():
        terms = [(column, option.held_bytes[home] / 1e9) for column, option in held]
        program.add_row(-math.inf, room / 1e9, terms)
    return program, (rest, ends)


def _traffic(option: Option) -> float:
    return sum(sum(loads) for loads in option.loads_s.values())


def _rooms(problem: _Problem, *, buffers: bool) -> dict[str, int]:
    sizes = {home: problem.world.sizes.get(home, 0) for home in ("gpu", "cpu", "nvme")}
    if buffers:
        sizes["gpu"] -= problem.buffer_bytes
        # On their way between GPUs and drives: two layers' activations of every rank, and the host's parameters.
        layer = problem.chain.layer
        passing = AHEAD * (layer.saved_bytes * problem.world.ranks + layer.weight_bytes)
        sizes["cpu"] -= passing if sizes["nvme"] else 0
    return sizes


def _read(
    problem: _Problem, columns: tuple[list[int], list[int]], outcome: Outcome
) -> tuple[list[tuple[Option, int]], Option]:
    counts = [round(outcome.values[column]) for column in columns[0]]
    counted = [(o, n) for o, n in zip(problem.layers, counts, strict=True) if n]
    chosen = max(range(len(columns[1])), key=lambda i: outcome.values[columns[1][i]])
    return counted, problem.ends[chosen]


def _as_plan(
    workload: Workload,
    hosts: Hosts,
    problem: _Problem,
    counted: Sequence[tuple[Option, int]],
    head: Option,
    times: tuple[float, float],
) -> HostsPlan:
    every = [*counted, (head, 1)]
    loads = tuple(
        Load(resource=lane, seconds=seconds)
        for lane in (COMPUTE, *LANES)
        if (
            seconds := sum(
                n * (o.load_s(lane, FORWARD) + o.load_s(lane, BACKWARD)) for o, n in every
            )
        )
    )
    peaks = {home: sum(n * o.held_bytes[home] for o, n in every) for home in ("gpu", "cpu", "nvme")}
    peaks["gpu"] += problem.buffer_bytes
    groups = tuple(_group(option, count) for option, count in counted)
    return HostsPlan(
        workload=workload.name,
        workload_digest=serial.digest(workload),
        hosts=hosts,
        kind="shards",
        strategy="shards",
        num_layers=problem.chain.num_layers,
        groups=groups,
        peak_bytes={home: size for home, size in peaks.items() if size},
        predicted_s=times[0],
        lower_bound_s=times[1],
        holds_over=HOLDS_OVER.format(ranks=problem.world.total, layers=problem.chain.num_layers),
        binding=max(loads, key=lambda load: load.seconds).resource,
        loads=loads,
        notes=(_assumed(problem.training),),
    )


def _assumed(training: Training) -> str:
    held = f"{training.state_bytes} bytes of states each"
    return f"Adam over parameters of {training.param_bytes} bytes, with {held}."


def _group(option: Option, count: int) -> ShardGroup:
    return ShardGroup(
        layers=count,
        params_over=option.params_over,
        params_home=option.params_home,
        states_over=option.states_over,
        states_home=option.states_home,
        zero_stage=option.zero_stage,
        keeps=option.keeps,
        activations=option.activations,
    )


def _too_small(problem: _Problem) -> InfeasiblePlanError:
    """Say what the GPU lacks: layers that are sharded as far as they can be, and the buffers of two."""
    least = min(option.held_bytes["gpu"] for option in problem.layers)
    ends = min(option.held_bytes["gpu"] for option in problem.ends)
    needed = problem.buffer_bytes + ends + least * problem.chain.num_layers
    limit = problem.world.sizes.get("gpu", 0)
    tier = "gpu" if needed > limit else "all places of a host together"
    return InfeasiblePlanError(
        required_bytes=max(needed, limit + 1), limit_bytes=limit, tier=tier, op="a training step"
    )
