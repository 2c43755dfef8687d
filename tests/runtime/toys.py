"""Small programs, real weight files and valid plans that no solver made."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file

from gascompile.core.machine import IoSettings, Link, Machine, Place
from gascompile.core.plan import (
    Certificate,
    LinkAccount,
    OpPlan,
    Plan,
    SolverStatus,
    TensorPlan,
    accounts,
)
from gascompile.core.program import BoundSpec, InputSpec, Program
from gascompile.core.sizes import reserve_bytes
from gascompile.core.sources import Extent, FileStamp, WeightSource
from gascompile.core.steps import Compute, Prefetch, Release, Step, Wait
from gascompile.core.workload import OpSpec, TensorKind, TensorSpec, Workload
from gascompile.passes.graph.insert import insert
from gascompile.passes.graph.propagate import propagate
from gascompile.runtime.protocols import Device, Reader, read_at
from gascompile.runtime.run.executor import Executor
from gascompile.runtime.run.session import Session

aten = torch.ops.aten
LINK = "nvme->cpu"
IO = IoSettings(num_threads=2, chunk_bytes=64 << 10)
HOST = Machine(
    name="toy",
    places=(Place.named("cpu", 1 << 40), Place.named("nvme", 1 << 50)),
    links=(Link(source_tier="nvme", target_tier="cpu", bandwidth_bytes_per_s=1e9),),
    io=IO,
)


def make_program(
    bound: Mapping[str, torch.Tensor],
    inputs: Sequence[torch.Tensor],
    body: Callable[..., Sequence[torch.fx.Proxy]],
    states: frozenset[str] = frozenset(),
) -> Program:
    """Trace ``body(bound proxies by name, *input proxies)`` into a program of what it calls."""
    graph = torch.fx.Graph()
    tracer = torch.fx.proxy.GraphAppendingTracer(graph)
    bindings: dict[str, str] = {}
    proxies: dict[str, torch.fx.Proxy] = {}
    for name in bound:
        node = graph.placeholder("p_" + name.replace(".", "_"))
        bindings[node.name] = name
        proxies[name] = torch.fx.Proxy(node, tracer)
    users = [torch.fx.Proxy(graph.placeholder(f"x{i}"), tracer) for i in range(len(inputs))]
    results = body(proxies, *users)
    graph.output(tuple(r.node for r in results))
    return Program(
        name="toy",
        graph_module=torch.fx.GraphModule(torch.nn.Module(), graph),
        inputs=tuple(
            InputSpec(name=f"x{i}", path=f"args[{i}]", dtype=_dtype(x), shape=tuple(x.shape))
            for i, x in enumerate(inputs)
        ),
        bindings=bindings,
        bound={name: BoundSpec(dtype=_dtype(t), shape=tuple(t.shape)) for name, t in bound.items()},
        states=states,
        in_spec="",
        out_spec="",
    )


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def make_workload(program: Program, *, repeats: bool = True) -> Workload:
    """Return the workload of a program, with made-up times."""
    facts = propagate(program)
    inputs = {f"%{spec.name}" for spec in program.inputs}

    def kind(name: str) -> TensorKind:
        if name in program.bound:
            return TensorKind.STATE if name in program.states else TensorKind.WEIGHT
        if name in inputs:
            return TensorKind.INPUT
        return TensorKind.OUTPUT if name in facts.outputs else TensorKind.ACTIVATION

    return Workload(
        name=program.name,
        repeats=repeats,
        tensors=tuple(
            TensorSpec(name=n, size_bytes=b, kind=kind(n)) for n, b in facts.size_bytes.items()
        ),
        ops=tuple(
            OpSpec(
                name=op.name, time_s={"cpu": 1e-3}, reads=tuple(op.reads), writes=tuple(op.writes)
            )
            for op in facts.ops
        ),
    )


@dataclass
class _Visit:
    tensor: str
    first: int
    last: int
    address: int = 0


@dataclass
class _Slot:
    address: int
    visits: list[_Visit] = field(default_factory=list)


def make_plan(
    workload: Workload,
    *,
    residents: frozenset[str] = frozenset(),
    seed: int = 0,
    io: IoSettings = IO,
    merge: float = 0.3,
    machine: Machine = HOST,
) -> Plan:
    """Return a random valid plan: what is not resident is streamed through slots that it shares.

    Args:
        workload: what to plan.
        residents: weights that stay.
        seed: of the choices.
        io: of the machine.
        merge: how often two uses of a weight that follow each other become one visit.
        machine: each weight is streamed over one of its links, whichever.
    """
    tier = machine.compute_tier
    rng = random.Random(seed)
    sizes = {t.name: t.size_bytes for t in workload.tensors}
    weights = [t.name for t in workload.tensors if t.kind is TensorKind.WEIGHT]
    addresses: dict[str, int] = {}
    top = 0
    for name in weights:
        if name in residents:
            addresses[name] = top
            top += reserve_bytes(sizes[name])
    streamed = [name for name in weights if name not in residents]
    slot_bytes = max((reserve_bytes(sizes[name]) for name in streamed), default=0)
    slots = _fill_slots(_visits(workload, streamed, rng, merge), top, slot_bytes, rng)
    into = machine.links_into(tier)
    links = {name: into[0] if len(into) == 1 else rng.choice(into) for name in streamed}
    link_names = {name: link.name for name, link in links.items()}
    steps = _steps(workload, slots, sizes, link_names, rng)
    tensors = {
        t.name: TensorPlan(
            home=links[t.name].source_tier if t.name in links else tier,
            kind=t.kind,
            size_bytes=t.size_bytes,
            address=addresses.get(t.name),
        )
        for t in workload.tensors
    }
    return Plan(
        fingerprint={},
        strategy="toy",
        places=accounts(
            budget_bytes={tier: 1 << 40}, arena_bytes={tier: top + slot_bytes * len(slots)}
        ),
        links=tuple(
            LinkAccount(
                name=link.name,
                moved_bytes=sum(
                    s.size_bytes for s in steps if isinstance(s, Prefetch) and s.link == link.name
                ),
            )
            for link in into
        ),
        tensors=tensors,
        ops=tuple(OpPlan(name=op.name, site=tier, time_s=1e-3) for op in workload.ops),
        steps=steps,
        certificate=Certificate(
            predicted_s=1.0,
            lower_bound_s=1.0,
            limit_s=1e-9,
            gap=0.0,
            status=SolverStatus.FEASIBLE,
            solve_s=0.0,
            binding=into[0].name,
        ),
        workload=workload,
        machine=dataclasses.replace(machine, io=io),
    )


def _visits(
    workload: Workload, streamed: list[str], rng: random.Random, merge: float
) -> list[_Visit]:
    found: list[_Visit] = []
    for name in streamed:
        visit: _Visit | None = None
        for i, op in enumerate(workload.ops):
            if name not in op.reads:
                continue
            if visit and rng.random() < merge:
                visit.last = i
            else:
                visit = _Visit(name, i, i)
                found.append(visit)
    return sorted(found, key=lambda visit: visit.first)


def _fill_slots(visits: list[_Visit], top: int, slot_bytes: int, rng: random.Random) -> list[_Slot]:
    slots: list[_Slot] = [_Slot(top), _Slot(top + slot_bytes)] if visits else []
    for visit in visits:
        free = [s for s in slots if not s.visits or s.visits[-1].last < visit.first]
        if not free:
            slots.append(_Slot(top + slot_bytes * len(slots)))
            free = slots[-1:]
        slot = rng.choice(free)
        visit.address = slot.address
        slot.visits.append(visit)
    return slots


def _steps(
    workload: Workload,
    slots: list[_Slot],
    sizes: dict[str, int],
    links: dict[str, str],
    rng: random.Random,
) -> tuple[Step, ...]:
    end = len(workload.ops)
    before: list[list[Step]] = [[] for _ in range(end + 1)]
    for slot in slots:
        for visit in slot.visits:
            before[visit.last + 1].append(
                Release(op=visit.last + 1, tensor=visit.tensor, address=slot.address)
            )
    for slot in slots:
        for i, visit in enumerate(slot.visits):
            earliest = slot.visits[i - 1].last + 1
            choices = list(range(earliest if i else 0, visit.first + 1))
            if not i and workload.repeats:
                choices += range(earliest, end + 1)
            op = rng.choice(choices)
            before[op].append(
                Prefetch(
                    op=op,
                    tensor=visit.tensor,
                    link=links[visit.tensor],
                    size_bytes=sizes[visit.tensor],
                    address=slot.address,
                )
            )
    for slot in slots:
        for visit in slot.visits:
            before[visit.first].append(
                Wait(op=visit.first, tensor=visit.tensor, address=slot.address)
            )
    steps: list[Step] = []
    for i, moves in enumerate(before):
        steps += moves
        if i < end:
            steps.append(Compute(op=i))
    return tuple(steps)


# ---------------------------------------------------------------- files


def save_weights(path: Path, weights: Mapping[str, torch.Tensor]) -> dict[str, WeightSource]:
    """Write a safetensors file and return where each weight lies in it."""
    save_file(dict(weights), path)
    return read_sources(path)


def read_sources(path: Path) -> dict[str, WeightSource]:
    """Read the header of a safetensors file."""
    import json

    names = {"F32": "float32", "F64": "float64", "BF16": "bfloat16", "U8": "uint8", "I64": "int64"}
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    sources: dict[str, WeightSource] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        start, stop = entry["data_offsets"]
        extent = Extent(path=str(path), offset=8 + length + start, size_bytes=stop - start)
        sources[name] = WeightSource(
            name=name,
            dtype=names[entry["dtype"]],
            shape=tuple(entry["shape"]),
            extents=(extent,) if stop > start else (),
        )
    return sources


def stamp(path: Path) -> FileStamp:
    """Return what a file looks like now."""
    stat = path.stat()
    return FileStamp(path=str(path), size_bytes=stat.st_size, mtime_ns=stat.st_mtime_ns)


# ---------------------------------------------------------------- a whole toy


@dataclass
class Toy:
    """A program with its weights in a file, and how to run it both ways."""

    program: Program
    weights: dict[str, torch.Tensor]
    sources: dict[str, WeightSource]
    path: Path
    workload: Workload

    def eager(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        bound = [self.weights[name] for name in self.program.bindings.values()]
        result: tuple[torch.Tensor, ...] = self.program.graph_module(*bound, *inputs)
        return result

    def session(
        self, plan: Plan, reader: Reader = read_at, device: Device | None = None
    ) -> Session:
        return Session.for_plan(
            plan, sources=self.sources, stamps=(stamp(self.path),), reader=reader, device=device
        )

    def executor(
        self, session: Session, plan: Plan, *, overlap: bool = True, paranoid: bool = True
    ) -> Executor:
        module = insert(self.program, plan)
        return Executor(session, module, plan, overlap=overlap, paranoid=paranoid)


def mlp(folder: Path, *, layers: int = 6, width: int = 96, repeats: bool = True) -> Toy:
    """Return layers of linear, relu and a transposed product; the first weight is used again last."""
    generator = torch.Generator().manual_seed(1)
    weights: dict[str, torch.Tensor] = {}
    for i in range(layers):
        weights[f"layers.{i}.weight"] = torch.randn(width, width, generator=generator) / width**0.5
        weights[f"layers.{i}.bias"] = torch.randn(width, generator=generator)

    def body(w: dict[str, torch.fx.Proxy], x: torch.fx.Proxy) -> Sequence[torch.fx.Proxy]:
        tracer = x.tracer

        def call(target: Callable[..., object], *args: object) -> torch.fx.Proxy:
            return tracer.create_proxy("call_function", target, args, {})

        first = call(aten.t.default, w["layers.0.weight"])
        for i in range(layers):
            y = call(aten.linear.default, x, w[f"layers.{i}.weight"], w[f"layers.{i}.bias"])
            x = call(aten.relu.default, y) if i % 2 else call(aten.add.Tensor, y, x)
        tied = call(aten.mm.default, x, first)
        both = call(aten.cat.default, [tied, x], 1)
        return tied, both

    x = torch.zeros(4, width)
    program = make_program(weights, [x], body)
    path = folder / "toy.safetensors"
    sources = save_weights(path, weights)
    return Toy(program, weights, sources, path, make_workload(program, repeats=repeats))


def assert_runs(executor: Executor, toy: Toy, runs: int = 1) -> None:
    """Run, and compare with eager."""
    for _ in range(runs):
        x = torch.randn(4, 96)
        for ours, eager in zip(executor.run(x), toy.eager(x), strict=True):
            torch.testing.assert_close(ours, eager)
