"""One contender of the GPU benchmark in a process of its own; prints one JSON object.

Every step computes the next token's logits of each sequence of the batch, behind an empty cache.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_here import device_here, finish, has_gpu, reset_peak
from benchmarks.gpu_models import SHAPES, empty_llama, llama_in_memory, weight_bytes
from gascompile.core.sizes import GIB

_RUNS_TO_PAY = 1000.0
"""What ``compile`` takes by default."""


def main() -> None:
    """Run the contender named on the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("contender", choices=sorted(_CONTENDERS))
    parser.add_argument("--shape", choices=sorted(SHAPES), default="toy")
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--checkpoint", type=Path, help="read weights from there, not from memory")
    parser.add_argument("--budgets", nargs="+", default=[], help="of the GPU; none: all it holds")
    parser.add_argument("--batches", type=int, nargs="+", default=[1])
    parser.add_argument("--machine", help="without it this machine, measured")
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    torch.manual_seed(0)
    with torch.no_grad():
        print(json.dumps(_CONTENDERS[options.contender](options)))


def run_gascompile(options: argparse.Namespace) -> dict[str, Any]:
    """Measure each budget with each batch, one plan after the other."""
    import gascompile

    shape = SHAPES[options.shape]
    model = empty_llama(shape) if options.checkpoint else llama_in_memory(shape)
    rows: list[dict[str, Any]] = []
    found = {"weight_bytes": weight_bytes(shape), "rows": rows}
    # With all weights in its memory it is compared with a compiler of kernels, so it compiles all of its own.
    runs_to_pay = _RUNS_TO_PAY if options.budgets else math.inf
    for budget in options.budgets or [None]:
        for batch in options.batches:
            ids = _inputs(options, batch)
            start = time.perf_counter()
            compiled = gascompile.compile(
                model,
                budget,
                example_inputs={"input_ids": ids, "use_cache": False},
                checkpoint=options.checkpoint,
                machine=options.machine,
                cache_dir=options.scratch / "cache",
                fuse_runs=runs_to_pay,
            )
            compile_s = time.perf_counter() - start
            reset_peak()
            row = _timed(_step(compiled, ids), options, batch)
            row |= {"budget": budget, "compile_s": compile_s, **_planned(compiled)}
            if row["allocated_peak_bytes"] is not None:
                # Torch does not count what graphs hold; the run's own report does.
                peaks = (row["allocated_peak_bytes"], row["measured_peak_bytes"])
                row["allocated_peak_bytes"] = max(peaks)
            compiled.close()
            rows.append(row)
            _tell(found)
    return found


def run_accelerate(options: argparse.Namespace) -> dict[str, Any]:
    """The same model with accelerate's ``cpu_offload``, or ``disk_offload`` where a checkpoint is given."""
    import accelerate

    device = device_here()
    start = time.perf_counter()
    model = llama_in_memory(SHAPES[options.shape])
    if options.checkpoint:
        folder = options.scratch / "offload"
        model = accelerate.disk_offload(model, str(folder), execution_device=device)
    else:
        model = accelerate.cpu_offload(model, execution_device=device)
    ready_s = time.perf_counter() - start
    reset_peak()
    return {"ready_s": ready_s, "rows": _calls(model, options)}


def run_torch_compile(options: argparse.Namespace) -> dict[str, Any]:
    """The same model with all weights in the GPU's memory, under plain ``torch.compile``."""
    model = llama_in_memory(SHAPES[options.shape]).to(device_here())
    return {"rows": _calls(torch.compile(model), options, device=device_here())}


def run_link(options: argparse.Namespace) -> dict[str, Any]:
    """Return what the link into the GPU carries: copies of pinned memory, or what the machine's file says."""
    if options.machine is not None:
        from gascompile.machines.resolve import resolve_machine
        from gascompile.runtime.transfer.engine import read_blocks

        cache = options.scratch / "cache"
        machine = resolve_machine(options.machine, cache_dir=cache, read=read_blocks)
        rates = {link.name: link.bandwidth_bytes_per_s for link in machine.links}
        return {"bytes_per_s": rates["cpu->gpu"], "source": f"machine '{machine.name}'"}
    host = torch.empty(GIB, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(GIB, dtype=torch.uint8, device=device_here())
    times = []
    for _ in range(12):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        target.copy_(host, non_blocking=True)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    return {"bytes_per_s": GIB / statistics.median(times[2:]), "source": "1 GiB of pinned memory"}


def _calls(
    model: Callable[..., Any], options: argparse.Namespace, *, device: torch.device | None = None
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for batch in options.batches:
        ids = _inputs(options, batch).to(device)
        rows.append(_timed(_step(model, ids), options, batch))
        _tell({"rows": rows})
    return rows


def _tell(found: dict[str, Any]) -> None:
    """Print what there is so far: whoever ends this process early has it."""
    print(json.dumps(found), flush=True)


def _step(model: Callable[..., Any], ids: torch.Tensor) -> Callable[[], Any]:
    """Return a call without arguments that computes the next token's logits."""
    return lambda: model(input_ids=ids, use_cache=False)


def _timed(call: Callable[[], Any], options: argparse.Namespace, batch: int) -> dict[str, Any]:
    """Return what a step takes after two that are not counted, and how its result can be recognised."""
    start = time.perf_counter()
    logits = call().logits
    finish()
    first_s = time.perf_counter() - start
    call()
    times = []
    for _ in range(options.runs):
        finish()
        start = time.perf_counter()
        call()
        finish()
        times.append(time.perf_counter() - start)
    median_s = statistics.median(times)
    values = logits.float().cpu()
    return {
        "batch": batch,
        "first_s": first_s,
        "times_s": times,
        "median_s": median_s,
        "tokens_per_s": batch / median_s,
        "allocated_peak_bytes": torch.cuda.max_memory_allocated() if has_gpu() else None,
        "checksum": float(values.abs().mean()),
        "logits": values[0, -1, :8].tolist(),
    }


def _planned(compiled: Any) -> dict[str, Any]:
    """Return what the plan and the last run say of themselves."""
    plan, report = compiled.plan, compiled.last_run
    tier = plan.machine.compute_tier
    return {
        "machine": plan.machine.name,
        "budget_bytes": dict(plan.budget_bytes)[tier],
        "planned_peak_bytes": plan.peak_bytes[tier],
        "measured_peak_bytes": report.peak_bytes[tier],
        "predicted_s": plan.certificate.predicted_s,
        "limit_s": plan.certificate.limit_s,
        "gap": plan.certificate.gap,
        "solve_s": plan.certificate.solve_s,
        "strategy": plan.strategy,
        "link_bytes": dict(report.link_bytes),
        "stall_s": report.stall_s,
        "paths": dict(report.paths),
        "fused": dataclasses.asdict(compiled.fused),
        "graphs": dataclasses.asdict(compiled.graphs) if compiled.graphs else None,
    }


def _inputs(options: argparse.Namespace, batch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    vocabulary = SHAPES[options.shape]["vocab_size"]
    # The first sequence is the same in every batch.
    return torch.randint(0, vocabulary, (16, 1), generator=generator)[:batch].clone()


_CONTENDERS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "gascompile": run_gascompile,
    "accelerate": run_accelerate,
    "torch_compile": run_torch_compile,
    "link": run_link,
}

if __name__ == "__main__":
    main()
