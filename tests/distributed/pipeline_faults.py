"""What stages of a pipeline refuse, and how they end, as workers of tests try it."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import gascompile
from gascompile.api import piped as piped_api
from gascompile.core.errors import RankError, StorageError
from gascompile.distributed.finding import find_group
from gascompile.runtime.collectives.letters import Letters
from tests.distributed.pipeline_jobs import (
    LENGTH,
    WIDTH,
    WORDS,
    Piped,
    batches,
    loss_fn,
)
from tests.distributed.pipeline_steps import (
    RANK,
    SIZE,
    opened,
    own_batches,
    raised,
    written,
)
from tests.training.runs import PLANNING_S
from tests.training.trials import MACHINE, TRANSFER_BYTES


def meets_nan(piped: Piped, folder: Path) -> dict[str, Any]:
    """A loss that is NaN ends the step on all stages, before anything has changed."""
    torch.manual_seed(0)
    model = piped.model()
    with opened(piped, model, folder, _spoilt) as step:
        batch = batches()[0]
        step([*batch, torch.zeros(())])
        before = step.state_dict()["model"]
        said = raised(lambda: step([*batch, torch.tensor(float("nan"))]))
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
        said["ignored"] = raised(lambda: step([words, ignoring]))
        said["other batch"] = raised(lambda: step([words + RANK, targets]))
        said["call"] = raised(lambda: step.model(words))
        said["loss"] = step([words, targets])
    for name, layer, options in (
        ("dropout", nn.Dropout(0.1), {}),
        ("batch norm", nn.BatchNorm1d(LENGTH), {}),
        ("accumulate", nn.Identity(), {"accumulate": 2}),
        ("8 bits", nn.Identity(), {"states": "8bit"}),
    ):
        other = nn.Sequential(nn.Embedding(WORDS, WIDTH), layer, nn.Linear(WIDTH, WORDS))
        given = {**options, "example_batch": [words, targets]}
        said[name] = raised(partial(opened, piped, other, folder, **given))
    said["mesh"] = raised(
        lambda: find_group(init_device_mesh("cpu", (1, SIZE), mesh_dim_names=("dp", "pp")))
    )
    return said


def differs(piped: Piped, folder: Path) -> dict[str, Any]:
    """What one rank alone is given, cannot plan or fails at is told to all of them, and none waits."""
    said: dict[str, Any] = {}
    is_other = RANK == SIZE - 1
    torch.manual_seed(0)
    model = piped.model()
    given = {"example_batch": batches()[0]}
    clips = {"max_grad_norm": 0.5} if is_other else {}
    said["options"] = raised(lambda: opened(piped, model, folder, **clips, **given))
    poor = replace(piped, budget=TRANSFER_BYTES + 70_000) if is_other else piped
    said["budget"] = raised(lambda: opened(poor, model, folder, **given))
    torch.manual_seed(RANK)
    path = written(piped.model(), folder)
    with torch.device("meta"):
        empty = piped.model()
    said["files"] = raised(lambda: opened(piped, empty, folder, checkpoint=path))
    with opened(piped, model, folder, **given) as step:
        if is_other:
            step.ranks._ranks.exchange._letters.receive = _break  # type: ignore[method-assign, union-attr]
        said["stage"] = raised(lambda: step(batches()[0]))
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
            Letters.receive = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment, method-assign]
        try:
            for _ in range(3):
                compiled(words)
        except RankError as error:
            return {"rank": error.rank, "said": str(error)}
    return {}


def killed_beside(piped: Piped, folder: Path) -> dict[str, Any]:
    """One rank of two pipelines ends in a step, and all others say which."""
    torch.manual_seed(0)
    own, halves = own_batches(RANK // 2, 2)[0], replace(piped, num_batches=2, budget="64MiB")
    with opened(halves, piped.model(), folder, mesh={"dp": 2, "pp": 2}) as s:
        s(own)
        if RANK == 2:
            Letters.receive = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment, method-assign]
        try:
            s(own)
        except RankError as error:
            return {"rank": error.rank, "said": str(error)}
    return {}
