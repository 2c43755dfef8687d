"""Planning Llamas of 8B to 405B parameters for one H100: seconds, memory and what is proven.

``python -m benchmarks.planning`` takes each model from a folder with nothing but a ``config.json`` to a
saved and verified plan, in a process of its own, and then one shape with ever more layers. It writes
``benchmarks/results/planning-<machine>-<date>.json``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.environment import headed, write_result
from gascompile.core.budget import Budget
from gascompile.core.errors import InfeasiblePlanError
from gascompile.core.plan import Plan
from gascompile.core.sizes import GIB, format_size
from gascompile.cost_models.simulate.replay import replay_plan

MACHINE = "h100-gen5"
GPU_BYTES, CPU_BYTES = 24 * GIB, 64 * GIB
STAGES = ("import", "open", "capture", "annotate", "solve", "save", "verify")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One model with its inputs and its budget."""

    name: str
    num_layers: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int = 8
    vocabulary: int = 128256
    batch: int = 1
    tokens: int = 1
    gpu_bytes: int = GPU_BYTES
    cpu_bytes: int = CPU_BYTES

    def with_layers(self, num_layers: int) -> Case:
        """Return the case with another depth, and budgets in proportion."""
        return replace(
            self,
            num_layers=num_layers,
            gpu_bytes=self.gpu_bytes * num_layers // self.num_layers,
            cpu_bytes=self.cpu_bytes * num_layers // self.num_layers,
        )


MODELS = (
    Case(name="8B", num_layers=32, hidden=4096, intermediate=14336, num_heads=32),
    Case(name="70B", num_layers=80, hidden=8192, intermediate=28672, num_heads=64),
    Case(name="405B", num_layers=126, hidden=16384, intermediate=53248, num_heads=128),
)
TOY = Case(
    name="toy",
    num_layers=4,
    hidden=64,
    intermediate=192,
    num_heads=4,
    num_kv_heads=2,
    vocabulary=512,
    gpu_bytes=256 << 10,
    cpu_bytes=GIB,
)
INPUTS = ((1, 1), (64, 1), (1, 2048))
"""Batch and tokens: a decoding step alone and for 64 texts, and a prefill."""
LAYERS = (10, 20, 40, 80, 160)
TARGETS = {"70B": {"solve_s": 5.0, "total_s": 45.0}, "405B": {"solve_s": 15.0}}
"""Beside them, for every case: a gap of a percent and 4 GiB of memory."""


class Stopwatch:
    """Wall and processor seconds by stage."""

    def __init__(self) -> None:
        self.wall_s: dict[str, float] = {}
        self.cpu_s: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage."""
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        yield
        self.wall_s[name] = time.perf_counter() - wall_s
        self.cpu_s[name] = time.process_time() - cpu_s


def plan_case(case: Case, folder: Path) -> dict[str, Any]:
    """Plan ``case`` in this process; return its seconds by stage, its certificate and its peak memory."""
    watch = Stopwatch()
    with watch.stage("import"):
        from gascompile.api.compile import Job
        from gascompile.api.sources import open_source
        from gascompile.capture.calls import normalize_call
        from gascompile.core.config import CompileConfig
        from gascompile.integrations.huggingface import register_pytrees
        from gascompile.machines.resolve import resolve_machine
        from gascompile.passes.graph.annotate import annotate
        from gascompile.passes.plan.make_plan import make_plan
        from gascompile.passes.verify.walk import verify
        from gascompile.runtime.transfer.engine import read_blocks
    write_config(case, folder)
    machine = resolve_machine(MACHINE, cache_dir=folder, read=read_blocks)
    budget = Budget(gpu=case.gpu_bytes, cpu=case.cpu_bytes)
    with watch.stage("open"):
        opened = open_source(folder, batch=case.batch, tokens=case.tokens)
        register_pytrees()
        assert opened.inputs is not None
        args, kwargs = normalize_call(opened.model, *opened.inputs)
    job = Job(model=opened.model, machine=machine, budget=budget, config=CompileConfig())
    with watch.stage("capture"):
        captured = job.capture(args, kwargs)
        prints = job.fingerprint(args, kwargs, None)
    with watch.stage("annotate"):
        workload = annotate(captured.program, machine).workload
    result: dict[str, Any] = {**asdict(case), "ops": len(workload.ops)}
    try:
        with watch.stage("solve"):
            plan = make_plan(workload, machine, budget, fingerprint=prints)
    except InfeasiblePlanError as error:
        return {**result, "infeasible": str(error)}
    with watch.stage("save"):
        plan.save(folder / "plan.json")
    with watch.stage("verify"):
        verify(Plan.load(folder / "plan.json"))
    found = plan.certificate
    return {
        **result,
        "wall_s": watch.wall_s,
        "cpu_s": watch.cpu_s,
        "solve_s": found.solve_s,
        "gap": found.gap,
        "status": str(found.status),
        "predicted_s": found.predicted_s,
        "lower_bound_s": found.lower_bound_s,
        "limit_s": found.limit_s,
        "replayed_s": replay_plan(plan).seconds,
        "binding": found.binding,
        "strategy": plan.strategy,
        "plan_peak_bytes": dict(plan.peak_bytes),
        "link_bytes": dict(plan.link_bytes),
        "warnings": list(plan.warnings),
        "peak_bytes": peak_bytes(),
    }


def write_config(case: Case, folder: Path) -> None:
    """Write the ``config.json`` of a Llama and nothing else."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        num_hidden_layers=case.num_layers,
        hidden_size=case.hidden,
        intermediate_size=case.intermediate,
        num_attention_heads=case.num_heads,
        num_key_value_heads=case.num_kv_heads,
        vocab_size=case.vocabulary,
        max_position_embeddings=8192,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(folder)


def peak_bytes() -> int:
    """Return the most memory that this process has held."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("this system does not say how much memory a process has held")


def run_case(case: Case, console: Console) -> dict[str, Any]:
    """Plan ``case`` in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.planning", "--case", json.dumps(asdict(case))]
    begun_s = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    total_s = time.perf_counter() - begun_s
    if done.returncode != 0:
        tail = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise SystemExit(f"planning {case.name} failed with code {done.returncode}:\n{tail}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    # With the interpreter's start and all imports.
    result["total_s"] = total_s
    said = result.get("infeasible") or f"{result['total_s']:.1f} s, gap {result['gap']:.2%}"
    console.print(f"  {case.name} {case.num_layers} layers, {case.batch} x {case.tokens}: {said}")
    return result


def misses(row: dict[str, Any]) -> list[str]:
    """Return which targets a case misses."""
    if "infeasible" in row:
        return []
    targets = {"gap": 0.01, "peak_bytes": 4 * GIB, **TARGETS.get(row["name"], {})}
    return [name for name, most in targets.items() if row[name] > most]


def report(result: dict[str, Any], console: Console) -> None:
    """Print the result as tables."""
    for title, rows in (("Models", result["cases"]), ("Layers", result["layers"])):
        table = Table(title=f"{title}: seconds by stage")
        names = ("model", "layers", "input", *STAGES, "total", "gap", "of limit", "peak", "misses")
        for name in names:
            table.add_column(name, justify="right")
        for row in rows:
            head = [row["name"], str(row["num_layers"]), f"{row['batch']} x {row['tokens']}"]
            if "infeasible" in row:
                table.add_row(*head, "infeasible")
                continue
            table.add_row(
                *head,
                *(f"{row['wall_s'][stage]:.2f}" for stage in STAGES),
                f"{row['total_s']:.1f}",
                f"{row['gap']:.2%}",
                f"{row['limit_s'] / row['predicted_s']:.1%}",
                format_size(row["peak_bytes"]),
                ", ".join(misses(row)) or "none",
            )
        console.print(table)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run the benchmark and write its result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", help="plan this one, as JSON, and print the result")
    parser.add_argument("-o", "--output", type=Path, help="result file")
    parser.add_argument("--toy", action="store_true", help="a tiny model, to try the script")
    options = parser.parse_args(arguments)
    if options.case:
        with tempfile.TemporaryDirectory(prefix="gascompile-bench-") as folder:
            one = plan_case(Case(**json.loads(options.case)), Path(folder))
        print(json.dumps(one))
        return one
    console = Console(stderr=True, width=160)
    models = [TOY] if options.toy else list(MODELS)
    inputs = [(1, 1)] if options.toy else list(INPUTS)
    layers = [2] if options.toy else list(LAYERS)
    deep = TOY if options.toy else MODELS[1]
    cases = [
        replace(model, batch=batch, tokens=tokens) for model in models for batch, tokens in inputs
    ]
    result = {
        **headed("planning"),
        "machine": MACHINE,
        "cases": [run_case(case, console) for case in cases],
        "layers": [run_case(deep.with_layers(count), console) for count in layers],
    }
    output = write_result(result, options.output)
    report(result, console)
    console.print(f"written: {output}")
    return result


if __name__ == "__main__":
    main()
