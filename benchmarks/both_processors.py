"""CPU and emulated accelerator at once: how much faster than the better of the two alone, and how near to the bound?

``python -m benchmarks.both_processors`` compiles models three times: for the accelerator alone, which streams its
weights over a slowed-down link, for the processor alone, whose memory holds them all, and for both: with
``sites="all"`` where parts of the model need nothing of each other, and with ``sites="parts"``, which divides layers,
in a chain of them. The three take turns in one process, with one thread per processor, and results are compared with
eager's bit for bit; those of divided layers may be within its tolerance. What the machine itself gives stands beside
them: the two halves of each model as eager runs them, on two plain threads without any copies. It writes
``benchmarks/results/both_processors-<machine>-<date>.json``; beside each row stands how busy others kept the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional

import gascompile
from benchmarks.emulated import slower
from benchmarks.environment import headed, write_result
from gascompile.core.budget import Budget
from gascompile.core.serial import to_json
from gascompile.core.sizes import MIB, format_size
from gascompile.core.tiles import parse_tile
from gascompile.cost_models.measure.host import OtherWork
from gascompile.machines.resolve import resolve_machine
from gascompile.runtime.transfer.engine import read_blocks

_SCHEDULERS = {os.SCHED_OTHER: "normal", os.SCHED_FIFO: "real time, first in first out"}
_IN_A_ROW = 3
"""Timed calls of one after another."""
_WIDTH = 120


class Towers(nn.Module):
    """Two encoders and what joins them, as in models of pictures and text."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.left = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.right = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = b = x
        for layer in self.left:
            a = torch.relu(layer(a))
        for layer in self.right:
            b = torch.relu(layer(b))
        return a * b

    def halves(self, x: torch.Tensor) -> tuple[Callable[[], object], Callable[[], object]]:
        """Return what needs nothing of each other."""

        def tower(layers: nn.ModuleList) -> torch.Tensor:
            y = x
            for layer in layers:
                y = torch.relu(layer(y))
            return y

        return lambda: tower(self.left), lambda: tower(self.right)


class Blocks(nn.Module):
    """A decoder whose layers have attention and a perceptron side by side, as GPT-J's do."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(width),
                    **{name: nn.Linear(width, width) for name in ("query", "key", "value", "out")},
                    "up": nn.Linear(width, 2 * width),
                    "down": nn.Linear(2 * width, width),
                }
            )
            for _ in range(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            assert isinstance(layer, nn.ModuleDict)
            y = layer["norm"](x)
            x = x + self._attention(layer, y) + self._perceptron(layer, y)
        return x

    def _attention(self, layer: nn.ModuleDict, y: torch.Tensor) -> torch.Tensor:
        heads = [
            layer[name](y).view(-1, self.width // 64, 64).transpose(0, 1)
            for name in ("query", "key", "value")
        ]
        scores = torch.softmax(heads[0] @ heads[1].transpose(1, 2) / 8.0, dim=-1)
        mixed = (scores @ heads[2]).transpose(0, 1).reshape(-1, self.width)
        found: torch.Tensor = layer["out"](mixed)
        return found

    def _perceptron(self, layer: nn.ModuleDict, y: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = layer["down"](functional.gelu(layer["up"](y)))
        return found

    def halves(self, y: torch.Tensor) -> tuple[Callable[[], object], Callable[[], object]]:
        """Return what needs nothing of each other, of all layers on one input and without what joins it."""
        layers = [layer for layer in self.layers if isinstance(layer, nn.ModuleDict)]
        return (
            lambda: [self._attention(layer, y) for layer in layers],
            lambda: [self._perceptron(layer, y) for layer in layers],
        )


class Chain(nn.Module):
    """Layers that need each other: none runs beside another one."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x

    def halves(self, x: torch.Tensor) -> tuple[Callable[[], object], Callable[[], object]]:
        """Return half of the features of each layer, of all layers on one input and without what joins them."""
        layers = [layer for layer in self.layers if isinstance(layer, nn.Linear)]

        def half(begin: int, end: int) -> list[torch.Tensor]:
            return [
                torch.relu(functional.linear(x, layer.weight[begin:end], layer.bias[begin:end]))
                for layer in layers
            ]

        width = x.shape[-1]
        return lambda: half(0, width // 2), lambda: half(width // 2, width)


_MODELS: dict[str, type[Towers | Blocks | Chain]] = {
    "towers": Towers,
    "blocks": Blocks,
    "chain": Chain,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One model and the accelerator's memory."""

    model: str
    layers: int
    width: int
    rows: int
    budget_bytes: int

    def made(self) -> Towers | Blocks | Chain:
        """Return the model, the same each time."""
        torch.manual_seed(1)
        return _MODELS[self.model](self.layers, self.width).eval()

    @property
    def sites(self) -> str:
        """What lets both processors work at it."""
        return "parts" if self.model == "chain" else "all"


CASES = (
    Case(model="towers", layers=8, width=1024, rows=256, budget_bytes=40 * MIB),
    Case(model="blocks", layers=4, width=1024, rows=256, budget_bytes=48 * MIB),
    Case(model="chain", layers=4, width=2048, rows=128, budget_bytes=40 * MIB),
)
TOY = (
    Case(model="towers", layers=2, width=64, rows=8, budget_bytes=MIB),
    Case(model="chain", layers=2, width=128, rows=8, budget_bytes=MIB),
)


class AtOnce:
    """The two halves of a model as eager runs them, on two plain threads: how much faster than one after the other."""

    def __init__(self, halves: Sequence[Callable[[], object]]) -> None:
        """Start a thread for the second half."""
        self._halves = halves
        self.alone_s: list[list[float]] = [[], []]
        self.beside_s: list[list[float]] = [[], []]
        self.at_once_s: list[float] = []
        self._ends = False
        self._go, self._done = threading.Barrier(2), threading.Barrier(2)
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def run(self) -> None:
        """Time each half alone, and then both at once."""
        with torch.no_grad():
            for half, times_s in zip(self._halves, self.alone_s, strict=True):
                _timed(half, times_s)
            start_s = time.perf_counter()
            self._go.wait()
            _timed(self._halves[0], self.beside_s[0])
            self._done.wait()
            self.at_once_s.append(time.perf_counter() - start_s)

    def end(self) -> dict[str, Any]:
        """Return the medians and end the thread."""
        self._ends = True
        self._go.wait()
        self._thread.join()
        alone_s = [statistics.median(times_s) for times_s in self.alone_s]
        beside_s = [statistics.median(times_s) for times_s in self.beside_s]
        return {
            "alone_s": alone_s,
            "beside_s": beside_s,
            "at_once_s": statistics.median(self.at_once_s),
            "times_faster": sum(alone_s) / statistics.median(self.at_once_s),
            "slowed": [b / a for a, b in zip(alone_s, beside_s, strict=True)],
        }

    def _serve(self) -> None:
        torch.get_num_threads()  # lets this thread have as many as the other
        with torch.no_grad():
            while self._go.wait() >= 0 and not self._ends:
                _timed(self._halves[1], self.beside_s[1])
                self._done.wait()


def _timed(call: Callable[[], object], times_s: list[float]) -> None:
    start_s = time.perf_counter()
    call()
    times_s.append(time.perf_counter() - start_s)


def grade(case: Case, cache: Path, runs: int, times_slower: float) -> dict[str, Any]:
    """Return what each of the three predicted and took."""
    x = torch.randn(case.rows, case.width, generator=torch.Generator().manual_seed(2))
    model = case.made()
    with torch.no_grad():
        wanted = model(x)
    host = resolve_machine(None, cache_dir=cache, read=read_blocks)
    own = resolve_machine("emulated", cache_dir=cache, read=read_blocks)
    device = slower(own, times_slower)
    common: dict[str, Any] = {"example_inputs": (x,), "cache_dir": cache, "fuse": "off"}
    small = Budget(gpu=case.budget_bytes)
    compiled = {
        "accelerator": gascompile.compile(case.made(), small, machine=device, **common),
        "processor": gascompile.compile(case.made(), None, machine=host, **common),
        "both": gascompile.compile(case.made(), small, machine=device, sites=case.sites, **common),
    }
    times_s: dict[str, list[float]] = {name: [] for name in compiled}
    exact = dict.fromkeys(compiled, True)
    off = dict.fromkeys(compiled, 0.0)
    at_once = AtOnce(model.halves(x))
    others = OtherWork()
    for turn in range(1 + runs // _IN_A_ROW):
        if turn == 1:
            others.begin()
        for name, callable_model in compiled.items():
            # The first of a row finds the caches of the processor full of the other two's weights.
            for call in range(1 + _IN_A_ROW):
                start_s = time.perf_counter()
                found = callable_model(x)
                if turn and call:
                    times_s[name].append(time.perf_counter() - start_s)
                exact[name] = exact[name] and torch.equal(found, wanted)
                off[name] = max(off[name], float((found - wanted).abs().max()))
        for _ in range(_IN_A_ROW):
            at_once.run()
    busy = others.num_processors()
    # As torch.testing.assert_close takes it for float32.
    close_to = 1.3e-6 * float(wanted.abs().max()) + 1e-5
    rows = {name: _row(c, times_s[name], exact[name]) for name, c in compiled.items()}
    for name, row in rows.items():
        row.update(largest_difference=off[name], close=off[name] <= close_to)
    for one in compiled.values():
        one.close()
    both, alone = rows["both"], (rows["accelerator"], rows["processor"])
    return {
        "model": case.model,
        "layers": case.layers,
        "width": case.width,
        "rows": case.rows,
        "budget_bytes": case.budget_bytes,
        "others_cpu": busy,
        "machine": to_json(device),
        "of": rows,
        "eager_halves": at_once.end(),
        "times_faster": min(row["median_s"] for row in alone) / both["median_s"],
        "predicted_times_faster": min(r["predicted_s"] for r in alone) / both["predicted_s"],
        "above_bound": both["median_s"] / both["lower_bound_s"] - 1,
    }


def _row(compiled: Any, times_s: list[float], exact: bool) -> dict[str, Any]:
    plan, report = compiled.plan, compiled.last_run
    assert report is not None
    return {
        "predicted_s": plan.certificate.predicted_s,
        "lower_bound_s": plan.certificate.lower_bound_s,
        "gap": plan.certificate.gap,
        "binding": plan.certificate.binding,
        "median_s": statistics.median(times_s),
        "fastest_s": min(times_s),
        "times_s": times_s,
        "stall_s": report.stall_s,
        "site_s": dict(report.site_s),
        "ops": {site: sum(op.site == site for op in plan.ops) for site in plan.machine.tiers},
        "parts": sum(parse_tile(op.name) is not None for op in plan.ops),
        "exact": exact,
        "peak_bytes": dict(report.peak_bytes),
        "peak_holds": all(
            report.peak_bytes[tier] <= plan.budget_bytes[tier] for tier in report.peak_bytes
        ),
    }


def show(cases: list[dict[str, Any]], console: Console) -> None:
    """Print the result as a table."""
    table = Table(title="One processor, the other, and both at once")
    for title in ("model", "on", "predicted", "bound", "median", "fastest", "bits", "peak"):
        table.add_column(title, justify="right")
    for case in cases:
        for name, row in case["of"].items():
            tier = "cpu" if name == "processor" else "gpu"
            table.add_row(
                case["model"],
                name,
                f"{row['predicted_s'] * 1e3:.1f} ms",
                f"{row['lower_bound_s'] * 1e3:.1f} ms",
                f"{row['median_s'] * 1e3:.1f} ms",
                f"{row['fastest_s'] * 1e3:.1f} ms",
                "equal" if row["exact"] else "close" if row["close"] else "WRONG",
                format_size(row["peak_bytes"][tier]) + ("" if row["peak_holds"] else " WRONG"),
            )
    console.print(table)
    for case in cases:
        console.print(
            f"{case['model']}: {case['times_faster']:.2f} x the better one alone "
            f"({case['predicted_times_faster']:.2f} predicted), {case['above_bound']:+.1%} above the bound, "
            f"{case['others_cpu']:.2f} processors busy with others; its halves as eager runs them, on two plain "
            f"threads: {case['eager_halves']['times_faster']:.2f} x one after the other"
        )


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run the benchmark and write its result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=12, help="timed runs of each")
    parser.add_argument("--slower", type=float, default=2.0, help="slow the links down so often")
    parser.add_argument("--model", choices=sorted(_MODELS), help="this model alone")
    parser.add_argument("-o", "--output", type=Path, help="result file")
    parser.add_argument("--toy", action="store_true", help="a tiny model, to try the script")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    options = parser.parse_args(arguments)
    # One thread each: two processors are what is compared with one.
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="gascompile-bench-") as scratch:
        cache = Path(scratch) / "cache"
        cases = [
            grade(case, cache, options.runs, options.slower)
            for case in (TOY if options.toy else CASES)
            if options.model in (None, case.model)
        ]
    result = {
        **headed("both_processors"),
        "load_average": os.getloadavg()[0],
        "scheduler": _SCHEDULERS.get(os.sched_getscheduler(0), "other"),
        "runs": options.runs,
        "slower": options.slower,
        "cases": cases,
    }
    output = write_result(result, options.output)
    console = Console(stderr=True, width=_WIDTH)
    show(cases, console)
    console.print(f"written: {output}")
    if options.json:
        print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
