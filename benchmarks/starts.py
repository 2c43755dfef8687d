"""Seconds until a plan is there: for a program that nobody planned before, and from the cache in a new process.

    python -m benchmarks.starts [--toy] [--rounds N] [PART ...]

Parts are ``layers`` (the training step of 30 linear layers of 256 with AdamW in 12 MiB), ``gpt2`` (that of GPT-2
small in 1 GiB), each first and again, and ``llama`` (a Llama of 1.1B weights in fp32 from its checkpoint and a model
without values, again). Each start is a process of its own; what it takes to import torch and transformers and to
build the model does not count, what ``import gascompile`` takes does. The machine and its kernels are known, as from
the second program on. The first results of a program are compared, bit for bit. Writes
``benchmarks/results/starts-<machine>-<date>.json`` with what was asked, and whether it holds: of the median.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from benchmarks.asked import asked, show_parts
from benchmarks.environment import headed, write_result
from benchmarks.llama_checkpoint import SHAPE_1B, write_llama

_TOY_LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 1000,
}
_ROUNDS = 5
_LIMIT_S = 600.0
MOST_S = {
    "layers first": 2.0, "layers again": 1.5, "gpt2 first": 5.0, "gpt2 again": 1.5, "llama again": 0.5,
}  # fmt: skip
"""What is asked of each start."""


def layers(cache: Path, *, toy: bool) -> tuple[float, float]:
    """Return the seconds until the step of linear layers is planned, and its first loss."""
    width, depth, budget = (32, 3, "8MiB") if toy else (256, 30, "12MiB")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))
    batch = torch.randn(16, width)

    def loss_of(of: nn.Module, given: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = of(given).square().mean()
        return loss

    return _step(model, loss_of, budget, batch, cache)


def gpt2(cache: Path, *, toy: bool) -> tuple[float, float]:
    """Return the seconds until the step of GPT-2 is planned, and its first loss."""
    import transformers

    from benchmarks.training_contenders import batch_of, build_model, loss_fn

    transformers.utils.logging.disable_progress_bar()
    shape = "toy" if toy else "gpt2"
    model, batch = build_model(shape), batch_of(shape, 0)
    return _step(model, loss_fn, "16MiB" if toy else "1GiB", batch, cache)


def known(cache: Path, *, toy: bool) -> tuple[float, float]:
    """Have the machine measured and the kernels built, for another program than any that is measured."""
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    return _step(model, lambda of, x: of(x).square().mean(), "8MiB", torch.ones(2, 16), cache)


def _step(
    model: nn.Module, loss_of: Callable[..., Any], budget: str, batch: Any, cache: Path
) -> tuple[float, float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    begin_s = time.perf_counter()
    import gascompile

    with gascompile.compile_step(model, loss_of, optimizer, budget, batch, cache_dir=cache) as step:
        seconds = time.perf_counter() - begin_s
        return seconds, float(step(batch))


def llama(cache: Path, *, toy: bool) -> tuple[float, float]:
    """Return the seconds until the Llama beside the cache is planned, and a sum of its first logits."""
    import transformers

    kind: Any = transformers
    folder = cache.parent / "model"
    with torch.device("meta"):
        config = kind.AutoConfig.from_pretrained(folder)
        model = kind.AutoModelForCausalLM.from_config(config).eval()
    ids = torch.arange(16).reshape(1, 16)
    inputs = {"input_ids": ids, "use_cache": False}
    begin_s = time.perf_counter()
    import gascompile

    with gascompile.compile(
        model, "2MiB" if toy else "1.5GiB", inputs, checkpoint=folder, cache_dir=cache
    ) as compiled:
        seconds = time.perf_counter() - begin_s
        return seconds, float(compiled(**inputs).logits.double().sum())


PARTS: dict[str, Callable[..., tuple[float, float]]] = {
    part.__name__: part for part in (layers, gpt2, llama)
}


_ALL = {**PARTS, "known": known}


def _start(part: str, cache: Path, *, toy: bool) -> tuple[float, float]:
    """Run one start in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.starts", part, "--cache", str(cache)]
    done = subprocess.run(
        command + ["--toy"] * toy, capture_output=True, text=True, timeout=_LIMIT_S, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{part}: {done.stderr.strip()[-2000:]}")
    seconds, result = json.loads(done.stdout.splitlines()[-1])
    return seconds, result


def measure(part: str, folder: Path, *, toy: bool, rounds: int) -> dict[str, dict[str, Any]]:
    """Return what the first starts of a part took, where they are asked for, and those from the cache."""
    of_all = folder / "known"
    if not of_all.exists():
        _start("known", of_all, toy=toy)
    if part == "llama" and not (folder / "model").exists():
        write_llama(folder / "model", _TOY_LLAMA if toy else SHAPE_1B)
    firsts, again = [], []
    cache = folder / part
    for _ in range(1 if part == "llama" else rounds):
        shutil.rmtree(cache, ignore_errors=True)
        shutil.copytree(of_all, cache)
        firsts.append(_start(part, cache, toy=toy))
    again = [_start(part, cache, toy=toy) for _ in range(rounds)]
    equal = len({result for _, result in (*firsts, *again)}) == 1
    found = {}
    for name, starts in ((f"{part} first", firsts), (f"{part} again", again)):
        if name in MOST_S:
            seconds = [one for one, _ in starts]
            figure = asked("s", statistics.median(seconds), most=MOST_S[name])
            found[name] = {"seconds": seconds, "equal": equal, **figure}
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write the result; 0 where all holds and all results are the same."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument(
        "--rounds", type=int, metavar="N", default=_ROUNDS, help="starts of each kind"
    )
    parser.add_argument("--folder", type=Path, help="where model and caches are made")
    parser.add_argument("--toy", action="store_true", help="tiny models, to try the script")
    parser.add_argument("-o", "--output", type=Path, help="result file")
    parser.add_argument("--cache", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error("--rounds is a number of starts, from 1 on")
    if unknown := set(options.parts) - set(PARTS if options.cache is None else _ALL):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    if options.cache:
        print(json.dumps(_ALL[options.parts[0]](options.cache, toy=options.toy)), flush=True)
        return 0
    result = headed("starts") | {"load": os.getloadavg()[0], "parts": {}}
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        for part in options.parts or PARTS:
            try:
                found = measure(part, Path(name), toy=options.toy, rounds=options.rounds)
            except RuntimeError as error:
                found = {part: {"error": str(error), "holds": False, "equal": False}}
            result["parts"] |= found
    show_parts("Until a plan is there", result["parts"], Console(highlight=False))
    if not options.toy or options.output:
        print(f"written: {write_result(result, options.output)}")
    return 0 if all(of["holds"] and of["equal"] for of in result["parts"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
