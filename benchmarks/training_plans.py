"""Plan generated training iterations beyond GPU memory; compare with the heuristics in the same model.

    python -m benchmarks.training_plans [--seconds 30] [net ...]

Prints per trace the share of the ideal (the sum of all ops' seconds by the seconds of an iteration), beside what
G10's artifact publishes for hardware paging and for moves by software, and writes the table to
``benchmarks/results/training_plans-<machine>-<date>.json``. Everything is simulated.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.environment import headed, write_result
from benchmarks.training_traces import NETS, PUBLISHED, published_trace, reference_machine
from gascompile.api.plan import plan
from gascompile.core.budget import Budget
from gascompile.core.machine import Machine
from gascompile.core.workload import OpSpec, TensorKind, TensorSpec, Workload
from gascompile.passes.intervals.search import Search
from gascompile.passes.intervals.strategies import STRATEGIES
from gascompile.passes.model.effort import Effort
from gascompile.passes.model.interval_problem import interval_problem

LAYERED = {"layered-3x": 3.0, "layered-5x": 5.0, "layered-8x": 8.0}
"""Traces of 2,001 ops and 6,003 tensors, with their need of memory in GPU memories."""
HARD = {
    "vit-half-memory": ("vit", Budget(gpu=20_000_000_000), 1.0),
    "resnet152-slow-drive": ("resnet152", Budget(cpu=32 << 30), 0.5),
}
"""Published traces with less: the net, the budget, and the share of the drive's bandwidth that is left."""
_LAYERS = 667
_GPU_BYTES = 40 << 30


def layered_trace(num_layers: int, need: float, *, seed: int = 0) -> Workload:
    """Return a training iteration of layers that each save three results and update three tensors.

    Sizes vary by a factor of ten around their mean; what is saved takes ``need`` GPU memories at the end
    of the forward pass, and an op the time that a quarter of its bytes takes over both links.
    """
    chance = random.Random(seed)
    weights = [chance.uniform(0.1, 1.0) for _ in range(num_layers)]
    unit = need * _GPU_BYTES / sum(weights) / 1.6
    tensors: list[TensorSpec] = []
    forward: list[OpSpec] = []
    backward: list[OpSpec] = []

    def tensor(name: str, size: float, kind: TensorKind) -> str:
        tensors.append(TensorSpec(name=name, size_bytes=int(size), kind=kind))
        return name

    before, grad = "", tensor("grad_end", unit * weights[-1], TensorKind.GRADIENT)
    made = TensorKind.ACTIVATION
    for i, weight in enumerate(weights):
        size = unit * weight
        out = tensor(f"out{i}", size, made)
        saved = (
            tensor(f"mask{i}", size / 8, made),
            tensor(f"mean{i}", size / 2, made),
        )
        names = [tensor(f"{n}{i}", size / 100, TensorKind.WEIGHT) for n in ("w", "m", "v")]
        seconds = {"gpu": size * 1.6 / (15.754e9 + 3.2e9) * chance.uniform(0.5, 2.0)}
        reads = (before, names[0]) if before else (names[0],)
        forward.append(
            OpSpec(name=f"forward{i}", time_s=seconds, reads=reads, writes=(out, *saved))
        )
        grad_w = tensor(f"grad_w{i}", size / 100, TensorKind.GRADIENT)
        grad_x = tensor(f"grad_x{i}", size, TensorKind.GRADIENT)
        backward.append(
            OpSpec(
                name=f"update{i}",
                time_s={"gpu": 1e-4},
                reads=(grad_w, *names),
                writes=tuple(names),
            )
        )
        backward.append(
            OpSpec(
                name=f"backward{i}",
                time_s={"gpu": 2 * seconds["gpu"]},
                reads=(f"grad_x{i + 1}" if i + 1 < num_layers else grad, out, *saved, names[0]),
                writes=(grad_w, grad_x),
            )
        )
        before = out
    loss = OpSpec(name="loss", time_s={"gpu": 1e-4}, reads=(before,), writes=(grad,))
    return Workload(
        name=f"layered of {num_layers}",
        repeats=True,
        tensors=tuple(tensors),
        ops=(*forward, loss, *reversed(backward)),
    )


def _with_drive(machine: Machine, share: float) -> Machine:
    """Return the machine with a share of its drive's bandwidth, both ways."""
    links = (
        replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * share)
        if "nvme" in link.name
        else link
        for link in machine.links
    )
    return replace(machine, links=tuple(links))


def strategy_shares(workload: Workload, machine: Machine, budget: Budget) -> dict[str, float]:
    """Return the share of the ideal that each heuristic reaches by itself; 0 where it does not fit."""
    task = interval_problem(workload, machine, budget.limits_bytes(machine))
    shares: dict[str, float] = {}
    for strategy, choose in STRATEGIES.items():
        search = Search(task, Effort(time_limit_s=60.0, mip_gap=0.0))
        found = search.consider(strategy, choose(search.base))
        shares[strategy] = task.compute_s / found.seconds if found else 0.0
    return shares


def grade(name: str, time_limit_s: float) -> dict[str, Any]:
    """Plan the trace called ``name`` and return its row."""
    need = LAYERED.get(name)
    net, budget, drive = HARD.get(name, (name, Budget(), 1.0))
    workload = published_trace(net) if need is None else layered_trace(_LAYERS, need)
    machine = _with_drive(reference_machine(), drive)
    begun_s = time.perf_counter()
    made = plan(workload, budget, machine, time_limit_s=time_limit_s)
    wall_s = time.perf_counter() - begun_s
    ideal_s = sum(op.time_s["gpu"] for op in workload.ops)
    known = PUBLISHED.get(name)
    return {
        "trace": name,
        "ops": len(workload.ops),
        "tensors": len(workload.tensors),
        "predicted_s": made.certificate.predicted_s,
        "share_of_ideal": ideal_s / made.certificate.predicted_s,
        "gap": made.certificate.gap,
        "status": made.certificate.status.value,
        "strategy": made.strategy,
        "wall_s": wall_s,
        "published_share": known.share if known else None,
        "published_software_share": known.software_share if known else None,
        "heuristics": strategy_shares(workload, machine, budget),
    }


def main(names: list[str], time_limit_s: float, output: Path | None) -> None:
    """Plan each trace of ``names``, print a line for each and write all rows."""
    rows = []
    for name in names:
        row = grade(name, time_limit_s)
        rows.append(row)
        print(
            f"{name}: {row['ops']} ops, {row['tensors']} tensors, {row['predicted_s']:.3f} s, "
            f"share {row['share_of_ideal']:.4f}, gap {row['gap']:.4f}, {row['strategy']}, "
            f"planned in {row['wall_s']:.1f} s; published {row['published_share']}",
            flush=True,
        )
    found = {**headed("training_plans"), "time_limit_s": time_limit_s, "rows": rows}
    path = write_result(found, output)
    print(f"The rows are in {path}.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=[*NETS, *HARD, *LAYERED], metavar="net")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    main(options.names, options.seconds, options.output)
