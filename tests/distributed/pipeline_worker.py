"""One stage of a pipeline of a few: trains small models and writes what came of it.

Run as ``python -m tests.distributed.pipeline_worker FOLDER ASKED...`` with what ``torchrun`` sets in the environment.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils import _pytree as pytree

import gascompile
from gascompile.api import piped as piped_api
from gascompile.passes.plan.make_plan import make_plan
from gascompile.training.pipeline import pipeline
from gascompile.training.planning import step_plan
from tests.distributed.pipeline_faults import (
    differs,
    killed,
    killed_beside,
    killed_in_a_call,
    meets_nan,
    refuses,
)
from tests.distributed.pipeline_jobs import (
    PIPED,
    Piped,
    batches,
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
from tests.training.trials import MACHINE


def trains(piped: Piped, folder: Path) -> dict[str, Any]:
    """Train, evaluate, save, and close."""
    torch.manual_seed(RANK)  # others begin with other values, and take those of rank 0
    model = piped.model()
    with opened(piped, model, folder) as step:
        with mock.patch.object(step_plan, "make_plan", wraps=make_plan) as planning:
            step.prepare(batches()[0])
        losses = [step(batch) for batch in batches()]
        assert step.last_run is not None
        assert step.plan is not None
        peak_bytes = step.last_run.peak_bytes["cpu"]
        moved_bytes = sum(step.plan.link_bytes.values())
        drive_bytes_per_s = step.plan.machine.link("nvme->cpu").bandwidth_bytes_per_s
        held = sorted(step._open_states().persistent.sizes)
        losses.append(step.eval(batches()[0]))
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
        "drive": drive_bytes_per_s,
        "said": said,
        "num_planned": planning.call_count,
    }


def resumes(piped: Piped, folder: Path) -> dict[str, Any]:
    """Go on from the state of ``trains``, by its plans."""
    torch.manual_seed(RANK)
    model = piped.model()
    with opened(piped, model, folder) as step:
        with mock.patch.object(step_plan, "make_plan", wraps=make_plan) as planning:
            step.prepare(batches()[0])
        step.load_state_dict(torch.load(folder / "state.pt", weights_only=True))
        losses = [step(batch) for batch in batches()[:2]]
    return {"losses": losses, "num_planned": planning.call_count}


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
        said = raised(lambda: step(others))
        targets = own[0][1].clone()
        targets[:, :1] = -100 if RANK < 2 else targets[:, :1]
        ignored = raised(lambda: step([own[0][0], targets]))
    values = {name: p.detach() for name, p in model.named_parameters() if not p.is_meta}
    return {"losses": losses, "state": state, "own": values, "said": said, "ignored": ignored}


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
    path = written(piped.model(), folder)
    with torch.device("meta"):
        model = piped.model()
    with opened(piped, model, folder, checkpoint=path) as step:
        losses = [step(batch) for batch in batches()]
        said = raised(lambda: next(model.parameters()).sum())
    return {"losses": losses, "said": said}


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


def infers(piped: Piped, folder: Path) -> dict[str, Any]:
    """Call a model whose stages are on all ranks, from memory and from files; and what is refused."""
    torch.manual_seed(0)
    model = piped.model().eval()
    words = batches()[0][0]
    with torch.no_grad():
        expected, others = model(words), model(words[:3])
    path = written(model, folder)
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
        found["other inputs"] = raised(lambda: compiled(words + RANK))
        found["equal"].append(torch.equal(compiled(words), expected))
        found["save"] = raised(lambda: compiled.save(folder / "bundle"))
        found["weights"] = sorted(compiled._gascompile.current().bundle.program.bound)
    piped_api.forced = None
    with gascompile.compile(meta, piped.inference_budget, checkpoint=path, **options) as compiled:
        found["from files"] = torch.equal(compiled(words), expected)
        assert compiled.last_run is not None
        found["peak"] = compiled.last_run.peak_bytes["cpu"]
        found["said"] = list(compiled.plan.warnings)
    torch.manual_seed(RANK)
    found["other weights"] = raised(
        lambda: gascompile.compile(piped.model().eval(), "64MiB", **options)
    )
    return found


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
