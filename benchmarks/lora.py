"""Fine-tune adapters of a base model that does not fit: LoRA of rank 8 on a Llama of 1.1 billion bf16 parameters.

    python -m benchmarks.lora [--budget 1200MiB] [--tokens 256] [--steps 4] [--checkpoint FOLDER]

The same steps run three ways, each in a process of its own: peft with the base in memory; planned within the budget,
in a memory cgroup of the budget and 700 MiB, from a base on the meta device that is read in place; and peft over a base
that accelerate has put on the drive. Writes ``benchmarks/results/lora-<machine>-<date>.json`` with seconds, losses,
what the cache of the planned run takes and whether the base's files are what they were.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.anonymous import PeakSampler
from benchmarks.environment import headed, write_result
from benchmarks.limited import run_limited
from benchmarks.llama_checkpoint import SHAPE_1B, write_llama
from gascompile.core.sizes import MIB, format_size, parse_size

PROCESS_BYTES = 700 * MIB
"""What the interpreter and the libraries may take beside the budget."""
_UNLIMITED_BYTES = 1 << 40
_TOY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}
_WAYS = ("memory", "planned", "accelerate")
_ASKED = 1.25
_LIMIT_S = 3600.0
"""Processors without instructions for bf16 take minutes for a step in memory."""


def with_adapters(base: Any) -> Any:
    """Return the base with adapters in float32, which have the same first values however the base was made."""
    import peft
    from peft.tuners.lora import LoraLayer

    model = peft.get_peft_model(base, peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, LoraLayer):
            for part in (module.lora_A, module.lora_B):
                part.to_empty(device="cpu").float()
            module.reset_lora_parameters("default", True)  # type: ignore[no-untyped-call]
    model.train()
    return model


def loss_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the loss of predicting each token from those before it."""
    loss: torch.Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    return loss


def adapter_optimizer(model: Any) -> torch.optim.Optimizer:
    """Return AdamW over what is trained."""
    # The kernel of planned updates: AdamW's default rounds otherwise, which bf16 makes a thousand times larger.
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-3, fused=True)


def eager_step(base: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a plain step of peft's over a base."""
    model = with_adapters(base)
    optimizer = adapter_optimizer(model)

    def step(ids: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, ids)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def _in_memory(options: argparse.Namespace) -> Callable[[torch.Tensor], torch.Tensor]:
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(options.checkpoint, dtype=torch.bfloat16)
    # Its pages are those of the file until something copies them: the steps are to find them in memory.
    for parameter in base.parameters():
        parameter.data = parameter.data.clone()
    return eager_step(base)


def _by_accelerate(options: argparse.Namespace) -> Callable[[torch.Tensor], torch.Tensor]:
    from transformers import AutoModelForCausalLM

    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    places |= {"lm_head": "cpu", "model.layers": "disk"}
    base = AutoModelForCausalLM.from_pretrained(
        options.checkpoint,
        dtype=torch.bfloat16,
        device_map=places,
        offload_folder=str(options.cache),
    )
    return eager_step(base)


def planned_step(
    options: argparse.Namespace, ids: torch.Tensor, dtype: torch.dtype, weights: Path
) -> Any:
    """Return a planned step over a base on the meta device, which is read in place from ``weights``."""
    from transformers import AutoConfig, AutoModelForCausalLM

    import gascompile

    with torch.device("meta"):
        config = AutoConfig.from_pretrained(options.checkpoint)
        base = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model = with_adapters(base)
    return gascompile.compile_step(
        model,
        loss_of,
        adapter_optimizer(model),
        options.budget,
        ids,
        checkpoint=weights,
        cache_dir=options.cache,
    )


def work(options: argparse.Namespace) -> dict[str, Any]:
    """Take the steps of one way; returns losses, seconds and the peak of anonymous memory."""
    torch.set_num_threads(2)
    ids = torch.randint(0, 256, (1, options.tokens), generator=torch.Generator().manual_seed(0))
    begin_s = time.perf_counter()
    with PeakSampler() as peak:
        if options.way == "planned":
            step = planned_step(options, ids, torch.bfloat16, options.checkpoint)
        else:
            step = (_in_memory if options.way == "memory" else _by_accelerate)(options)
        found: dict[str, Any] = {"ready_s": time.perf_counter() - begin_s}
        losses, seconds, cpu_seconds = [], [], []
        for _ in range(options.steps):
            begin_s, cpu_begin_s = time.perf_counter(), time.process_time()
            losses.append(float(step(ids)))
            seconds.append(time.perf_counter() - begin_s)
            cpu_seconds.append(time.process_time() - cpu_begin_s)
        if options.way == "planned":
            report, certificate = step.last_run, step.plan.certificate
            found |= {
                "link_bytes": dict(report.link_bytes),
                "predicted_s": certificate.predicted_s,
                "planned_peak_bytes": report.peak_bytes["cpu"],
            }
            step.close()
        found["peak_bytes"] = peak.take_peak_bytes()
    return {**found, "losses": losses, "seconds": seconds, "cpu_seconds": cpu_seconds}


def run(way: str, options: argparse.Namespace, cache: Path) -> dict[str, Any]:
    """Take the steps of one way in a process of its own; an error is a result, too."""
    command = [sys.executable, "-m", "benchmarks.lora", "--way", way, "--cache", str(cache)]
    command += ["--checkpoint", str(options.checkpoint), "--budget", options.budget]
    command += ["--tokens", str(options.tokens), "--steps", str(options.steps)]
    is_limited = way == "planned"
    limit_bytes = parse_size(options.budget) + PROCESS_BYTES if is_limited else _UNLIMITED_BYTES
    done = run_limited(command, limit_bytes, timeout_s=_LIMIT_S)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return {"error": lines[-1][:500] if lines else f"exit code {done.returncode}"}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found | {"limited": done.limited and is_limited}


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Run all ways."""
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        if options.checkpoint is None:
            options.checkpoint = folder / "base"
            write_llama(options.checkpoint, _TOY if options.toy else SHAPE_1B, dtype="bfloat16")
        files = sorted(options.checkpoint.glob("*.safetensors"))
        before = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
        rounds = [
            {way: run(way, options, folder / way) for way in ("memory", "planned")}
            for _ in range(options.rounds)
        ]
        accelerate = run("accelerate", options, folder / "accelerate")
        after = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
        cache = [path.stat() for path in (folder / "planned").rglob("*") if path.is_file()]
    result: dict[str, Any] = {
        "base_bytes": sum(size for _, size, _ in before),
        "base_unchanged": before == after,
        "cache_bytes": sum(stat.st_blocks * 512 for stat in cache),
        "rounds": rounds,
        "accelerate": accelerate,
    }
    if all("losses" in found for one in rounds for found in one.values()):
        last = rounds[-1]
        pairs = zip(last["memory"]["losses"], last["planned"]["losses"], strict=True)
        result["max_difference"] = max(abs(a - b) for a, b in pairs)
        # The first step of a process reads what stays in memory, and is none of the others.
        for key, measured in (("", "seconds"), ("cpu_", "cpu_seconds")):
            step_s = {
                way: statistics.median(s for one in rounds for s in one[way][measured][1:])
                for way in ("memory", "planned")
            }
            result[f"{key}step_s"] = step_s
            result[f"{key}ratio"] = step_s["planned"] / step_s["memory"]
        result["asked"] = _ASKED
    return result


def show(result: dict[str, Any], console: Console) -> None:
    """Print a table of the ways."""
    table = Table(title=f"base of {format_size(result['base_bytes'])}")
    for column in ("way", "step", "anonymous peak", "losses"):
        table.add_column(column)
    last = result["rounds"][-1] | {"accelerate": result["accelerate"]}
    for way in _WAYS:
        found = last[way]
        if "error" in found:
            table.add_row(way, "-", "-", found["error"])
            continue
        losses = f"{found['losses'][0]:.5f} to {found['losses'][-1]:.5f}"
        step_s = statistics.median(found["seconds"][1:])
        table.add_row(way, f"{step_s:.3f} s", format_size(found["peak_bytes"]), losses)
    console.print(table)
    if "ratio" in result:
        console.print(
            f"planned / memory: {result['ratio']:.3f} of seconds, {result['cpu_ratio']:.3f} of processor time (asked "
            f"{_ASKED}); losses differ by "
            f"{result['max_difference']:.2g}; the base's files are {'un' * result['base_unchanged']}changed, the cache "
            f"takes {format_size(result['cache_bytes'])}"
        )


def main() -> int:
    """Measure, print and write the result; 0 where planned steps ran and the base is what it was."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--budget", default="1200MiB", help="of the planned way (default: 1200MiB)")
    parser.add_argument("--tokens", type=int, default=256, help="of the one row (default: 256)")
    parser.add_argument("--steps", type=int, default=4, help="of each way (default: 4)")
    parser.add_argument(
        "--rounds", type=int, default=2, help="of the two ways in turn (default: 2)"
    )
    parser.add_argument("--checkpoint", type=Path, help="a bf16 Llama; by default random weights")
    parser.add_argument("--folder", type=Path, help="where checkpoint and caches are made")
    parser.add_argument("--toy", action="store_true", help="a tiny model, to try the script")
    parser.add_argument("-o", "--output", type=Path, help="result file")
    parser.add_argument("--way", choices=_WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--cache", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way is not None:
        print(json.dumps(work(options)), flush=True)
        return 0
    result = {**headed("lora"), "budget": options.budget, "tokens": options.tokens}
    result |= {"load": os.getloadavg()[0], **compare(options)}
    console = Console(highlight=False)
    show(result, console)
    if not options.toy or options.output:
        console.print(f"written: {write_result(result, options.output)}")
    return 0 if result["base_unchanged"] and "ratio" in result else 1


if __name__ == "__main__":
    sys.exit(main())
