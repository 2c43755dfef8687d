"""Plans written by hand, whose numbers can be added in the head: 1 MB/s-links, sizes in MB, ops in seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from gascompile.core.machine import Link, Machine, Place
from gascompile.core.plan import Certificate, OpPlan, Plan, SolverStatus, TensorPlan, accounts
from gascompile.core.sizes import GIB, reserve_bytes
from gascompile.core.steps import Compute, Offload, Prefetch, Recompute, Release, Reload, Step, Wait
from gascompile.core.workload import OpSpec, TensorKind, TensorSpec, Workload
from gascompile.cost_models.simulate.replay import replay_plan
from gascompile.passes.verify.account import account

MB = 10**6
KINDS = {
    "w": TensorKind.WEIGHT,
    "a": TensorKind.ACTIVATION,
    "g": TensorKind.GRADIENT,
    "s": TensorKind.STATE,
    "x": TensorKind.INPUT,
    "y": TensorKind.OUTPUT,
}


def machine(*, in_bandwidth: float = MB, out_bandwidth: float = MB, name: str = "hand") -> Machine:
    """Return a GPU with RAM beside it: by default 1 MB per second each way, without latency."""
    return Machine(
        name=name,
        places=(Place.named("gpu", GIB), Place.named("cpu", GIB)),
        links=(
            Link(source_tier="cpu", target_tier="gpu", bandwidth_bytes_per_s=in_bandwidth),
            Link(source_tier="gpu", target_tier="cpu", bandwidth_bytes_per_s=out_bandwidth),
        ),
    )


def hand_plan(
    sizes: Mapping[str, int],
    ops: Sequence[tuple[str, str, float]],
    steps: Sequence[Step],
    *,
    homes: Mapping[str, str] | None = None,
    addresses: Mapping[str, int] | None = None,
    repeats: bool = True,
    sites: Mapping[int, str] | None = None,
    budget: int = GIB,
    on: Machine | None = None,
) -> Plan:
    """Return a plan of ``steps``; it predicts what its replay takes and claims what its steps need.

    Args:
        sizes: megabytes by name; the first letter of a name says its kind, see ``KINDS``.
        ops: per op the names it reads and writes, apart by spaces, and its seconds.
        homes: tiers of tensors that do not live on the GPU.
        addresses: of residents.
        sites: of ops that do not run on the GPU.
    """
    tensors = tuple(
        TensorSpec(name=name, size_bytes=size * MB, kind=KINDS[name[0]])
        for name, size in sizes.items()
    )
    workload = Workload(
        name="hand",
        repeats=repeats,
        tensors=tensors,
        ops=tuple(
            OpSpec(
                name=f"op{i}",
                time_s={"gpu": time_s, "cpu": 4 * time_s},
                reads=tuple(reads.split()),
                writes=tuple(writes.split()),
            )
            for i, (reads, writes, time_s) in enumerate(ops)
        ),
    )
    site_of = {i: (sites or {}).get(i, "gpu") for i in range(len(ops))}
    target = on or machine()
    arena = [
        step.address + reserve_bytes(step.size_bytes)
        for step in steps
        if isinstance(step, Prefetch)
    ]
    arena += [at + reserve_bytes(sizes[name] * MB) for name, at in (addresses or {}).items()]
    plan = Plan(
        fingerprint={},
        strategy="by hand",
        places=accounts(
            budget_bytes={"gpu": budget, "cpu": GIB}, arena_bytes={"gpu": max(arena, default=0)}
        ),
        links=(),
        tensors={
            t.name: TensorPlan(
                home=(homes or {}).get(t.name, "gpu"),
                kind=t.kind,
                size_bytes=t.size_bytes,
                address=(addresses or {}).get(t.name),
            )
            for t in tensors
        },
        ops=tuple(
            OpPlan(name=op.name, site=site_of[i], time_s=op.time_s[site_of[i]])
            for i, op in enumerate(workload.ops)
        ),
        steps=tuple(steps),
        certificate=_certificate(0.0),
        workload=workload,
        machine=target,
    )
    peak_bytes, link_bytes = account(plan)
    certificate = _certificate(replay_plan(plan).seconds)
    return replace(
        plan.with_accounts(peak_bytes=peak_bytes, link_bytes=link_bytes), certificate=certificate
    )


def _certificate(seconds: float) -> Certificate:
    return Certificate(
        predicted_s=seconds,
        lower_bound_s=seconds,
        limit_s=seconds,
        gap=0.0,
        status=SolverStatus.OPTIMAL,
        solve_s=0.0,
        binding="compute",
    )


def fetch(op: int, tensor: str, size: int, address: int | None = 0) -> Step:
    """Return the step that brings ``tensor`` of so many MB to the GPU: a reload without an address."""
    if address is None:
        return Reload(op=op, tensor=tensor, link="cpu->gpu", size_bytes=size * MB)
    return Prefetch(op=op, tensor=tensor, link="cpu->gpu", size_bytes=size * MB, address=address)


def streaming(op_s: float = 1.0) -> Plan:
    """Return two ops that read two weights of 4 and 2 MB in turn, at the same address."""
    return hand_plan(
        {"w0": 4, "w1": 2},
        [("w0", "", op_s), ("w1", "", op_s)],
        [
            Wait(op=0, tensor="w0", address=0),
            Compute(op=0),
            Release(op=1, tensor="w0", address=0),
            fetch(1, "w1", 2),
            Wait(op=1, tensor="w1", address=0),
            Compute(op=1),
            Release(op=2, tensor="w1", address=0),
            fetch(2, "w0", 4),
        ],
        homes={"w0": "cpu", "w1": "cpu"},
    )


def training() -> Plan:
    """Return two layers forward and backward: a0 goes out and back, a1 is computed again.

    Every op takes 2 s, every activation has 2 MB, the state of 1 MB is updated at the end.
    """
    return hand_plan(
        {"a0": 2, "a1": 2, "a2": 2, "g1": 2, "g0": 2, "s0": 1},
        [
            ("s0", "a0", 2.0),
            ("a0", "a1", 2.0),
            ("a1", "a2", 2.0),
            ("a1 a2", "g1", 2.0),
            ("a0 g1", "g0", 2.0),
            ("g0 s0", "s0", 2.0),
        ],
        [
            Compute(op=0),
            Offload(op=1, tensor="a0", link="gpu->cpu", size_bytes=2 * MB),
            Compute(op=1),
            Wait(op=2, tensor="a0"),
            Release(op=2, tensor="a0"),
            Compute(op=2),
            Release(op=3, tensor="a1"),
            fetch(3, "a0", 2, None),
            Wait(op=3, tensor="a0"),
            Recompute(op=3, source=1),
            Compute(op=3),
            Compute(op=4),
            Compute(op=5),
        ],
    )
