"""One rank: trains what ``spec.json`` asks for, one task after the other, and writes what it measured.

A task names a model and its size, the rows of each rank, the number of steps, the way to train, and more; see
``_DEFAULTS``. Run with what ``torchrun`` sets in the environment.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.anonymous import PeakSampler, anonymous_bytes
from benchmarks.ranks.cases import Case, case_of, cut
from benchmarks.ranks.limits import give_cores

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
_DEFAULTS: dict[str, Any] = {
    "size": "small",
    "tokens": None,
    "way": "planned",
    "budget": "256MiB",
    "lr": 1e-4,
    "options": {},  # of compile_step
    "balance": False,  # take the rows that the step gives
    "slow_at": None,  # the number of the step before which the last rank loses half its core
    "checkpoint": None,  # weights of a model that is built on the meta device
    "prepare_only": False,
    "checkpoints": None,  # a folder of checkpoints, from which it goes on
    "every": 1,  # steps between two of them
    "first_save": None,  # save once, after this step, in place of that
    "log": None,  # a folder for a line per step
    "pause_s": 0.0,  # between two steps
    "stop": None,  # a file with the number of steps, in place of ``steps``
    "cache_of_last": None,  # in place of the job's own, for the last rank
    "caches": None,  # in place of the job's own, one of each rank
    "sampled": True,  # memory is, by a thread beside the steps
    "stages": False,  # ranks are stages of a pipeline, and take the rows of all
}
Step = Callable[[Any], torch.Tensor]
_left_open: list[Any] = []
"""Steps whose values stay where they are: whole they may have no room."""


def _cache(task: dict[str, Any]) -> str:
    is_last = RANK == SIZE - 1
    own: str | None = task["cache_of_last"] if is_last else None
    if task["caches"]:
        own = task["caches"][RANK]
    return own or os.environ["CACHE"]


def _stages() -> DeviceMesh:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (SIZE,), mesh_dim_names=("pp",))


@contextmanager
def planned(task: dict[str, Any], case: Case) -> Iterator[tuple[Step, Any, nn.Module]]:
    """Train by planned steps; the second value is the step itself."""
    import gascompile

    if task["checkpoint"]:
        with torch.device("meta"):
            model = case.build().train()
    else:
        model = case.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=task["lr"])
    step = gascompile.compile_step(
        model,
        case.loss,
        optimizer,
        task["budget"],
        checkpoint=task["checkpoint"],
        cache_dir=_cache(task),
        mesh=_stages() if task["stages"] else None,
        **task["options"],
    )
    try:
        yield step, step, model
    except BaseException as error:
        step.__exit__(type(error), error, None)
        raise
    if task["checkpoint"]:
        _left_open.append(step)
    else:
        step.close()


@contextmanager
def wrapped(task: dict[str, Any], case: Case) -> Iterator[tuple[Step, Any, nn.Module]]:
    """Train by plain PyTorch: eager, DDP, or FSDP2, with the optimizer's rows all equal."""
    if task["way"] != "eager" and not dist.is_initialized():
        dist.init_process_group("gloo")
    model = case.model() if not task["checkpoint"] else _from_file(task, case)
    trained: nn.Module = model
    if task["way"] == "ddp":
        trained = nn.parallel.DistributedDataParallel(model)
    elif task["way"] == "fsdp2" and not task["checkpoint"]:
        _fully_sharded(model, offload=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=task["lr"])

    def step(batch: Any) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = case.loss(trained, batch)
        loss.backward()
        optimizer.step()
        if task["way"] != "eager":
            # Of equal rows: what every rank sees of a planned step, which is the mean over all rows.
            loss = loss.detach() / SIZE
            dist.all_reduce(loss)
        return loss.detach()

    yield step, None, model


def _fully_sharded(model: nn.Module, *, offload: bool) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    mesh = init_device_mesh("cpu", (SIZE,))
    policy = CPUOffloadPolicy(pin_memory=False) if offload else OffloadPolicy()
    for block in model.transformer.h:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)


def _from_file(task: dict[str, Any], case: Case) -> nn.Module:
    """Return a model whose shards alone are read, with blocks computed again in the backward pass."""
    from safetensors import safe_open
    from torch.distributed.tensor import DTensor, distribute_tensor

    with torch.device("meta"):
        model = case.build().train()
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
    _fully_sharded(model, offload=True)
    model.to_empty(device="cpu")
    with safe_open(task["checkpoint"], "pt") as file, torch.no_grad():
        for name, parameter in model.named_parameters():
            value = file.get_tensor(name)
            if isinstance(parameter, DTensor):
                shared = distribute_tensor(value, parameter.device_mesh, parameter.placements)
                parameter.to_local().copy_(shared.to_local())
    return model


class _Run:
    """A task under way: its rows, its steps and what they took."""

    def __init__(self, task: dict[str, Any], case: Case) -> None:
        self.task, self.case = task, case
        self.rows = list(task["rows"])
        self.found: dict[str, Any] = {
            "losses": [],
            "seconds": [],
            "processor_s": [],  # of all threads
            "ran": [],  # of each rank in the step before: seconds without waits, and in them
            "rows": [],
            "prepared_s": [],
            "peaks_bytes": [],
            "run_peak_bytes": 0,
        }

    def batch(self, number: int, own: Any) -> Any:
        """Return this rank's rows of a step, planned for outside of what is timed."""
        if self.task["balance"] and number:
            self.rows = own.ranks.rows()
        batch = self.case.batch(number, sum(self.rows))
        if len(self.rows) > 1 and not self.task["stages"]:
            batch = cut(batch, self.rows, RANK)
        begin_s = time.perf_counter()
        if own is not None:
            own.prepare(batch)
        self.found["prepared_s"].append(time.perf_counter() - begin_s)
        return batch

    def step(self, number: int, step: Step, own: Any, sampler: PeakSampler) -> None:
        """Make one step, and write down what it took."""
        if number == self.task["slow_at"] and RANK == SIZE - 1 and os.environ["CPU_GROUP"]:
            give_cores(Path(os.environ["CPU_GROUP"]), 0.5)
        batch = self.batch(number, own)
        sampler.take_peak_bytes()
        begin_s, processor_s = time.perf_counter(), time.process_time()
        loss = step(batch)
        self.found["seconds"].append(time.perf_counter() - begin_s)
        self.found["processor_s"].append(time.process_time() - processor_s)
        self.found["losses"].append(float(loss))
        self.found["rows"].append(self.rows)
        self.found["peaks_bytes"].append(sampler.take_peak_bytes())
        if own is not None and own.last_run is not None:
            peak_bytes = max(own.last_run.peak_bytes.values())
            self.found["run_peak_bytes"] = max(self.found["run_peak_bytes"], peak_bytes)
            if own.ranks is not None:
                self.found["ran"].append([(run.time_s, run.waited_s) for run in own.ranks.runs])

    def ends_at(self) -> float:
        """Return the number of steps, which another may have written down meanwhile."""
        if self.task["stop"] is None:
            return float(self.task["steps"])
        stop = Path(self.task["stop"])
        return float(stop.read_text()) if stop.exists() else float("inf")

    def note(self, number: int) -> None:
        """Write down that a step is done."""
        if self.task["log"]:
            line = f"{number} {time.time()} {os.getpid()} {self.found['losses'][-1].hex()}\n"
            with (Path(self.task["log"]) / f"steps-{RANK}").open("a") as file:
                file.write(line)


def run(task: dict[str, Any]) -> dict[str, Any]:
    """Return what a task came to; ``error`` where it is refused."""
    from gascompile.core.errors import GASCompileError

    case = case_of(task["model"], task["size"], task["tokens"])
    under_way = _Run(task, case)
    baseline_bytes = anonymous_bytes()
    try:
        sampler = PeakSampler()
        with sampler if task["sampled"] else contextlib.nullcontext():
            _train(under_way, sampler)
    except GASCompileError as error:
        under_way.found["error"] = f"{type(error).__name__}: {str(error)[:600]}"
        under_way.found["failed_at"] = time.time()
    return {**under_way.found, "baseline_bytes": baseline_bytes}


def _train(under_way: _Run, sampler: PeakSampler) -> None:
    task, found = under_way.task, under_way.found
    way = planned if task["way"] == "planned" else wrapped
    with way(task, under_way.case) as (step, own, model):
        kept, number = task["checkpoints"], 0
        if kept is not None and any(Path(kept).glob("checkpoint-*")):
            under_way.batch(0, own)
            number = own.load(kept)["steps"]
        found["first"] = number
        if task["prepare_only"]:
            under_way.batch(0, own)
        while not task["prepare_only"] and number < under_way.ends_at():
            under_way.step(number, step, own, sampler)
            number += 1
            if kept is not None and _saves(task, number):
                own.save(kept, {"steps": number})
            under_way.note(number - 1)
            time.sleep(task["pause_s"])
        if own is not None:
            certificate = own.plan.certificate
            found["predicted_s"], found["gap"] = certificate.predicted_s, certificate.gap
            found["strategy"] = own.plan.strategy
            if own.ranks is not None and own.ranks.pipeline is not None:
                found["division"] = str(own.ranks.pipeline)
            elif own.ranks is not None:
                found["stage"] = 3 if own.ranks.division.chosen.stages else 2
                found["division"] = str(own.ranks.division)
            found["link_bytes"] = dict(own.last_run.link_bytes) if own.last_run else {}
        found["setup_peak_bytes"] = sampler.take_peak_bytes()
    if task["checkpoint"]:
        return
    if task["stages"]:
        return  # The model has this stage's parameters alone.
    if task["way"] in ("planned", "eager") and not task["prepare_only"]:
        found["digest"] = digest_of(model)


def _saves(task: dict[str, Any], number: int) -> bool:
    if task["first_save"] is not None:
        return bool(number == task["first_save"])
    return number % int(task["every"]) == 0


def digest_of(model: nn.Module) -> str:
    """Return what tells apart models whose parameters and buffers differ in a bit."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(value.contiguous().numpy().tobytes())
    return digest.hexdigest()


def main() -> None:
    """Run all tasks of the file that is named first; write to the folder that is named second."""
    spec = json.loads(Path(sys.argv[1]).read_text())
    output = Path(sys.argv[2])
    torch.set_num_threads(spec.get("threads", 1))
    found = []
    for task in spec["tasks"]:
        found.append(run({**_DEFAULTS, **task}))
        temporary = output / f".{RANK}.json"
        temporary.write_text(json.dumps(found))
        temporary.replace(output / f"{RANK}.json")
    if dist.is_initialized():
        dist.destroy_process_group()
    if _left_open:
        os._exit(0)


if __name__ == "__main__":
    main()
