"""Generate text with a causal language model that is larger than its memory budget.

Any Hugging Face directory of a causal language model will do; without one, make a random model first:

    python -m examples.generate /tmp/demo --make-demo
    python -m examples.generate /tmp/demo --prompt "Once upon a time" --budget 64MiB
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import RenderableType

import gascompile
from examples.demo_model import make_demo
from gascompile.commands.output import emit, fields, report_error
from gascompile.commands.summary import plan_parts
from gascompile.core.sizes import format_size, format_time, parse_size
from gascompile.integrations.generation import Generator


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt as tokens, and how to show tokens."""

    tokens: list[int]
    show: Callable[[list[int]], str]


def read_prompt(folder: Path, text: str, ids: str | None) -> Prompt:
    """Return the prompt of the command line.

    Raises:
        ValueError: there is no such folder, no tokenizer to read ``text`` with, or ``ids`` are no numbers.
    """
    if not folder.is_dir():
        raise ValueError(
            f"{folder} is no folder; write a small random model there with --make-demo"
        )
    if ids is not None:
        return Prompt(
            tokens=[int(part) for part in ids.replace(",", " ").split()],
            show=lambda tokens: " ".join(map(str, tokens)),
        )
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"{folder} has no usable tokenizer; pass --prompt-ids 1,2,3 instead"
        ) from error
    return Prompt(
        tokens=list(tokenizer(text)["input_ids"]),
        show=lambda tokens: str(tokenizer.decode(tokens, skip_special_tokens=True)),
    )


class Watch:
    """Passes tokens on and keeps what their runs measured."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self.times_s: list[float] = []
        self.peak_bytes = 0
        self.decode_bytes: list[int] = []
        self.shares: list[float] = []

    def follow(self, tokens: Iterator[int]) -> Iterator[int]:
        """Yield ``tokens``."""
        start_s = time.perf_counter()
        for token in tokens:
            self.times_s.append(time.perf_counter() - start_s)
            runs = self._generator.last_runs
            self.peak_bytes = max(
                self.peak_bytes, *(max(run.peak_bytes.values()) for run in runs.values())
            )
            if len(self.times_s) > 1:
                self.decode_bytes.append(sum(runs["decode"].link_bytes.values()))
                self.shares.append(runs["decode"].share_of_limit)
            yield token

    def result(self) -> dict[str, Any]:
        """Return the figures."""
        count = len(self.times_s)
        decode_s = self.times_s[-1] - self.times_s[0]
        return {
            "new_tokens": count,
            "first_token_s": self.times_s[0],
            "tokens_per_s": (count - 1) / decode_s if count > 1 else None,
            "bytes_per_token": _median(self.decode_bytes),
            "share_of_limit": _median(self.shares),
            "peak_bytes": self.peak_bytes,
        }


def _median(values: Sequence[float]) -> float | None:
    return sorted(values)[len(values) // 2] if values else None


def stream_text(prompt: Prompt, tokens: Iterator[int], *, quiet: bool) -> list[int]:
    """Print tokens as they come and return them; a character is printed when all its bytes are there."""
    found: list[int] = []
    shown = 0
    for token in tokens:
        found.append(token)
        text = prompt.show(found)
        if not quiet and not text.endswith("\ufffd"):
            sys.stdout.write(text[shown:])
            sys.stdout.flush()
            shown = len(text)
    if not quiet:
        sys.stdout.write(prompt.show(found)[shown:] + "\n\n")
    return found


def eager_tokens(folder: Path, prompt: Prompt, max_new_tokens: int) -> list[int]:
    """Return what transformers generates with all weights in memory."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        str(folder), dtype="auto", local_files_only=True
    )
    output = model.eval().generate(
        torch.tensor([prompt.tokens]),
        attention_mask=torch.ones(1, len(prompt.tokens), dtype=torch.long),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        pad_token_id=0,
    )
    return [int(token) for token in output[0, len(prompt.tokens) :]]


def run(options: argparse.Namespace) -> int:
    """Generate and report."""
    prompt = read_prompt(options.model, options.prompt, options.prompt_ids)
    start_s = time.perf_counter()
    with Generator(
        options.model, options.budget, max_length=options.max_length, cache_dir=options.cache_dir
    ) as generator:
        prepare_s = time.perf_counter() - start_s
        watch = Watch(generator)
        stream = generator.stream(prompt.tokens, options.max_new_tokens, generator.eos_token_ids)
        found = stream_text(prompt, watch.follow(stream), quiet=options.json)
        data = {
            **watch.result(),
            "prepare_s": prepare_s,
            "prompt_tokens": len(prompt.tokens),
            "cache_bytes": generator.cache_bytes,
            "tokens": found,
        }
        plan = generator.plans["decode"]
    data["budget_bytes"] = plan.budget_bytes[plan.machine.compute_tier]
    if options.compare:
        data["equals_eager"] = found == eager_tokens(options.model, prompt, options.max_new_tokens)
    emit(options.json, data, *([] if options.json else [*plan_parts(plan), "", _measured(data)]))
    kept = data["peak_bytes"] <= data["budget_bytes"]
    return 0 if kept and data.get("equals_eager", True) else 1


def _measured(data: dict[str, Any]) -> RenderableType:
    rows = [
        ("start", f"{format_time(data['prepare_s'])}, planning included where it is not cached"),
        (
            "first token",
            f"{format_time(data['first_token_s'])} for {data['prompt_tokens']} tokens of prompt",
        ),
        ("peak", f"{format_size(data['peak_bytes'])} of {format_size(data['budget_bytes'])}"),
        ("key/value cache", format_size(data["cache_bytes"])),
    ]
    if data["tokens_per_s"] is not None:
        rows[2:2] = [
            (
                "decode",
                f"{data['tokens_per_s']:.3g} tokens/s, {data['share_of_limit']:.0%} of the limit",
            ),
            ("streamed / token", format_size(data["bytes_per_token"])),
        ]
    if "equals_eager" in data:
        rows.append(("equals eager", "yes, token for token" if data["equals_eager"] else "NO"))
    return fields("Measured", rows)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="examples.generate", description="Generate text within a memory budget."
    )
    parser.add_argument(
        "model", type=Path, help="Hugging Face directory of a causal language model"
    )
    parser.add_argument("--prompt", default="Once upon a time", help="text (default: %(default)r)")
    parser.add_argument("--prompt-ids", help="token numbers, where the directory has no tokenizer")
    parser.add_argument(
        "--budget", type=_size, help="such as 1.5GiB (default: what the machine has)"
    )
    parser.add_argument("--max-new-tokens", type=int, default=64, help="default: %(default)s")
    parser.add_argument(
        "--max-length", type=int, help="prompt and answer; sizes the key/value cache"
    )
    parser.add_argument(
        "--compare", action="store_true", help="also generate with transformers alone"
    )
    parser.add_argument(
        "--make-demo", action="store_true", help="write a small random model and stop"
    )
    parser.add_argument("--cache-dir", help="where plans are kept (default: the user's cache)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example; 1 for a failed job, 2 for wrong usage."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        if options.make_demo:
            size_bytes = make_demo(options.model)
            sys.stdout.write(
                f"wrote a random model of {format_size(size_bytes)} to {options.model}\n"
            )
            return 0
        return run(options)
    except gascompile.GASCompileError as error:
        report_error(error, as_json=options.json)
        return 1
    except (ValueError, FileExistsError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
