"""One rank of ``benchmarks.ranks``: trains a small GPT in one of several ways and writes what it measured."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import gascompile
from examples.small_gpt import Batch, SmallGPT, batch_at, next_byte_loss, read_text

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
_LR = 1e-3
Step = Callable[[Batch], torch.Tensor]


@contextmanager
def planned(model: nn.Module, options: argparse.Namespace) -> Iterator[tuple[Step, Any]]:
    """Train by planned steps; the second value says how many rows each rank should have."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LR)
    with gascompile.compile_step(
        model, next_byte_loss, optimizer, options.budget, cache_dir=options.cache
    ) as step:
        if options.resume:
            first = own_rows(options, [options.rows // SIZE] * SIZE, 0)
            step.prepare(first)
        yield step, step


@contextmanager
def wrapped(model: nn.Module, options: argparse.Namespace) -> Iterator[tuple[Step, Any]]:
    """Train by DDP or FSDP2, with equal rows."""
    dist.init_process_group("gloo")
    if options.way == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (SIZE,))
        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LR)

    def step(batch: Batch) -> torch.Tensor:
        optimizer.zero_grad()
        loss = next_byte_loss(model, batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    yield step, None


def own_rows(options: argparse.Namespace, rows: list[int], number: int) -> Batch:
    """Return this rank's rows of a step's batch."""
    begin = sum(rows[:RANK])
    ids, following = batch_at(TEXT, number, batch=sum(rows), tokens=options.tokens)
    return ids[begin : begin + rows[RANK]], following[begin : begin + rows[RANK]]


TEXT = read_text(None)


def main() -> None:
    """Train as asked for; every rank writes its own file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=("planned", "ddp", "fsdp2"))
    parser.add_argument("output", type=Path)
    for name, value in (
        ("layers", 4),
        ("width", 256),
        ("tokens", 128),
        ("rows", 16),
        ("steps", 30),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--budget", default="256MiB")
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--balance", action="store_true", help="take the rows that the step gives")
    parser.add_argument(
        "--checkpoints", type=Path, help="save each fifth step, and go on from there"
    )
    options = parser.parse_args()
    kept = options.checkpoints
    options.resume = kept is not None and any(kept.glob("checkpoint-*"))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    heads = max(options.width // 64, 1)
    model = SmallGPT(layers=options.layers, width=options.width, heads=heads, tokens=options.tokens)
    equal = [options.rows // SIZE] * SIZE
    found: dict[str, Any] = {"losses": [], "seconds": [], "rows": []}
    with (planned if options.way == "planned" else wrapped)(model, options) as (step, own):
        first = 0
        if options.resume:
            found = own.load(options.checkpoints)
            first = len(found["losses"])
        for number in range(first, options.steps):
            rows = own.ranks.rows() if options.balance and number else equal
            batch = own_rows(options, rows, number)
            if own is not None:
                own.prepare(batch)  # a new number of rows is planned for outside of what is timed
            begin_s = time.perf_counter()
            loss = step(batch)
            found["seconds"].append(time.perf_counter() - begin_s)
            found["losses"].append(float(loss))
            found["rows"].append(rows)
            if options.checkpoints is not None and (number + 1) % 5 == 0:
                own.save(options.checkpoints, found)
    if options.way == "planned":
        digest = hashlib.sha256()
        for value in model.state_dict().values():
            digest.update(value.numpy().data)
        found["digest"] = digest.hexdigest()
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / f"{RANK}.json").write_text(json.dumps(found), encoding="utf-8")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
