"""One contender of ``inference_offload`` in a process of its own; prints one JSON object."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

transformers.utils.logging.disable_progress_bar()


def main() -> None:
    """Run the contender named on the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("contender", choices=sorted(_CONTENDERS))
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--budget", default="1.5GiB")
    parser.add_argument("--machine", help="machine file; this machine is measured without it")
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    torch.manual_seed(0)
    print(json.dumps(_CONTENDERS[options.contender](options)))


def _inputs(options: argparse.Namespace) -> torch.Tensor:
    return torch.randint(0, 8000, (1, options.tokens), generator=torch.Generator().manual_seed(1))


def _steady(call: Callable[[], Any], runs: int) -> list[float]:
    """Return the seconds of ``runs`` calls after one that is not counted."""
    call()
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


def run_gascompile(options: argparse.Namespace) -> dict[str, Any]:
    """Time to the first output with and without a cached plan is the caller's choice of scratch folder."""
    from accelerate import init_empty_weights

    import gascompile

    start = time.perf_counter()
    config = transformers.AutoConfig.from_pretrained(options.model)
    with init_empty_weights(include_buffers=False):
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    ids = _inputs(options)
    compile_start = time.perf_counter()
    compiled = gascompile.compile(
        model,
        options.budget,
        example_inputs={"input_ids": ids, "use_cache": False},
        checkpoint=options.model,
        machine=options.machine,
        cache_dir=options.scratch / "cache",
    )
    ready_s = time.perf_counter() - start
    compile_s = time.perf_counter() - compile_start
    logits = compiled(input_ids=ids, use_cache=False).logits
    first_s = time.perf_counter() - start
    times = _steady(lambda: compiled(input_ids=ids, use_cache=False), options.runs)
    report, plan = compiled.last_run, compiled.plan
    assert report is not None
    return {
        "compile_s": compile_s,
        "ready_s": ready_s,
        "first_output_s": first_s,
        "times_s": times,
        "median_s": statistics.median(times),
        "predicted_s": plan.certificate.predicted_s,
        "limit_s": plan.certificate.limit_s,
        "gap": plan.certificate.gap,
        "solve_s": plan.certificate.solve_s,
        "strategy": plan.strategy,
        "budget_bytes": dict(plan.budget_bytes)["cpu"],
        "planned_peak_bytes": plan.peak_bytes["cpu"],
        "measured_peak_bytes": report.peak_bytes["cpu"],
        "process_peak_bytes": report.process_peak_bytes,
        "link_bytes": dict(report.link_bytes),
        "planned_link_bytes": dict(plan.link_bytes),
        "stall_s": report.stall_s,
        "paths": dict(report.paths),
        "checksum": float(logits.double().abs().sum()),
    }


def run_accelerate(options: argparse.Namespace) -> dict[str, Any]:
    """The same model by ``infer_auto_device_map`` with a CPU share and a disk folder."""
    from accelerate import infer_auto_device_map, init_empty_weights, load_checkpoint_and_dispatch

    start = time.perf_counter()
    config = transformers.AutoConfig.from_pretrained(options.model)
    with init_empty_weights():
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    device_map = infer_auto_device_map(
        model,
        max_memory={"cpu": "1500MB", "disk": "1000GB"},
        no_split_module_classes=["LlamaDecoderLayer"],
    )
    model = load_checkpoint_and_dispatch(
        model, options.model, device_map=device_map, offload_folder=options.scratch / "offload"
    )
    ready_s = time.perf_counter() - start
    ids = _inputs(options)
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
        first_s = time.perf_counter() - start
        times = _steady(lambda: model(input_ids=ids, use_cache=False), options.runs)
    return {
        "ready_s": ready_s,
        "first_output_s": first_s,
        "times_s": times,
        "median_s": statistics.median(times),
        "checksum": float(logits.double().abs().sum()),
    }


def run_resident(options: argparse.Namespace) -> dict[str, Any]:
    """The compute limit: the same program with all weights in memory."""
    options.budget = str(64 << 30)
    return run_gascompile(options)


def run_read(options: argparse.Namespace) -> dict[str, Any]:
    """The disk limit: the bytes of the plan's moves read by the same engine, and nothing else."""
    from accelerate import init_empty_weights

    import gascompile
    from gascompile.core.steps import Prefetch
    from gascompile.runtime.run.session import Session

    config = transformers.AutoConfig.from_pretrained(options.model)
    with init_empty_weights(include_buffers=False):
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    compiled = gascompile.compile(
        model,
        options.budget,
        example_inputs={"input_ids": _inputs(options), "use_cache": False},
        checkpoint=options.model,
        machine=options.machine,
        cache_dir=options.scratch / "cache",
    )
    plan, weights = compiled.plan, compiled.weights
    compiled.close()
    moves = [step for step in plan.steps if isinstance(step, Prefetch)]
    with Session(
        arena_bytes=plan.arena_bytes["cpu"],
        residents={},
        sources=weights.sources,
        stamps=weights.stamps,
        io=plan.machine.io,
    ) as session:

        def read_all() -> None:
            tickets = [
                session.engine.submit(session.landing(m.tensor), m.address, key=i, link=m.link)
                for i, m in enumerate(moves)
            ]
            for ticket in tickets:
                ticket.wait()

        times = _steady(read_all, options.runs)
    return {
        "times_s": times,
        "median_s": statistics.median(times),
        "bytes": sum(move.size_bytes for move in moves),
    }


_CONTENDERS = {
    "gascompile": run_gascompile,
    "accelerate": run_accelerate,
    "resident": run_resident,
    "read": run_read,
}

if __name__ == "__main__":
    main()
