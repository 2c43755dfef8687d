"""One rank of a job that saves and loads checkpoints, and meets faults; run as ``rank_worker`` is."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from gascompile.core.errors import GASCompileError
from gascompile.training import dcp as own_dcp
from gascompile.training.state import whole_checkpoints
from gascompile.training.step import TrainingStep
from tests.distributed.jobs import SCENARIOS, net_of, optimizer_of
from tests.distributed.rank_worker import RANK, SIZE, opened

ROWS = 12
SCENARIO = replace(
    SCENARIOS["again"],
    optimizer=lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3),
    options={"accumulate": 2},
)


def whole_batches() -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(4)
    return [
        [
            torch.randn(ROWS, SCENARIO.width, generator=generator),
            torch.randint(0, 3, (ROWS,), generator=generator),
        ]
        for _ in range(8)
    ]


def batch(number: int) -> list[torch.Tensor]:
    """Return this rank's rows of a batch, more to the first ranks."""
    bounds = [0, 7, ROWS] if SIZE == 2 else [ROWS * rank // SIZE for rank in range(SIZE + 1)]
    return [tensor[bounds[RANK] : bounds[RANK + 1]] for tensor in whole_batches()[number]]


@contextmanager
def one(folder: Path, stage: Any = "again") -> Iterator[TrainingStep]:
    torch.manual_seed(0)
    scenario = replace(SCENARIO, stage=stage)
    model = net_of(scenario)
    with opened(scenario, model, optimizer_of(scenario, model), folder) as step:
        step.prepare(batch(0))
        yield step


def told(work: Callable[[], object]) -> str:
    try:
        work()
    except (GASCompileError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@contextmanager
def failing(module: Any, name: str, rank: int) -> Iterator[None]:
    """Let a call fail on one rank as on a full drive."""
    real = getattr(module, name)

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if rank == RANK:
        setattr(module, name, fail)
    try:
        yield
    finally:
        setattr(module, name, real)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "lock")


def saves(folder: Path) -> dict[str, Any]:
    """Save in all ways, with drives that are full on one rank."""
    found: dict[str, Any] = {}
    with one(folder) as step:
        found["losses"] = [step(batch(number)) for number in range(3)]
        torch.manual_seed(70 + RANK)
        torch.rand(RANK + 1)
        found["random"] = torch.get_rng_state()
        step.save(folder / "one", {"number": 7})
        state = step.state_dict()
        found["state"] = state
        found["full"] = []
        for call in ("posix_fallocate", "fsync"):
            with failing(os, call, 1):
                found["full"].append(told(lambda: step.save(folder / "one", keep=3)))
        with failing(os, "rename", 0):
            found["full"].append(told(lambda: step.save(folder / "one", keep=3)))
        with failing(os, "fsync", 1):
            step.save(folder / "one", keep=3, blocking=False)
            found["behind"] = told(lambda: step.save(folder / "one", keep=3, blocking=False))
        found["left"] = names(folder / "one")
        step.save(folder / "one", {"number": 8}, keep=3, blocking=False)
        step.save(folder / "one", {"number": 9}, keep=3)
        found["kept"] = names(folder / "one")
        found["damaged"] = damaged(step, folder)
        found["same"] = all(
            torch.equal(value, state["model"][name])
            for name, value in step.state_dict()["model"].items()
        )
        own = folder / f"own-{RANK}"
        step.save(own, {"number": 10})
        found["own"] = names(own / "checkpoint-00000001")
        found["next"] = step(batch(3))
        found["extra"] = step.load(own)
        found["again"] = step(batch(3))
        step.save(folder / "differing", {"rank": RANK})
        odd = {"x": object()} if RANK else {}
        found["odd"] = told(lambda: step.save(folder / "differing", odd))
        found["differing"] = step.load(folder / "differing")
        found["partly"] = partly(step, folder)
        found["replicas"] = replicas(step, folder)
        found["changed"] = changed(step, folder)
        found["dcp"] = told(lambda: saves_by_dcp(step, folder))
    return found


def changed(step: TrainingStep, folder: Path) -> list[str]:
    """Return what is said where one rank's model has got a buffer since, on which it is taken away again."""
    state, model = step.state_dict(), step._model
    if RANK == 1:
        model.register_buffer("more", torch.ones(1))
    said = [
        told(lambda: step.save(folder / "differing")),
        told(lambda: step.load(folder / "differing")),
        told(lambda: step.load_state_dict(state)),
        told(step.state_dict),
    ]
    if RANK == 1:
        del model.more
    return [*said, told(lambda: step.load(folder / "differing")), told(lambda: step(batch(5)))]


def saves_by_dcp(step: TrainingStep, folder: Path) -> None:
    """Save what torch's own functions return."""
    state = step.state_dict()["model"]
    dcp_save(state, storage_writer=own_dcp.CheckpointWriter(folder / "dcp"))
    get_model_state_dict(step._model)


def damaged(step: TrainingStep, folder: Path) -> list[str]:
    """Return what loading copies of a checkpoint says that were spoilt."""
    newest = max((folder / "one").glob("checkpoint-*"))
    older = min((folder / "one").glob("checkpoint-*"))
    part = "optimizer-00002-of-00002.safetensors"
    said = []
    for kind in ("bit", "short", "missing", "mixed", "pieces"):
        spoilt = folder / kind
        if RANK == 0:
            shutil.copytree(newest, spoilt / newest.name)
            spoil(kind, spoilt / newest.name / part, older / part)
        step.ranks._ranks.compare("that it is spoilt", b"")  # type: ignore[union-attr]
        said.append(told(partial(step.load, spoilt)))
    return said


def spoil(kind: str, part: Path, other: Path) -> None:
    raw = bytearray(part.read_bytes())
    match kind:
        case "bit":
            raw[-5] ^= 1
            part.write_bytes(raw)
        case "short":
            part.write_bytes(raw[:-4])
        case "missing":
            part.unlink()
        case "mixed":
            raw = bytearray(other.read_bytes())
            raw[raw.rindex(b"}") + 100] ^= 1  # of another step
            part.write_bytes(raw)
        case "pieces":
            # With a digest that is right.
            raw = bytearray(
                bytes(raw).replace(b'@512,0"', b'@511,0"').replace(b"[512,0]", b"[511,0]")
            )
            part.write_bytes(raw)
            manifest = part.with_name(whole_checkpoints.MANIFEST)
            was = whole_checkpoints.listed_in(part.parent)[part.name]["sha256"]
            text = manifest.read_text().replace(was, whole_checkpoints.digest_of(part))
            manifest.write_text(text)


def partly(step: TrainingStep, folder: Path) -> list[Any]:
    """Load where a rank's folder has lost a file that another has, or all."""
    own = folder / f"own-{RANK}" / "checkpoint-00000001"
    if RANK == 1:
        (own / "model-frozen.safetensors").unlink()
    found: list[Any] = [told(lambda: step.load(folder / f"own-{RANK}")), names(own)]
    if RANK == 1:
        shutil.rmtree(own)
    found.append(told(lambda: step.load(folder / f"own-{RANK}")))
    return found


def replicas(step: TrainingStep, folder: Path) -> dict[str, Any]:
    """Save with copies on another rank, lose a drive, and load."""
    own, state = folder / f"copies-{RANK}", step.state_dict()
    refused = told(lambda: step.save(folder / "one", replicas=2))
    cost = step.replica_cost
    checkpoint = step.save(own, {"number": 11}, replicas=2)
    kept = names(checkpoint)
    sizes = [p.stat().st_size for p in checkpoint.glob(f"*-0000{RANK + 1}-of-*")]
    if RANK == 1:
        shutil.rmtree(own / checkpoint.name)
    step(batch(4))
    extra = step.load(own)
    same = all(
        torch.equal(value, state["model"][name])
        for name, value in step.state_dict()["model"].items()
    )
    cost_bytes = [cost.size_bytes, sum(sizes)]
    return {
        "refused": refused, "kept": kept, "extra": extra, "same": same, "cost": cost_bytes,
        "seconds": cost.time_s, "again": names(own / checkpoint.name),
    }  # fmt: skip


def dies(folder: Path) -> dict[str, Any]:
    """Kill a rank while what it has written goes to the drive."""
    with one(folder) as step:
        step(batch(0))
        step.save(folder / "dies", {"number": 1})
        step(batch(1))
        if RANK == 1:
            os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
        return {"said": told(lambda: step.save(folder / "dies", {"number": 2}))}


def loads(folder: Path) -> dict[str, Any]:
    """Go on from another number of ranks, with whole parameters, and save."""
    found: dict[str, Any] = {}
    with one(folder, stage="whole") as step:
        found["extra"] = step.load(folder / "single")
        found["single"] = [step(batch(number)) for number in (3, 4)]
        found["extra"] = step.load(folder / "one")
        found["random"] = torch.get_rng_state()
        found["losses"] = [step(batch(number)) for number in (3, 4, 5)]
        step.save(folder / "three", {"number": 3})
        found["names"] = names(folder / "three" / "checkpoint-00000001")
        found["state"] = step.state_dict()
    return found


KINDS = {"saves": saves, "loads": loads, "dies": dies}


def main() -> None:
    """Run what is asked for, and write what came of it."""
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    for asked in sys.argv[2:]:
        torch.save(KINDS[asked](folder), folder / f"{asked}.{RANK}-of-{SIZE}.pt")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
