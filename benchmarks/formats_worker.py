"""One form of the weights at one budget, or eager, in a process of its own; prints one JSON object."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

transformers.utils.logging.disable_progress_bar()


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("form", choices=("eager", "fp32", "bf16", "int8", "int4"))
    parser.add_argument("--model", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--machine", help="machine file")
    parser.add_argument("--budget")
    parser.add_argument("--tokens", type=int, nargs="+", required=True)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    run = _eager if options.form == "eager" else _compiled
    print(json.dumps(run(options)))


def _inputs(tokens: int) -> torch.Tensor:
    return torch.randint(0, 2000, (1, tokens), generator=torch.Generator().manual_seed(1))


def _exact(options: argparse.Namespace) -> Path:
    return Path(options.scratch / "exact.safetensors")


def _eager(options: argparse.Namespace) -> dict[str, Any]:
    """Keep the logits of eager in fp32 with all weights in memory."""
    model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    with torch.no_grad():
        logits = {
            str(tokens): model.eval()(_inputs(tokens), use_cache=False).logits.contiguous()
            for tokens in options.tokens
        }
    save_file(logits, _exact(options))
    return {"norms": {tokens: float(value.norm()) for tokens, value in logits.items()}}


def _compiled(options: argparse.Namespace) -> dict[str, Any]:
    from accelerate import init_empty_weights

    import gascompile

    config = transformers.AutoConfig.from_pretrained(options.model)
    with init_empty_weights(include_buffers=False):
        model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    start_s = time.perf_counter()
    with gascompile.compile(
        model,
        options.budget,
        checkpoint=options.model,
        machine=options.machine,
        cache_dir=options.scratch / "cache",
        weights=options.form if options.form in ("int8", "int4") else None,
        fuse="off",
    ) as compiled:
        rows = [_row(compiled, tokens, options) for tokens in options.tokens]
        report = compiled.format_report
    return {
        "rows": rows,
        "size_bytes": dict(report.size_bytes),
        "largest_weight_error": report.relative_error,
        "all_s": time.perf_counter() - start_s,
    }


def _row(compiled: Any, tokens: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return what calls with so many tokens measured, the first one left out."""
    ids = _inputs(tokens)
    logits = compiled(input_ids=ids, use_cache=False).logits
    times_s = []
    for _ in range(options.runs):
        start_s = time.perf_counter()
        logits = compiled(input_ids=ids, use_cache=False).logits
        times_s.append(time.perf_counter() - start_s)
    exact = load_file(_exact(options))[str(tokens)].double()
    report, plan = compiled.last_run, compiled.plan
    return {
        "tokens": tokens,
        "times_s": times_s,
        "predicted_s": plan.certificate.predicted_s,
        "moved_bytes": sum(report.link_bytes.values()),
        "peak_bytes": report.peak_bytes["cpu"],
        "budget_bytes": dict(plan.budget_bytes)["cpu"],
        "stall_s": report.stall_s,
        "relative_error": float((logits.double() - exact).norm() / exact.norm()),
        "largest_difference": float((logits.double() - exact).abs().max()),
        "largest_logit": float(exact.abs().max()),
    }


if __name__ == "__main__":
    main()
