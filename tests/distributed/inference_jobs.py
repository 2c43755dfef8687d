"""One rank of a few that compute with one copy of the weights, and eager on each rank's own rows beside it.

Run as ``python -m tests.distributed.inference_jobs FOLDER KIND...`` with what ``torchrun`` sets in the environment.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

import gascompile
from gascompile.api.compiled import CompiledModel
from gascompile.core.errors import GASCompileError, RankError
from tests.training.trials import MACHINE

RANK, SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
WIDTH, DEPTH = 512, 8
STREAMED, RESIDENT = "4MiB", "64MiB"
"""Of 8 MiB of weights: budgets of which one takes some layers at a time, and the other all."""


class Net(nn.Module):
    """Layers of 1 MiB, one of odd size, and a norm whose buffers calls change in training."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.odd = nn.Linear(WIDTH, 333)
        self.norm = nn.BatchNorm1d(333)
        self.table = nn.Embedding(10, WIDTH)

    def forward(self, x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        x = x + self.table(row)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        found: torch.Tensor = self.norm(self.odd(x))
        return found


def net() -> Net:
    torch.manual_seed(5)
    return Net()


def write_checkpoint(folder: Path) -> Path:
    """Write the weights once, and a copy that another rank may read."""
    path = folder / "net.safetensors"
    if RANK == 0:
        save_file(net().state_dict(), path)
        (folder / "copy").mkdir()
        shutil.copy(path, folder / "copy" / path.name)
    dist.barrier()
    return path


def rows(count: int = 3, number: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's own inputs."""
    generator = torch.Generator().manual_seed(100 * number + RANK)
    return (
        torch.randn(count, WIDTH, generator=generator),
        torch.randint(0, 10, (count,), generator=generator),
    )


def compiled(model: nn.Module, folder: Path, budget: str, **options: Any) -> CompiledModel:
    return gascompile.compile(
        model, budget, machine=MACHINE, cache_dir=folder / "cache", fuse="off", **options
    )


def meta() -> nn.Module:
    with torch.device("meta"):
        return Net().eval()


def computes(folder: Path) -> dict[str, Any]:
    """Calls of two shapes, streamed and resident, of a checkpoint and of its copy, against eager."""
    path = write_checkpoint(folder)
    own = path if RANK == 0 else folder / "copy" / path.name
    found: dict[str, Any] = {}
    eager = net().eval()
    with torch.no_grad():
        wanted = [eager(*rows(count, number)) for number, count in enumerate((3, 3, 3, 5, 3))]
    for name, where, budget in (
        ("streamed", path, STREAMED),
        ("resident", path, RESIDENT),
        ("own copies", own, STREAMED),
    ):
        with compiled(meta(), folder, budget, checkpoint=where) as model:
            outputs = [model(*rows(count, number)) for number, count in enumerate((3, 3, 3, 5, 3))]
            session = model._gascompile.session
            assert session is not None
            dist.barrier()  # A page that the other has not mapped yet would count whole here, half there.
            found[name] = {
                "equal": [torch.equal(o, w) for o, w in zip(outputs, wanted, strict=True)],
                "moved": sum(model.plan.link_bytes.values()),
                "memory": _memory_bytes(),
                "arena": session.arena.size_bytes,
            }
            dist.barrier()
    found["left"] = _memory_bytes()
    return found


def _memory_bytes() -> float:
    """Return this process's proportional part of the memory that ranks share."""
    total, is_ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            is_ours = "memfd:gascompile " in line
        elif is_ours and words[0] == "Pss:":
            total += int(words[1]) << 10
    return total


def trains(folder: Path) -> dict[str, Any]:
    """Buffers that calls change are each rank's own; a model in memory has its weights in the store."""
    model, twin = net().train(), net().train()
    with compiled(model, folder, STREAMED) as found, torch.no_grad():
        equal = [
            torch.allclose(found(*rows(4, number)), twin(*rows(4, number)), atol=1e-6)
            for number in range(3)
        ]
        mean = dict(model.named_buffers())["norm.running_mean"]
        equal.append(
            torch.allclose(mean, dict(twin.named_buffers())["norm.running_mean"], atol=1e-7)
        )
    return {"equal": equal, "mean": mean.sum().item()}


def _said(run: Callable[[], object]) -> dict[str, Any]:
    try:
        run()
    except RankError as error:
        return {"error": type(error).__name__, "rank": error.rank, "said": str(error)}
    except GASCompileError as error:
        return {"error": type(error).__name__, "rank": -2, "said": str(error)}
    except KeyboardInterrupt:
        return {"error": "KeyboardInterrupt", "rank": -2, "said": ""}
    return {"error": "", "rank": -3, "said": ""}


def recovers(folder: Path) -> dict[str, Any]:
    """Calls that differ or fail on one rank end on all, and the next call of all is right."""
    path = folder / "net.safetensors"
    told, equal = {}, []
    eager = net().eval()
    with compiled(meta(), folder, STREAMED, checkpoint=path) as model:

        def check(number: int) -> None:
            with torch.no_grad():
                equal.append(torch.equal(model(*rows(3, number)), eager(*rows(3, number))))

        def fail_in_the_middle() -> None:
            x, row = rows(3, 7)
            model(x, row + (1000 if RANK == 1 else 0))

        check(0)
        told["rows"] = _said(lambda: model(*rows(3 + RANK)))
        check(1)
        check(2)
        told["index"] = _failed(fail_in_the_middle)
        check(3)
        check(4)
        told["interrupt"] = _failed(lambda: _interrupted(model))
        check(5)
        if RANK == 1:
            model.close()
        told["closed"] = _failed(lambda: check(6) if RANK == 0 else None)
    return {"told": told, "equal": equal}


def _interrupted(model: CompiledModel) -> None:
    """Press Ctrl-C on rank 1 while it waits for rank 0, which comes later."""
    if RANK == 1:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
    else:
        time.sleep(0.3)
    model(*rows(3, 5))


def _failed(run: Callable[[], object]) -> dict[str, Any]:
    try:
        return _said(run)
    except IndexError as error:
        return {"error": "IndexError", "rank": -2, "said": str(error)}


def differ(folder: Path) -> dict[str, Any]:
    """Copies of a checkpoint that are not the same bytes, other models, and what is not for several ranks."""
    path = folder / "net.safetensors"
    other = folder / "other"
    if RANK == 0:
        other.mkdir()
        raw = bytearray(path.read_bytes())
        raw[-1] ^= 1
        (other / path.name).write_bytes(raw)
    dist.barrier()
    own = path if RANK == 0 else other / path.name
    told = {}

    def call(model: nn.Module, **options: Any) -> None:
        with compiled(model, folder, STREAMED, **options) as found:
            found(*rows())

    told["content"] = _said(lambda: call(meta(), checkpoint=own))
    told["model"] = _said(lambda: call(net().eval() if RANK else net().train()))
    told["auto"] = _said(lambda: call(meta(), checkpoint=path, weights="auto"))
    with compiled(meta(), folder, STREAMED, checkpoint=path, mesh=False) as alone:
        told["alone"] = _said(lambda: alone(*rows(3 + RANK)))
    return told


def killed(folder: Path) -> dict[str, Any]:
    """The last rank ends between two calls."""
    path = folder / "net.safetensors"
    model = compiled(meta(), folder, STREAMED, checkpoint=path)
    model(*rows())
    if RANK == 1:
        os._exit(3)
    begin_s = time.monotonic()
    told = _said(lambda: [model(*rows()) for _ in range(2)])
    return {**told, "took_s": time.monotonic() - begin_s}


KINDS = {
    "computes": computes,
    "in training": trains,
    "recovers": recovers,
    "differ": differ,
    "ended": killed,
}


def main() -> None:
    """Run the kinds that are asked for, one after the other."""
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    for kind in sys.argv[2:]:
        torch.save(KINDS[kind](folder), folder / f"{kind}.{RANK}-of-{SIZE}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
