"""Workloads, machines and an interpreter for the planner's tests."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import strategies as st

from gascompile.core.budget import Budget
from gascompile.core.errors import InfeasiblePlanError
from gascompile.core.machine import Link, Machine, Pipe, Place
from gascompile.core.plan import Plan
from gascompile.core.sizes import GIB, PAGE_BYTES, reserve_bytes
from gascompile.core.steps import Compute, Prefetch, Release, Step, Wait
from gascompile.core.workload import OpSpec, TensorKind, TensorSpec, Workload
from gascompile.passes.model.problem import problem
from gascompile.passes.plan.make_plan import make_plan

PAGE = PAGE_BYTES
UNIT = 99 * PAGE
"""Size of a weight that takes 100 pages of an arena."""


def weight(name: str, size_bytes: int = UNIT) -> TensorSpec:
    """Return a weight."""
    return TensorSpec(name=name, size_bytes=size_bytes, kind=TensorKind.WEIGHT)


def workload(
    reads: Sequence[str],
    *,
    seconds: Sequence[float] | float = 1.0,
    sizes: dict[str, int] | None = None,
    repeats: bool = True,
    extra: Sequence[TensorSpec] = (),
) -> Workload:
    """Return ops that read the weights named by the letters of each element of ``reads``."""
    times = [seconds] * len(reads) if isinstance(seconds, float) else list(seconds)
    names = dict.fromkeys(letter for text in reads for letter in text)
    tensors = [weight(name, (sizes or {}).get(name, UNIT)) for name in names]
    return Workload(
        name="toy",
        repeats=repeats,
        tensors=(*tensors, *extra),
        ops=tuple(
            OpSpec(name=f"op{i}", time_s={"cpu": time_s, "gpu": time_s}, reads=tuple(text))
            for i, (text, time_s) in enumerate(zip(reads, times, strict=True))
        ),
    )


def cpu_machine(
    bandwidth: float = UNIT, latency_s: float = 0.0, nvme_bytes: int = 64 * GIB
) -> Machine:
    """Return RAM that computes with one NVMe drive; by default one ``UNIT`` per second."""
    link = Link(
        source_tier="nvme",
        target_tier="cpu",
        bandwidth_bytes_per_s=bandwidth,
        latency_s=latency_s,
    )
    places = (Place.named("cpu", 64 * GIB), Place.named("nvme", nvme_bytes))
    return Machine(name="toy", places=places, links=(link,))


def gpu_machine(cpu_bytes: int = GIB, *, pipe: float | None = None) -> Machine:
    """Return a GPU fed by RAM at two units per second and by NVMe at one."""
    shared = ("uplink",) if pipe else ()
    links = tuple(
        Link(source_tier=source, target_tier="gpu", bandwidth_bytes_per_s=rate, shared=shared)
        for source, rate in (("cpu", 2.0 * UNIT), ("nvme", 1.0 * UNIT))
    )
    return Machine(
        name="gpu toy",
        places=(
            Place.named("gpu", GIB),
            Place.named("cpu", cpu_bytes),
            Place.named("nvme", 64 * GIB),
        ),
        links=links,
        pipes=(Pipe(name="uplink", bandwidth_bytes_per_s=pipe),) if pipe else (),
    )


def llama(num_layers: int, seconds_per_mb: float) -> tuple[Workload, Machine]:
    """Return a decoder of 176 MB layers between two tables of 262 MB, and a drive of 3 GB/s."""
    tensors: list[TensorSpec] = []
    ops: list[OpSpec] = []

    def op(name: str, megabytes: float, time_s: float | None = None) -> None:
        size_bytes = round(megabytes * 1e6)
        reads = (name,) if size_bytes else ()
        if size_bytes:
            tensors.append(weight(name, size_bytes))
        tensors.append(TensorSpec(name=f"%{name}", size_bytes=8192, kind=TensorKind.ACTIVATION))
        taken_s = megabytes * seconds_per_mb if time_s is None else time_s
        ops.append(OpSpec(name=name, time_s={"cpu": taken_s}, reads=reads, writes=(f"%{name}",)))

    op("embed", 262, 1e-5)
    parts = {"norm1": 0.008192, "q": 16.8, "k": 2.1, "v": 2.1, "attention": 0.0, "o": 16.8}
    parts |= {"norm2": 0.008192, "gate": 46.1, "up": 46.1, "down": 46.1}
    for layer in range(num_layers):
        for part, megabytes in parts.items():
            op(f"{layer}.{part}", megabytes, None if megabytes else 2e-5)
    op("lm_head", 262)
    whole = Workload(name="llama", repeats=True, tensors=tuple(tensors), ops=tuple(ops))
    return whole, cpu_machine(3e9, 0.2e-3)


def workloads(max_weights: int = 7, max_ops: int = 10) -> st.SearchStrategy[Workload]:
    """Draw small workloads: weights read by none, one or many ops, activations, states.

    Only a seed is drawn: examples are then as different as chance makes them.
    """
    return st.integers(0, 2**48).map(lambda seed: _draw(random.Random(seed), max_weights, max_ops))


def _draw(chance: random.Random, max_weights: int, max_ops: int) -> Workload:
    names = [f"w{i}" for i in range(chance.randint(min(2, max_weights), max_weights))]
    tensors = [weight(name, chance.randint(1, 60 * PAGE)) for name in names]
    num_ops = chance.randint(2, max_ops)
    longest_s = chance.choice((0.0, 1e-4, 2e-3, 1e-2))
    most_reads = chance.choice((1, 2, 3))
    ops: list[OpSpec] = []
    for i in range(num_ops):
        reads = chance.sample(
            names, min(len(names), chance.randint(chance.randint(0, 1), most_reads))
        )
        if i:
            reads.append(f"%{chance.randrange(i)}")
        kind = TensorKind.OUTPUT if i == num_ops - 1 else TensorKind.ACTIVATION
        tensors.append(TensorSpec(name=f"%{i}", size_bytes=chance.randint(0, 5 * PAGE), kind=kind))
        time_s = longest_s * chance.random()
        ops.append(
            OpSpec(
                name=f"op{i}",
                time_s={"cpu": time_s, "gpu": time_s},
                reads=tuple(reads),
                writes=(f"%{i}",),
                workspace_bytes=chance.randint(0, PAGE),
            )
        )
    if chance.random() < 0.5:
        tensors.append(TensorSpec(name="state", size_bytes=3 * PAGE, kind=TensorKind.STATE))
    return Workload(
        name="drawn", repeats=chance.random() < 0.7, tensors=tuple(tensors), ops=tuple(ops)
    )


def shares() -> st.SearchStrategy[float]:
    """Draw where a budget lies between the least (0) and the one that holds every weight (1)."""
    return st.sampled_from([0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 0.9, 0.99, 1.0])


def least_budget(task: Workload, machine: Machine) -> int:
    """Return the smallest feasible budget, as the error of too small a one says."""
    try:
        make_plan(task, machine, Budget.of(0, machine), fingerprint={})
    except InfeasiblePlanError as error:
        return error.required_bytes
    return 0


def budget_at(share: float, task: Workload, machine: Machine) -> int:
    """Return the budget at ``share`` of the way from the least to one that holds every weight."""
    least = least_budget(task, machine)
    weights = [t for t in task.tensors if t.kind == TensorKind.WEIGHT]
    whole = problem(task, machine, Budget.of(0, machine)).base_bytes + sum(
        reserve_bytes(tensor.size_bytes) for tensor in weights
    )
    return least + int(share * max(0, whole - least))


def machines() -> st.SearchStrategy[Machine]:
    """Draw a machine with one link, two, or two that share a pipe."""
    slow = cpu_machine(60e6, 1e-4)
    return st.sampled_from(
        [slow, cpu_machine(600e6), gpu_machine(40 * PAGE), gpu_machine(pipe=1e6)]
    )


def breaks(plan: Plan, iterations: int = 3) -> str:
    """Run a plan on a map of pages to owners; return what goes wrong, empty if nothing does.

    Written from the words of the format alone: a prefetch's bytes may land at any time until its wait,
    so that nothing else may own its pages from the prefetch on, and an op must find each weight whole.
    """
    return _Interpreter(plan).run(iterations)


class _Interpreter:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.site = plan.machine.compute_tier
        self.sizes = {tensor.name: tensor.size_bytes for tensor in plan.workload.tensors}
        self.weights = {t.name for t in plan.workload.tensors if t.kind == TensorKind.WEIGHT}
        self.owner: dict[int, tuple[str, int]] = {}
        self.arrived: set[tuple[str, int]] = set()
        self.newest: dict[tuple[str, int | None], tuple[str, int]] = {}
        self.usable: dict[str, tuple[tuple[str, int], int | None]] = {}
        self.serial = 0

    def run(self, iterations: int) -> str:
        for name, tensor in self.plan.tensors.items():
            if name in self.weights and tensor.home == self.site:
                if tensor.address is None:
                    return f"{name} has no address"
                if self._claim((name, 0), tensor.address):
                    return f"{name} overlaps"
                self.arrived.add((name, 0))
        if self.plan.workload.repeats and (wrong := self._up_front()):
            return wrong
        for _ in range(iterations if self.plan.workload.repeats else 1):
            self.usable = {}
            ran: list[int] = []
            for step in self.plan.steps:
                if isinstance(step, Compute):
                    ran.append(step.op)
                if wrong := self._step(step):
                    return wrong
            if ran != list(range(len(self.plan.workload.ops))):
                return f"ops {ran}"
        return ""

    def _up_front(self) -> str:
        """Issue prefetches with no wait behind them in the list: they are for the next iteration."""
        waits = [
            (i, step.tensor, step.address)
            for i, step in enumerate(self.plan.steps)
            if isinstance(step, Wait)
        ]
        carried = []
        for i, step in enumerate(self.plan.steps):
            if isinstance(step, Prefetch):
                key = (step.tensor, step.address)
                if not any(j > i and (name, address) == key for j, name, address in waits):
                    first = min((j for j, *wait in waits if tuple(wait) == key), default=-1)
                    carried.append((first, step))
        for _, step in sorted(carried, key=lambda pair: pair[0]):
            if wrong := self._step(step):
                return wrong
        return ""

    def _pages(self, name: str, address: int) -> range:
        return range(address // PAGE, (address + reserve_bytes(self.sizes[name])) // PAGE)

    def _claim(self, copy: tuple[str, int], address: int) -> str:
        if address < 0 or address % PAGE:
            return "address"
        pages = self._pages(copy[0], address)
        if pages and (pages.stop * PAGE > self.plan.arena_bytes.get(self.site, 0)):
            return "beyond the arena"
        for page in pages:
            held = self.owner.get(page)
            # Overwriting a resident, or bytes that are still on their way, is never right.
            if held is not None and (held[1] == 0 or held not in self.arrived):
                return "overwrites"
            self.owner[page] = copy
        return ""

    def _step(self, step: Step) -> str:
        match step:
            case Prefetch():
                tensor = self.plan.tensors.get(step.tensor)
                if tensor is None or step.tensor not in self.weights:
                    return f"{step.tensor} is no weight"
                if step.link != f"{tensor.home}->{self.site}":
                    return "link"
                if step.size_bytes != self.sizes[step.tensor]:
                    return "size"
                self.serial += 1
                copy = (step.tensor, self.serial)
                self.newest[step.tensor, step.address] = copy
                return self._claim(copy, step.address)
            case Wait():
                waited = self.newest.get((step.tensor, step.address))
                if waited is None or waited in self.arrived:
                    return "waits for nothing"
                self.arrived.add(waited)
                self.usable[step.tensor] = (waited, step.address)
            case Release():
                self.usable.pop(step.tensor, None)
            case Compute():
                return self._compute(step.op)
        return ""

    def _compute(self, op: int) -> str:
        if op >= len(self.plan.workload.ops):
            return "no such op"
        for name in self.plan.workload.ops[op].reads:
            if name not in self.weights:
                continue
            tensor = self.plan.tensors[name]
            if tensor.home == self.site:
                copy, address = (name, 0), tensor.address or 0
            elif name in self.usable:
                copy, at = self.usable[name]
                address = at or 0
            else:
                return f"op {op} finds no {name}"
            if any(self.owner.get(page) != copy for page in self._pages(name, address)):
                return f"op {op} reads wrong bytes of {name}"
        return ""


def task(tensors: str, *ops: OpSpec, repeats: bool = True) -> Workload:
    """Return a workload of tensors given as ``name:kind:bytes`` words."""
    specs = []
    for word in tensors.split():
        name, kind, size = word.split(":")
        specs.append(TensorSpec(name=name, kind=TensorKind(kind), size_bytes=int(size)))
    return Workload(name="by hand", repeats=repeats, tensors=tuple(specs), ops=ops)


def drive(rate_in: float = 1.0, rate_out: float = 1.0, latency_s: float = 0.0) -> Machine:
    """Return RAM that computes and a drive; a rate of 0 leaves the link out."""
    ends = (("nvme", "cpu", rate_in), ("cpu", "nvme", rate_out))
    links = tuple(
        Link(source_tier=a, target_tier=b, bandwidth_bytes_per_s=rate, latency_s=latency_s)
        for a, b, rate in ends
        if rate
    )
    places = (Place.named("cpu", 64), Place.named("nvme", 64))
    return Machine(name="by hand", places=places, links=links)
