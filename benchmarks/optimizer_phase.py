"""The optimizer phase alone: all of AdamW's states on the drive, against what the drive gives for those bytes.

    python -m benchmarks.optimizer_phase [--toy] [--budget 384MiB] [--rounds 5]

A step whose program holds nothing but the updates of GPT-2 small runs in a budget far below its states, so that
parameters and both moments are read, updated and written at every step: 12 bytes in and 12 out per parameter. In
turns with it, a plain loop moves the same blocks of the same file; the faster of two such loops counts. The result
is written to ``benchmarks/results/optimizer_phase-<machine>-<date>.json``.
"""

from __future__ import annotations

import argparse
import itertools
import mmap
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

import gascompile
from benchmarks.environment import headed, write_result
from benchmarks.training_contenders import LEARNING_RATE, PLANNING_S, SHAPES, build_model
from gascompile.commands.output import fields
from gascompile.core.sizes import PAGE_BYTES, align_up, format_size, format_time
from gascompile.core.steps import Offload, Reload
from gascompile.cost_models.simulate.trace import Trace
from gascompile.training.step import TrainingStep
from gascompile.training.timeline import record

THREADS = 2
BUDGETS = {"gpt2": "384MiB", "toy": "5MiB"}
ASKED_SHARE = 0.9


class _GivenGradient(torch.autograd.Function):
    """A loss that reads no parameter and whose gradient is there already."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gradient)
        ctx.shape = parameter.shape
        return gradient.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return gradient[: ctx.shape.numel()].view(ctx.shape), None


def given_loss(model: nn.Module, gradient: torch.Tensor) -> torch.Tensor:
    """Return zero; each parameter's gradient is the beginning of ``gradient``, so nothing is computed for it."""
    loss_of: Callable[..., torch.Tensor] = _GivenGradient.apply
    parts = [loss_of(part, gradient) for part in model.parameters()]
    return torch.stack(parts).sum()


def gradient_for(model: nn.Module) -> torch.Tensor:
    """Return a vector as long as the largest parameter."""
    random = torch.Generator().manual_seed(1)
    return torch.randn(max(part.numel() for part in model.parameters()), generator=random) * 1e-3


Blocks = list[tuple[int, int]]
"""Offset and bytes of each."""


def blocks(step: TrainingStep) -> tuple[Blocks, Blocks]:
    """Return where the reads and the writes of a steady step begin in its file, in order, and how long they are."""
    assert step.plan is not None
    places = step.state_places()
    moved: dict[type, Blocks] = {Reload: [], Offload: []}
    for move in step.plan.steps:
        if isinstance(move, (Reload, Offload)) and move.tensor in places:
            moved[type(move)].append((places[move.tensor][1], move.size_bytes))
    return moved[Reload], moved[Offload]


class PlainLoop:
    """Reads and writes blocks of a file by direct I/O and does nothing else.

    Some drives are faster with both at once, some with one at a time: both ways are taken. What it writes are small
    positive numbers: they are as good as any other states.
    """

    def __init__(self, file: int, reads: Blocks, writes: Blocks) -> None:
        self._blocks = [
            [(offset, align_up(size, PAGE_BYTES)) for offset, size in found]
            for found in (reads, writes)
        ]
        largest = max((size for found in self._blocks for _, size in found), default=PAGE_BYTES)
        self._buffers = [mmap.mmap(-1, largest) for _ in self._blocks]
        values = torch.frombuffer(self._buffers[1], dtype=torch.float32)
        values.uniform_(1e-4, 1e-3, generator=torch.Generator().manual_seed(2))
        del values
        self._file = os.open(f"/proc/self/fd/{file}", os.O_RDWR | os.O_DIRECT)

    def seconds_at_once(self) -> float:
        """Return the seconds of all reads beside all writes."""
        threads = [threading.Thread(target=self._move_all, args=(side,)) for side in (0, 1)]
        start_s = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - start_s

    def seconds_in_turns(self) -> float:
        """Return the seconds of a read, a write, a read and so on."""
        start_s = time.perf_counter()
        for pair in itertools.zip_longest(*self._blocks):
            for side, block in enumerate(pair):
                if block is not None:
                    self._move(side, *block)
        return time.perf_counter() - start_s

    def _move_all(self, side: int) -> None:
        for block in self._blocks[side]:
            self._move(side, *block)

    def _move(self, side: int, offset: int, size: int) -> None:
        buffer = memoryview(self._buffers[side])
        call = os.pwrite if side else _pread
        done = 0
        while done < size:
            done += call(self._file, buffer[done:size], offset + done)

    def close(self) -> None:
        """Give file and memory back."""
        os.close(self._file)
        for buffer in self._buffers:
            buffer.close()


def _pread(file: int, buffer: memoryview, offset: int) -> int:
    return os.preadv(file, [buffer], offset)


def measure(shape: str, budget: str, rounds: int, scratch: Path) -> dict[str, Any]:
    """Return the seconds of steps and of plain loops, taken in turns, and what a step moved."""
    model = build_model(shape)
    num_elements = sum(part.numel() for part in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    gradient = gradient_for(model)
    with gascompile.compile_step(
        model,
        given_loss,
        optimizer,
        budget,
        gradient,
        cache_dir=scratch,
        time_limit_s=PLANNING_S[shape],
    ) as step:
        step(gradient)
        plan = step.plan
        assert plan is not None
        reads, writes = blocks(step)
        ((file, _), *_) = step.state_places().values()
        loop = PlainLoop(file, reads, writes)
        runs, at_once_s, in_turns_s = [], [], []
        for _ in range(rounds):
            # After the loop a step begins with nothing under way; the one after that is as all others.
            for _ in range(2):
                step(gradient)
            assert step.last_run is not None
            runs.append(step.last_run)
            step.settle()
            at_once_s.append(loop.seconds_at_once())
            in_turns_s.append(loop.seconds_in_turns())
        loop.close()
        step(gradient)
        spent = where_time_goes(record(step, gradient).measured)
    steps_s = [run.seconds for run in runs]
    found: dict[str, Any] = {
        "num_elements": num_elements,
        "state_bytes": 12 * num_elements,
        "budget_bytes": dict(plan.budget_bytes)["cpu"],
        "peak_bytes": max(run.peak_bytes["cpu"] for run in runs),
        "read_bytes": sum(size for _, size in reads),
        "written_bytes": sum(size for _, size in writes),
        "num_blocks": len(reads) + len(writes),
        "paths": dict(runs[0].paths),
        "predicted_s": plan.certificate.predicted_s,
        "predicted_op_s": sum(op.time_s for op in plan.ops),
        "steps_s": steps_s,
        "stalls_s": [run.stall_s for run in runs],
        "loops_at_once_s": at_once_s,
        "loops_in_turns_s": in_turns_s,
        "loop_s": min(map(statistics.median, (at_once_s, in_turns_s))),
        "one_step": spent,
    }
    return {**found, "share": found["loop_s"] / statistics.median(steps_s)}


def where_time_goes(measured: Trace) -> dict[str, Any]:
    """Return the seconds of a recorded step: in ops, waiting, in between, and of each link's thread."""
    op_s = sum(span.ended_s - span.begun_s for span in measured.ops)
    wait_s = sum(stall.time_s for stall in measured.stalls)
    return {
        "seconds": measured.seconds,
        "op_s": op_s,
        "wait_s": wait_s,
        "between_s": measured.seconds - op_s - wait_s,
        "link_busy_s": dict(measured.link_busy_s),
    }


def rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the figures for people."""
    per_element = [found[key] / found["num_elements"] for key in ("read_bytes", "written_bytes")]
    step_s, loop_s = statistics.median(found["steps_s"]), found["loop_s"]
    moved = found["read_bytes"] + found["written_bytes"]
    return [
        ("states", f"{format_size(found['state_bytes'])} in {format_size(found['budget_bytes'])}"),
        ("read and written", "{:.2f} and {:.2f} bytes per parameter".format(*per_element)),
        ("updates", f"{format_time(step_s)}, {format_size(moved / step_s)}/s"),
        ("one step", _spent(found["one_step"])),
        ("plain loop", f"{format_time(loop_s)}, {format_size(moved / loop_s)}/s"),
        ("share of the drive", f"{found['share']:.1%} ({ASKED_SHARE:.0%} is asked)"),
    ]


def _spent(one: dict[str, Any]) -> str:
    links = [f"{link} busy {format_time(time_s)}" for link, time_s in one["link_busy_s"].items()]
    kinds = (("op_s", "in ops"), ("wait_s", "waiting"), ("between_s", "in between"))
    return ", ".join([*(f"{format_time(one[key])} {what}" for key, what in kinds), *links])


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark and write its result file; 1 where the share is below what is asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--toy", action="store_true", help="a tiny model, to try the script")
    parser.add_argument("--budget", help="memory of a step (default: 384MiB)")
    parser.add_argument("--rounds", type=int, default=5, help="steps and loops, in turns")
    parser.add_argument("--scratch", type=Path, help="folder on the drive; temporary")
    parser.add_argument("-o", "--output", type=Path, help="result file")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error("--rounds takes 1 or more")
    shape = "toy" if options.toy else "gpt2"
    torch.set_num_threads(THREADS)
    with tempfile.TemporaryDirectory(prefix="gascompile-phase-", dir=options.scratch) as folder:
        budget = options.budget or BUDGETS[shape]
        found = measure(shape, budget, options.rounds, Path(folder))
    result = {
        **headed("optimizer_phase"),
        "load": os.getloadavg()[0],
        "model": SHAPES[shape],
        "threads": THREADS,
        **found,
    }
    output = write_result(result, options.output)
    console = Console(stderr=True)
    console.print(fields("AdamW with its states on the drive", rows(found)))
    console.print(f"written: {output}")
    return int(found["share"] < ASKED_SHARE)


if __name__ == "__main__":
    raise SystemExit(main())
