"""What do two hops gain? Weights of a drive that wait half the way, beside plans in which each comes directly.

``python -m benchmarks.two_hops`` compiles small models for the emulated accelerator with little of its memory, and
less of the host's than the weights take, once for its machine and once for the same without a link from the drive
to the host, over which no weight can go half the way. Runs of both take turns. The outcome of both must equal eager,
bytes per link must be exact and peaks within the budget; seconds count as predicted within 10 %. It writes
``benchmarks/results/two_hops-<machine>-<date>.json``.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from torch import nn

import gascompile
from benchmarks.emulated import slower
from benchmarks.environment import headed, write_result
from gascompile.core.budget import Budget
from gascompile.core.machine import IoSettings, Machine
from gascompile.core.sizes import KIB, MIB, format_size
from gascompile.core.steps import Fetch
from gascompile.cost_models.measure.host import OtherWork
from gascompile.machines.resolve import resolve_machine
from gascompile.runtime.transfer.engine import read_blocks

TIME_TOLERANCE = 0.10
_WARM_RUNS = 2
_WIDTH = 120
_IO = IoSettings(num_threads=2, chunk_bytes=MIB, source="chosen: large enough for the links here")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """A model of linear layers, each of which may be used several times, and what it may take."""

    name: str
    width: int
    layers: int
    rows: int
    turns: int = 1
    """How often each two layers are used in turn."""
    gpu_layers: float
    """Of the accelerator's memory beside activations, in layers."""
    cpu_layers: float
    """Of the host's memory beside what reads pass through, in layers."""

    @property
    def layer_bytes(self) -> int:
        """What a layer's weight takes."""
        return 4 * self.width * self.width

    def budget(self, machine: Machine) -> Budget:
        """Return what a plan may take of the machine."""
        activations = 5 * 4 * self.rows * self.width + 16 * KIB
        return Budget(
            gpu=int(self.gpu_layers * self.layer_bytes) + activations,
            cpu=int(self.cpu_layers * self.layer_bytes) + machine.io.staging_bytes,
        )


CHAINS = (
    Chain(name="one at a time", width=1024, layers=16, rows=64, gpu_layers=1.3, cpu_layers=6.2),
    Chain(name="two at a time", width=1024, layers=16, rows=192, gpu_layers=2.3, cpu_layers=9.2),
    Chain(
        name="used three times",
        width=1024,
        layers=8,
        rows=64,
        turns=3,
        gpu_layers=1.3,
        cpu_layers=4.2,
    ),
    Chain(name="enough room", width=1024, layers=16, rows=64, gpu_layers=6.3, cpu_layers=6.2),
)
TOY = (Chain(name="toy", width=256, layers=6, rows=8, gpu_layers=1.2, cpu_layers=3.2),)


class Layers(nn.Module):
    """The layers of a chain."""

    def __init__(self, chain: Chain) -> None:
        """Draw the weights."""
        super().__init__()
        self.turns = chain.turns
        self.layers = nn.ModuleList(
            nn.Linear(chain.width, chain.width, bias=False) for _ in range(chain.layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what ``(rows, width)`` become."""
        for first in range(0, len(self.layers), 2):
            for _ in range(self.turns):
                for layer in self.layers[first : first + 2]:
                    x = torch.relu(layer(x))
        return x


def direct(machine: Machine) -> Machine:
    """Return ``machine`` without the link over which weights of the drive would go half the way."""
    links = tuple(link for link in machine.links if link.name != "nvme->cpu")
    return replace(machine, links=links)


def compare(chain: Chain, folder: Path, machine: Machine, cache: Path, runs: int) -> dict[str, Any]:
    """Return what plans with and without two hops predicted and took."""
    torch.manual_seed(0)
    model, x = Layers(chain).eval(), torch.randn(chain.rows, chain.width)
    path = folder / f"{chain.name.replace(' ', '-')}.safetensors"
    save_file({k: v.clone() for k, v in model.state_dict().items()}, path)
    with torch.no_grad():
        expected = model(x)
    with torch.device("meta"):
        skeleton = Layers(chain)
    times_s: dict[str, list[float]] = {}
    with ExitStack() as stack:
        compiled = {
            way: stack.enter_context(
                gascompile.compile(
                    skeleton,
                    chain.budget(on),
                    example_inputs=(x,),
                    checkpoint=path,
                    machine=on,
                    cache_dir=cache / way,
                    fuse="off",
                )
            )
            for way, on in (("direct", direct(machine)), ("two hops", machine))
        }
        others = OtherWork()
        for run in range(_WARM_RUNS + runs):
            if run == _WARM_RUNS:
                others.begin()
            for way, ours in compiled.items():
                start_s = time.perf_counter()
                found = ours(x)
                if run >= _WARM_RUNS:
                    times_s.setdefault(way, []).append(time.perf_counter() - start_s)
                assert torch.equal(found, expected), "results equal eager's"
        ways = {way: _graded(ours, times_s[way]) for way, ours in compiled.items()}
        others_cpu = others.num_processors()
    hops, plain = ways["two hops"], ways["direct"]
    return {
        **asdict(chain),
        "ways": ways,
        "others_cpu": others_cpu,
        "predicted_gain": plain["predicted_s"] / hops["predicted_s"],
        "gain": plain["median_s"] / hops["median_s"],
    }


def _graded(compiled: Any, times_s: list[float]) -> dict[str, Any]:
    plan, report = compiled.plan, compiled.last_run
    predicted_s, median_s = plan.certificate.predicted_s, statistics.median(times_s)
    return {
        "predicted_s": predicted_s,
        "median_s": median_s,
        "times_s": times_s,
        "time_error": predicted_s / median_s - 1,
        "time_holds": abs(predicted_s / median_s - 1) <= TIME_TOLERANCE,
        "gap": plan.certificate.gap,
        "fetches": sum(isinstance(step, Fetch) for step in plan.steps),
        "arena_bytes": dict(plan.arena_bytes),
        "link_bytes": _moved(report.link_bytes),
        "bytes_hold": _moved(plan.link_bytes) == _moved(report.link_bytes),
        "peak_bytes": dict(report.peak_bytes),
        "peak_holds": all(
            report.peak_bytes[place] <= plan.budget_bytes[place] for place in ("gpu", "cpu")
        ),
        "strategy": plan.strategy,
    }


def _moved(link_bytes: Mapping[str, int]) -> dict[str, int]:
    return {name: count for name, count in link_bytes.items() if count}


def show(rows: list[dict[str, Any]], console: Console) -> None:
    """Print the result as a table."""
    table = Table(title="Two hops: predicted and measured")
    for title in (
        "model",
        "way",
        "predicted",
        "measured",
        "error",
        "gain",
        "bytes",
        "peak",
        "of cpu",
    ):
        table.add_column(title, justify="right")
    for row in rows:
        for way, found in row["ways"].items():
            table.add_row(
                row["name"],
                f"{way} ({found['fetches']})" if found["fetches"] else way,
                f"{found['predicted_s'] * 1e3:.1f} ms",
                f"{found['median_s'] * 1e3:.1f} ms",
                f"{found['time_error']:+.1%}",
                f"{row['gain']:.2f} x" if way == "two hops" else "",
                "exact" if found["bytes_hold"] else "WRONG",
                format_size(found["peak_bytes"]["gpu"]) + ("" if found["peak_holds"] else " WRONG"),
                format_size(found["peak_bytes"]["cpu"]),
            )
    console.print(table)
    busiest = max(row["others_cpu"] for row in rows)
    console.print(f"other processes kept at most {busiest:.2f} processors busy")


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run the benchmark and write its result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=9, help="timed runs per plan")
    parser.add_argument("--slower", type=float, default=4.0, help="slow the links down so often")
    parser.add_argument("-o", "--output", type=Path, help="result file")
    parser.add_argument("--toy", action="store_true", help="a tiny model, to try the script")
    options = parser.parse_args(arguments)
    console = Console(stderr=True, width=_WIDTH)
    # Beside one thread that computes the others have a processor for what real links do alone.
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="gascompile-bench-") as scratch:
        folder = Path(scratch)
        own = resolve_machine("emulated", cache_dir=folder / "machine", read=read_blocks)
        machine = replace(slower(own, options.slower), io=_IO)
        rows = [
            compare(chain, folder, machine, folder / f"cache{i}", options.runs)
            for i, chain in enumerate(TOY if options.toy else CHAINS)
        ]
        result = {
            **headed("two_hops"),
            "runs": options.runs,
            "time_tolerance": TIME_TOLERANCE,
            "slower": options.slower,
            "links": {link.name: link.bandwidth_bytes_per_s for link in machine.links},
            "chains": rows,
        }
    output = write_result(result, options.output)
    show(rows, console)
    console.print(f"written: {output}")
    return result


if __name__ == "__main__":
    main()
