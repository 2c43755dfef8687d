"""One contender of ``training_offload`` in a process of its own; prints one JSON object."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.anonymous import PeakSampler, anonymous_bytes
from benchmarks.training_contenders import (
    CONTENDERS,
    PLANNING_S,
    SHAPES,
    Case,
    batch_of,
    build_model,
)
from benchmarks.training_peers import PEERS

transformers.utils.logging.disable_progress_bar()
MAKERS = {**CONTENDERS, **PEERS}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the times, the losses and the peaks of anonymous memory of one contender."""
    torch.set_num_threads(options.threads)
    baseline_bytes = anonymous_bytes()
    with PeakSampler() as sampler:
        begin_s = time.perf_counter()
        model = build_model(options.shape)
        case = Case(
            model=model,
            first_batch=batch_of(options.shape, 0),
            scratch=options.scratch,
            budget=options.budget,
            planning_s=PLANNING_S[options.shape],
        )
        model_s = time.perf_counter() - begin_s
        trainer = MAKERS[options.contender](case)
        setup_s = time.perf_counter() - begin_s - model_s
        setup_peak_bytes = sampler.take_peak_bytes()
        times_s, losses, peaks_bytes = [], [], []
        for number in range(options.warmup + options.steps):
            batch = batch_of(options.shape, number)
            start_s = time.perf_counter()
            losses.append(float(trainer.step(batch)))
            times_s.append(time.perf_counter() - start_s)
            peaks_bytes.append(sampler.take_peak_bytes())
        details = trainer.details()
        trainer.close()
    timed_s = times_s[options.warmup :]
    return {
        "setup_s": setup_s,
        "warmup_s": times_s[: options.warmup],
        "times_s": timed_s,
        "median_s": statistics.median(timed_s),
        "losses": losses,
        "baseline_bytes": baseline_bytes,
        "setup_peak_bytes": setup_peak_bytes,
        "warmup_peak_bytes": max(peaks_bytes[: options.warmup]),
        "step_peak_bytes": max(peaks_bytes[options.warmup :]),
        **details,
    }


def main() -> None:
    """Run the contender named on the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("contender", choices=sorted(MAKERS))
    parser.add_argument("--shape", choices=sorted(SHAPES), required=True)
    parser.add_argument("--scratch", type=Path, required=True, help="an empty folder to fill")
    parser.add_argument("--budget", help="memory, for the contender that keeps one")
    parser.add_argument("--steps", type=int, default=3, help="timed steps")
    parser.add_argument("--warmup", type=int, default=1, help="steps before them")
    parser.add_argument("--threads", type=int, default=2)
    print(json.dumps(measure(parser.parse_args())))


if __name__ == "__main__":
    main()
