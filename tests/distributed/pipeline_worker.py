"""One stage of a pipeline of a few: trains small models and writes what came of it.

Run as ``python -m tests.distributed.pipeline_worker FOLDER ASKED...`` with what ``torchrun`` sets in the environment.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_model
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils import _pytree as pytree

import gascompile
from gascompile import compile_step
from gascompile.api import piped as piped_api
from gascompile.core.errors import GASCompileError, RankError, StorageError
from gascompile.distributed.ranks import find_group
from gascompile.runtime.collectives.letters import Letters
from gascompile.training.pipeline import pipeline
from gascompile.training.step import TrainingStep
from tests.distributed.pipeline_jobs import (
    LENGTH,
    PIPED,
    ROWS,
    WIDTH,
    WORDS,
    Piped,
    batches,
    loss_fn,
)
from tests.training.runs import PLANNING_S
from tests.training.trials import MACHINE, TRANSFER_BYTES

RANK, SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def mesh_of(shape: dict[str, int]) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))


def begins_of(piped: Piped, size: int) -> list[float]:
    """Return where stages begin; each further one has a half of what the last of fewer has."""
    begins = list(piped.begins)
    while len(begins) < size:
        begins.append((1 + begins[-1]) / 2)
    return begins[:size]


def opened(
    piped: Piped, model: nn.Module, folder: Path, loss: Any = loss_fn, **options: Any
) -> TrainingStep:
    pipeline.forced = None
    if piped.begins:
        pipeline.forced = lambda size, stages: (
            [int(size * begin) for begin in begins_of(piped, stages)],
            piped.num_batches,
        )
    mesh = options.pop("mesh", ({"pp": SIZE}))
    return compile_step(
        model,
        loss,
        piped.optimizer(model),
        piped.budget,
        machine=MACHINE,
        cache_dir=folder / f"cache-{RANK}",
        time_limit_s=PLANNING_S,
        mesh=mesh_of(mesh) if SIZE > 1 else None,
        **{**piped.options, **options},
    )


def trains(piped: Piped, folder: Path) -> dict[str, Any]:
    """Train, evaluate, save, and close."""
    torch.manual_seed(RANK)  # others begin with other values, and take those of rank 0
    model = piped.model()
    with opened(piped, model, folder) as step:
        losses = [step(batch) for batch in batches()]
        assert step.last_run is not None
        assert step.plan is not None
        peak_bytes = step.last_run.peak_bytes["cpu"]
        moved_bytes = sum(step.plan.link_bytes.values())
        losses.append(step.eval(batches()[0]))
        held = sorted(step._open_states().persistent.sizes)
        state = step.state_dict()
        if SIZE > 1 and RANK == 0:
            torch.save(state, folder / "state.pt")
        if SIZE > 1:
            step.save(folder / "saved", {"number": 3}, blocking=False)
            step(batches()[1])
            assert step.load(folder / "saved") == {"number": 3}
            again = step.state_dict()
            pairs = zip(pytree.tree_leaves(state), pytree.tree_leaves(again), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs if isinstance(a, torch.Tensor))
        said = str(step.ranks.pipeline) if step.ranks else ""
    own = {name: p.detach() for name, p in model.named_parameters() if not p.is_meta}
    return {
        "losses": losses,
        "state": state,
        "held": held,
        "own": own,
        "peak": peak_bytes,
        "moved": moved_bytes,
        "said": said,
    }


def resumes(piped: Piped, folder: Path) -> dict[str, Any]:
    """Go on from the state of ``trains``."""
    torch.manual_seed(RANK)
    model = piped.model()
    with opened(piped, model, folder) as step:
        step.prepare(batches()[0])
        step.load_state_dict(torch.load(folder / "state.pt", weights_only=True))
        return {"losses": [step(batch) for batch in batches()[:2]]}


def own_batches(number: int, count: int) -> list[list[torch.Tensor]]:
    """Return the rows of each batch that one of ``count`` has."""
    rows = slice(number * ROWS // count, (number + 1) * ROWS // count)
    return [[tensor[rows].clone() for tensor in batch] for batch in batches()]


def beside(piped: Piped, folder: Path) -> dict[str, Any]:
    """Train by two pipelines beside each other, each with a half of the rows, and go on from what one has saved."""
    torch.manual_seed(RANK)
    model, own = piped.model(), own_batches(RANK // 2, 2)
    halves = replace(piped, num_batches=2, budget="64MiB")
    with opened(halves, model, folder, mesh={"dp": 2, "pp": 2}) as step:
        losses = [step(batch) for batch in own]
        losses.append(step.eval(own[0]))
        state = step.state_dict()
        step.save(folder / "beside", {"number": 3})
        after = step(own[0])
        assert step.load(folder / "beside") == {"number": 3}
        assert torch.equal(step(own[0]), after)
        others = [own[0][0] + (RANK == 1), own[0][1]]
        said = _raised(lambda: step(others))
        targets = own[0][1].clone()
        targets[:, :1] = -100 if RANK < 2 else targets[:, :1]
        ignored = _raised(lambda: step([own[0][0], targets]))
    values = {name: p.detach() for name, p in model.named_parameters() if not p.is_meta}
    return {"losses": losses, "state": state, "own": values, "said": said, "ignored": ignored}


def killed_beside(piped: Piped, folder: Path) -> dict[str, Any]:
    """One rank of two pipelines ends in a step, and all others say which."""
    torch.manual_seed(0)
    own, halves = own_batches(RANK // 2, 2)[0], replace(piped, num_batches=2, budget="64MiB")
    with opened(halves, piped.model(), folder, mesh={"dp": 2, "pp": 2}) as s:
        s(own)
        if RANK == 2:
            Letters.receive = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment, method-assign, misc]
        try:
            s(own)
        except RankError as error:
            return {"rank": error.rank, "said": str(error)}
    return {}


def loads(piped: Piped, folder: Path, *, saved: str = "saved", **options: Any) -> dict[str, Any]:
    """Go on from a checkpoint of ``trains``, and save one."""
    torch.manual_seed(7 + RANK)
    own = own_batches(RANK, SIZE) if options else batches()
    with opened(replace(piped, budget="64MiB"), piped.model(), folder, **options) as step:
        step.prepare(own[0])
        assert step.load(folder / saved) == {"number": 3}
        state = step.state_dict()
        step.save(folder / f"by-{SIZE}", {"number": 3})
        return {"state": state, "losses": [step(batch) for batch in own[:2]]}


def loads_from_one(piped: Piped, folder: Path) -> dict[str, Any]:
    """Go on from a checkpoint of one process."""
    return loads(piped, folder, saved="by-1")


def loads_in_parallel(piped: Piped, folder: Path) -> dict[str, Any]:
    """Go on from a checkpoint of a pipeline, each rank with rows of its own."""
    return loads(piped, folder, mesh={"dp": SIZE})


def begins_from_files(piped: Piped, folder: Path) -> dict[str, Any]:
    """Train a model on the meta device from a checkpoint, as one that no rank has the memory for."""
    torch.manual_seed(0)
    path = _written(piped.model(), folder)
    with torch.device("meta"):
        model = piped.model()
    with opened(piped, model, folder, checkpoint=path) as step:
        losses = [step(batch) for batch in batches()]
        said = _raised(lambda: next(model.parameters()).sum())
    return {"losses": losses, "said": said}


def meets_nan(piped: Piped, folder: Path) -> dict[str, Any]:
    """A loss that is NaN ends the step on all stages, before anything has changed."""
    torch.manual_seed(0)
    model = piped.model()
    with opened(piped, model, folder, _spoilt) as step:
        batch = batches()[0]
        step([*batch, torch.zeros(())])
        before = step.state_dict()["model"]
        said = _raised(lambda: step([*batch, torch.tensor(float("nan"))]))
        after = step.state_dict()["model"]
        return {
            "said": said,
            "before": before,
            "after": after,
            "loss": step([*batch, torch.zeros(())]),
        }


def _spoilt(model: nn.Module, batch: Any) -> torch.Tensor:
    found: torch.Tensor = loss_fn(model, batch[:2]) + batch[2]
    return found


def refuses(piped: Piped, folder: Path) -> dict[str, Any]:
    """What a pipeline would compute otherwise is refused on all ranks, and an open step goes on."""
    said: dict[str, Any] = {}
    words, targets = batches()[0]
    ignoring = targets.clone()
    ignoring[0, :3] = -100
    torch.manual_seed(0)
    model = piped.model()
    with opened(piped, model, folder) as step:
        step([words, targets])
        said["ignored"] = _raised(lambda: step([words, ignoring]))
        said["other batch"] = _raised(lambda: step([words + RANK, targets]))
        said["call"] = _raised(lambda: step.model(words))
        said["loss"] = step([words, targets])
    for name, layer, options in (
        ("dropout", nn.Dropout(0.1), {}),
        ("batch norm", nn.BatchNorm1d(LENGTH), {}),
        ("accumulate", nn.Identity(), {"accumulate": 2}),
        ("8 bits", nn.Identity(), {"states": "8bit"}),
    ):
        other = nn.Sequential(nn.Embedding(WORDS, WIDTH), layer, nn.Linear(WIDTH, WORDS))
        given = {**options, "example_batch": [words, targets]}
        said[name] = _raised(partial(opened, piped, other, folder, **given))
    said["mesh"] = _raised(
        lambda: find_group(init_device_mesh("cpu", (1, SIZE), mesh_dim_names=("dp", "pp")))
    )
    return said


def mixes(piped: Piped, folder: Path) -> dict[str, Any]:
    """Rows that know of each other are one micro-batch, and the loss is that of one process."""
    pipeline.forced = None

    def contrast(model: nn.Module, batch: Any) -> torch.Tensor:
        found = model(batch[0]).mean(1)
        return nn.functional.cross_entropy(found @ found.T, torch.arange(len(found)))

    torch.manual_seed(0)
    model = piped.model()
    expected = contrast(model, batches()[0]).detach()
    with opened(replace(piped, begins=()), model, folder, contrast) as step:
        loss = step(batches()[0])
        assert step.ranks is not None
        return {"loss": loss, "expected": expected, "said": str(step.ranks.pipeline)}


def differs(piped: Piped, folder: Path) -> dict[str, Any]:
    """What one rank alone is given, cannot plan or fails at is told to all of them, and none waits."""
    said: dict[str, Any] = {}
    is_other = RANK == SIZE - 1
    torch.manual_seed(0)
    model = piped.model()
    given = {"example_batch": batches()[0]}
    clips = {"max_grad_norm": 0.5} if is_other else {}
    said["options"] = _raised(lambda: opened(piped, model, folder, **clips, **given))
    poor = replace(piped, budget=TRANSFER_BYTES + 70_000) if is_other else piped
    said["budget"] = _raised(lambda: opened(poor, model, folder, **given))
    torch.manual_seed(RANK)
    path = _written(piped.model(), folder)
    with torch.device("meta"):
        empty = piped.model()
    said["files"] = _raised(lambda: opened(piped, empty, folder, checkpoint=path))
    with opened(piped, model, folder, **given) as step:
        if is_other:
            step.ranks._ranks.exchange._letters.receive = _break  # type: ignore[method-assign, union-attr]
        said["stage"] = _raised(lambda: step(batches()[0]))
    return said


def _break(*_: Any) -> bool:
    raise StorageError("this stage's drive is gone")


def killed(piped: Piped, folder: Path) -> dict[str, Any]:
    """One rank ends in the middle of a step, and the other says which."""
    torch.manual_seed(0)
    model = piped.model()
    with opened(piped, model, folder) as step:
        step(batches()[0])
        if RANK == SIZE - 1:
            signal.setitimer(signal.ITIMER_REAL, 0.001)  # its default ends the process
        try:
            for _ in range(1000):
                step(batches()[0])
        except RankError as error:
            return {"rank": error.rank, "said": str(error)}
    return {}


def _raised(function: Callable[[], object]) -> str:
    try:
        function()
    except (GASCompileError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _written(model: nn.Module, folder: Path) -> Path:
    """Return where this rank has a model's weights."""
    path = folder / str(RANK) / "weights.safetensors"
    path.parent.mkdir(exist_ok=True)
    save_model(model, str(path))
    return path


def infers(piped: Piped, folder: Path) -> dict[str, Any]:
    """Call a model whose stages are on all ranks, from memory and from files; and what is refused."""
    torch.manual_seed(0)
    model = piped.model().eval()
    words = batches()[0][0]
    with torch.no_grad():
        expected, others = model(words), model(words[:3])
    path = _written(model, folder)
    with torch.device("meta"):
        meta = piped.model().eval()
    mesh = init_device_mesh("cpu", (SIZE,), mesh_dim_names=("pp",))
    options: dict[str, Any] = {
        "machine": MACHINE, "cache_dir": folder / f"cache-{RANK}", "mesh": mesh, "time_limit_s": PLANNING_S
    }  # fmt: skip
    piped_api.forced = lambda size, _: [0, size // 3]
    found: dict[str, Any] = {}
    with gascompile.compile(model, "64MiB", **options) as compiled:
        found["equal"] = [
            torch.equal(compiled(words), expected),
            torch.equal(compiled(words[:3]), others),
        ]
        found["other inputs"] = _raised(lambda: compiled(words + RANK))
        found["equal"].append(torch.equal(compiled(words), expected))
        found["save"] = _raised(lambda: compiled.save(folder / "bundle"))
        found["weights"] = sorted(compiled._gascompile.current().bundle.program.bound)
    piped_api.forced = None
    with gascompile.compile(meta, piped.inference_budget, checkpoint=path, **options) as compiled:
        found["from files"] = torch.equal(compiled(words), expected)
        assert compiled.last_run is not None
        found["peak"] = compiled.last_run.peak_bytes["cpu"]
        found["said"] = list(compiled.plan.warnings)
    torch.manual_seed(RANK)
    found["other weights"] = _raised(
        lambda: gascompile.compile(piped.model().eval(), "64MiB", **options)
    )
    return found


def killed_in_a_call(piped: Piped, folder: Path) -> dict[str, Any]:
    """The rank in the middle ends as it is about to receive, and the others say which."""
    torch.manual_seed(0)
    model, words = piped.model().eval(), batches()[0][0]
    piped_api.forced = lambda size, stages: [size * stage // stages for stage in range(stages)]
    with gascompile.compile(
        model,
        "64MiB",
        machine=MACHINE,
        cache_dir=folder / f"cache-{RANK}",
        mesh=init_device_mesh("cpu", (SIZE,), mesh_dim_names=("pp",)),
        time_limit_s=PLANNING_S,
    ) as compiled:
        compiled(words)
        if RANK == 1:
            Letters.receive = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment, method-assign, misc]
        try:
            for _ in range(3):
                compiled(words)
        except RankError as error:
            return {"rank": error.rank, "said": str(error)}
    return {}


KINDS: dict[str, Callable[[Piped, Path], dict[str, Any]]] = {
    "trains": trains,
    "resumes": resumes,
    "beside": beside,
    "killed beside": killed_beside,
    "loads": loads,
    "loads from one": loads_from_one,
    "loads in parallel": loads_in_parallel,
    "files": begins_from_files,
    "nan": meets_nan,
    "refuses": refuses,
    "mixes": mixes,
    "differs": differs,
    "killed": killed,
    "infers": infers,
    "killed in a call": killed_in_a_call,
}


def main() -> None:
    """Run what is asked for, ``kind:name``, one after the other."""
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    for asked in sys.argv[2:]:
        kind, _, name = asked.partition(":")
        own = folder / (name or "gpt")
        own.mkdir(exist_ok=True, parents=True)
        found = KINDS[kind](PIPED[name or "gpt"], own)
        torch.save(found, folder / f"{asked.replace(':', '-')}.{RANK}-of-{SIZE}.pt")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
