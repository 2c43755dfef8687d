"""Decoding with a cache of keys and values four times its tier: equal to eager, and how near the limit of its link.

``python -m benchmarks.decode_cache`` decodes with a cache that is a model's buffers, on the processor with the drive
behind RAM, held to a speed where blkio cgroups can be made, and on the emulated accelerator with RAM behind its memory,
at the speeds of its preset and at a quarter of them. A token reads the whole cache and writes a row of each part.
Beside the seconds stand the bytes that no plan avoids, cache and weights less the budget, divided by the bandwidth of
the link that they come over, and how busy other processes kept the processor. Results go to
``benchmarks/results/decode_cache-<machine>-<date>.json``, and to standard output with ``--json``.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import gascompile
from benchmarks.cached_decoder import build_decoder, cache_bytes
from benchmarks.emulated import slower
from benchmarks.environment import headed, write_result
from benchmarks.throttled import can_throttle, throttled
from gascompile.core.budget import Budget
from gascompile.core.machine import Machine
from gascompile.core.serial import to_json
from gascompile.core.sizes import MIB, format_size
from gascompile.cost_models.measure.host import OtherWork
from gascompile.machines.resolve import resolve_machine
from gascompile.runtime.transfer.engine import read_blocks

LEAST_SHARE = 0.85
_WARM_TOKENS = 3
_WIDTH = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One decoder on one machine."""

    machine: str | None
    """``None`` for this one."""
    num_layers: int
    width: int
    num_heads: int
    num_tokens: int
    budget_bytes: int
    """Of the tier that computes, a quarter of the cache."""
    link: str
    """Over which the cache comes back."""
    speed: float = 1.0
    """Of links, as a share of the machine's, or of the drive, in bytes per second, where that is held to one."""


CASES = (
    Case(
        machine=None,
        num_layers=32,
        width=256,
        num_heads=8,
        num_tokens=8192,
        budget_bytes=128 * MIB,
        link="nvme->cpu",
        speed=300e6,
    ),
    *(
        Case(
            machine="emulated",
            num_layers=32,
            width=256,
            num_heads=8,
            num_tokens=8192,
            budget_bytes=128 * MIB,
            link="cpu->gpu",
            speed=speed,
        )
        for speed in (1.0, 0.25)
    ),
)
TOY = tuple(
    Case(
        machine=machine,
        num_layers=16,
        width=64,
        num_heads=4,
        num_tokens=4096,
        budget_bytes=8 * MIB,
        link=link,
    )
    for machine, link in ((None, "nvme->cpu"), ("emulated", "cpu->gpu"))
)


def _machine_of(case: Case, own: Machine, *, throttles: bool) -> Machine:
    """Return this machine with its drive held to a speed, or an emulated one with room for the budget."""
    if case.machine is not None:
        tier = replace(own.tiers["gpu"], size_bytes=case.budget_bytes)
        return slower(own.with_place(tier), 1 / case.speed)
    if not throttles or case.speed <= 1:
        return own
    return replace(
        own,
        links=tuple(
            replace(link, bandwidth_bytes_per_s=case.speed, pipe_bytes_per_byte=None)
            for link in own.links
        ),
        pipes=tuple(replace(pipe, bandwidth_bytes_per_s=case.speed) for pipe in own.pipes),
    )


def measure(case: Case, machine: Machine, cache: Path, num_tokens: int) -> dict[str, Any]:
    """Return what tokens take, and what they have to."""
    decoder = build_decoder(
        num_layers=case.num_layers,
        width=case.width,
        num_heads=case.num_heads,
        num_tokens=case.num_tokens,
    )
    assert cache_bytes(decoder) == 4 * case.budget_bytes
    eager = copy.deepcopy(decoder)
    weights_bytes = sum(parameter.nbytes for parameter in decoder.parameters())
    token, position = torch.tensor([[1]]), torch.tensor([0])
    on_host = machine.compute_tier == "cpu"
    budget = Budget(cpu=case.budget_bytes) if on_host else Budget(gpu=case.budget_bytes)
    others, times_s, is_equal = OtherWork(), list[float](), True
    start_s = time.perf_counter()
    with gascompile.compile(
        decoder, budget, (token, position), machine=machine, cache_dir=cache, fuse="off"
    ) as compiled:
        compile_s = time.perf_counter() - start_s
        plan, report = compiled.plan, compiled.last_run
        peaks: dict[str, int] = {}
        for number in range(_WARM_TOKENS + num_tokens):
            if number == _WARM_TOKENS:
                others.begin()
            position = torch.tensor([number])
            start_s = time.perf_counter()
            logits = compiled(token, position)
            if number >= _WARM_TOKENS:
                times_s.append(time.perf_counter() - start_s)
            report = compiled.last_run
            assert report is not None
            for tier, peak in report.peak_bytes.items():
                peaks[tier] = max(peaks.get(tier, 0), peak)
            with torch.no_grad():
                wanted = eager(token, position)
            is_equal &= torch.equal(logits, wanted)
            token = logits.argmax(-1)
        others_cpu = others.num_processors()
    assert report is not None
    median_s = statistics.median(times_s)
    link = machine.link(case.link)
    unavoidable_bytes = cache_bytes(decoder) + weights_bytes - case.budget_bytes
    limit_s = unavoidable_bytes / link.bandwidth_bytes_per_s
    written_bytes = sum(
        count for name, count in report.link_bytes.items() if not name.endswith(case.link[-3:])
    )
    return {
        **asdict(case),
        "cache_bytes": cache_bytes(decoder),
        "weights_bytes": weights_bytes,
        "compile_s": compile_s,
        "predicted_s": plan.certificate.predicted_s,
        "median_s": median_s,
        "times_s": times_s,
        "others_cpu": others_cpu,
        "unavoidable_bytes": unavoidable_bytes,
        "bytes_per_s": link.bandwidth_bytes_per_s,
        "limit_s": limit_s,
        "share_of_limit": limit_s / median_s,
        "share_holds": limit_s / median_s >= LEAST_SHARE,
        "compute_s": sum(op.time_s for op in plan.ops),
        "is_equal": bool(is_equal),
        "link_bytes": {name: count for name, count in report.link_bytes.items() if count},
        "written_bytes": written_bytes,
        "peak_bytes": peaks,
        "peak_holds": all(peak <= plan.budget_bytes[tier] for tier, peak in peaks.items()),
        "strategy": plan.strategy,
        "paths": dict(report.paths),
    }


def show(rows: list[dict[str, Any]], console: Console) -> None:
    """Print the result as a table."""
    table = Table(title="A token with a cache of four times its tier")
    for title in ("computes on", "cache", "budget", "limit", "predicted", "measured", "share"):
        table.add_column(title, justify="right")
    for title in ("written", "tokens", "peak", "others"):
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(
            f"{row['machine'] or 'processor'}, {row['bytes_per_s'] / 1e9:.2f} GB/s",
            format_size(row["cache_bytes"]),
            format_size(row["budget_bytes"]),
            f"{row['limit_s'] * 1e3:.1f} ms",
            f"{row['predicted_s'] * 1e3:.1f} ms",
            f"{row['median_s'] * 1e3:.1f} ms",
            f"{row['share_of_limit']:.3f}",
            format_size(row["written_bytes"]),
            "equal" if row["is_equal"] else "WRONG",
            "kept" if row["peak_holds"] else "WRONG",
            f"{row['others_cpu']:.2f}",
        )
    console.print(table)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run the benchmark and write its result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=10, help="timed tokens per case")
    parser.add_argument("--cache", type=Path, help="folder to keep the machine and plans in")
    parser.add_argument("-o", "--output", type=Path, help="result file")
    parser.add_argument("--json", action="store_true", help="print the result, too")
    parser.add_argument("--toy", action="store_true", help="small caches, to try the script")
    options = parser.parse_args(arguments)
    console = Console(stderr=True, width=_WIDTH)
    # Beside one thread that computes the others have a processor for what links do.
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="gascompile-bench-") as scratch:
        cache = options.cache or Path(scratch) / "cache"
        rows, machines = [], []
        cache.mkdir(parents=True, exist_ok=True)
        throttles = can_throttle(cache)
        for case in TOY if options.toy else CASES:
            own = resolve_machine(case.machine, cache_dir=cache, read=read_blocks)
            machine = _machine_of(case, own, throttles=throttles)
            is_held = throttles and case.machine is None and case.speed > 1
            machines.append(to_json(machine))
            with throttled(cache, case.speed) if is_held else contextlib.nullcontext():
                row = measure(case, machine, cache, options.tokens)
            rows.append({**row, "drive_is_held": is_held})
        result = {
            **headed("decode_cache"),
            "tokens": options.tokens,
            "least_share": LEAST_SHARE,
            "machines": machines,
            "cases": rows,
        }
    output = write_result(result, options.output)
    show(rows, console)
    console.print(f"written: {output}")
    if options.json:
        sys.stdout.write(output.read_text())
    return result


if __name__ == "__main__":
    main()
