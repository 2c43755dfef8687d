"""One rank of a job of a few: trains small models by planned steps and writes what came of it.

Run as ``python -m tests.distributed.rank_worker FOLDER SCENARIO...`` with what ``torchrun`` sets in the environment.
"""

from __future__ import annotations

import io
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gascompile import compile_step
from gascompile.core.errors import GASCompileError, NanLossError, RankError
from gascompile.training import division
from gascompile.training.monitor import Monitor
from gascompile.training.planning import rank_overlap
from gascompile.training.rank_timeline import save_of_ranks
from gascompile.training.step import TrainingStep
from gascompile.training.timeline import record
from tests.distributed.jobs import (
    SCENARIOS,
    Scenario,
    batches,
    loss_fn,
    net_of,
    optimizer_of,
    rows_of,
)
from tests.training.runs import PLANNING_S
from tests.training.trials import MACHINE

RANK, SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def opened(
    scenario: Scenario,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    folder: Path,
    **options: Any,
) -> TrainingStep:
    stage, rank_overlap.forced = scenario.stage, scenario.overlaps
    division.forced = None
    if stage is not None:
        division.forced = lambda sizes: {} if stage == "whole" else dict.fromkeys(sizes, stage)
    return compile_step(
        model,
        loss_fn,
        optimizer,
        scenario.budget,
        machine=MACHINE,
        cache_dir=folder / f"cache-{RANK}",
        time_limit_s=PLANNING_S,
        **{**scenario.options, **options},
    )


def own_rows(batch: Any, scenario: Scenario) -> Any:
    """Return this rank's rows of a global batch of two ranks."""
    if SIZE == 1:
        return batch
    rows = rows_of(scenario, SIZE)
    begin = sum(rows[:RANK])
    return [tensor[begin : begin + rows[RANK]] for tensor in batch]


def trains(scenario: Scenario, folder: Path) -> dict[str, Any]:
    """Train, evaluate, save, and close."""
    torch.manual_seed(RANK)  # others begin with other values, and take those of rank 0
    model = net_of(scenario)
    optimizer = optimizer_of(scenario, model)
    losses = []
    with opened(scenario, model, optimizer, folder) as step:
        for number, batch in enumerate(batches(scenario)):
            for group in optimizer.param_groups:
                group["lr"] = scenario.lr / (1 + number)
            losses.append(step(own_rows(batch, scenario)))
        losses.append(step.eval(own_rows(batches(scenario)[0], scenario)))
        step.save(folder / "checkpoint", {"number": 7})
        state = step.state_dict()
        moments, rows = step.num_own_moments, []
        if step.ranks is not None and "rows" not in scenario.options:
            rows = step.ranks.rows()
        sampled = list(step.sampler(20)) if rows else []
        divided = _divided(step)
    return {
        "losses": losses,
        "state": state,
        "closed": {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        "num_moments": moments,
        "rows": rows,
        "sampled": sampled,
        **divided,
    }


def _divided(step: TrainingStep) -> dict[str, Any]:
    """Return what is divided, how often each step gathers, what it took, and what one rank by itself is told."""
    assert step.last_run is not None
    if step.ranks is None or step.ranks.division is None:
        return {}
    stages, said = dict(step.ranks.division.chosen.stages), []
    names = dict(step._model.named_parameters())
    for read in (
        lambda: [names[name].sum() for name in stages],
        lambda: [names[name].detach().zero_() for name in stages],
        lambda: step._model.state_dict() if stages else None,
        lambda: step.model(torch.zeros(1, 48)) if stages else None,
    ):
        try:
            read()
        except GASCompileError as error:
            said.append(f"{type(error).__name__}: {error}")
    return {
        "stages": stages,
        "reads": step.ranks._ranks.exchange.reads,
        "division": str(step.ranks.division),
        "said": said,
        "num_gathered": [
            sum(
                "gascompile_ranks.whole" in str(node.target)
                for node in unit.graph_module.graph.nodes
            )
            for unit in step._units
        ],
        "peak_bytes": step.last_run.peak_bytes["cpu"],
    }


def resumes(scenario: Scenario, folder: Path) -> dict[str, Any]:
    """Go on from the checkpoint of ``trains``, with as many ranks as there are now."""
    torch.manual_seed(RANK)
    model = net_of(scenario)
    with opened(scenario, model, optimizer_of(scenario, model), folder) as step:
        step.prepare(own_rows(batches(scenario)[0], scenario))
        extra = step.load(folder / "checkpoint")
        return {
            "extra": extra,
            "losses": [step(own_rows(b, scenario)) for b in batches(scenario)[:2]],
        }


def meets_nan(scenario: Scenario, folder: Path) -> dict[str, Any]:
    """A NaN in the last rank's rows ends the step on all, before anything has changed."""
    torch.manual_seed(0)
    model = net_of(scenario)
    with opened(scenario, model, optimizer_of(scenario, model), folder) as step:
        batch = own_rows(batches(scenario)[0], scenario)
        step(batch)
        spoilt = [batch[0].clone(), batch[1]]
        if RANK == SIZE - 1:
            spoilt[0][0, 0] = float("nan")
        before = step.state_dict()["model"]
        try:
            step(spoilt)
        except NanLossError as error:
            said = str(error)
        after = step.state_dict()["model"]
        return {"said": said, "before": before, "after": after, "loss": step(batch)}


def forgets(scenario: Scenario, folder: Path) -> dict[str, Any]:
    """Take a step that the first rank finds in its cache and the others plan anew."""
    if RANK:
        shutil.rmtree(folder / f"cache-{RANK}" / "plans")
    torch.manual_seed(0)
    model = net_of(scenario)
    with opened(scenario, model, optimizer_of(scenario, model), folder) as step:
        return {"loss": step(own_rows(batches(scenario)[0], scenario))}


def refuses(scenario: Scenario, folder: Path) -> dict[str, Any]:
    """A batch that one rank, or none, can plan for is refused, and the step goes on; nothing is lost at its end."""
    torch.manual_seed(0)
    model = net_of(scenario)
    said = []
    with opened(scenario, model, optimizer_of(scenario, model), folder) as step:
        batch = own_rows(batches(scenario)[0], scenario)
        wrong = [batch[0][:, :-1], batch[1]]
        step(batch)
        before = step.state_dict()["model"]
        bad = wrong, [tensor[:0] for tensor in batch], [batch[0], batch[1][:1]]
        alone, empty, uneven = (batch if RANK == 0 else own for own in bad)
        asked = None if RANK == 0 else False
        for given, updates in [*((x, None) for x in (alone, wrong, empty, uneven)), (batch, asked)]:
            try:
                step(given, updates=updates)
            except (GASCompileError, ValueError) as error:
                said.append(f"{type(error).__name__}: {error}")
        after = step.state_dict()["model"]
        step(batch)
        last = step.state_dict()["model"]
    return {
        "said": said, "before": before, "after": after, "last": last, "closed": model.state_dict()
    }  # fmt: skip


class Kept:
    """Takes scalars as TensorBoard's writer does."""

    def __init__(self) -> None:
        self.found: dict[str, list[float]] = {}

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.found.setdefault(f"{tag} {global_step}", []).append(scalar_value)


def watched(scenario: Scenario, folder: Path) -> dict[str, Any]:
    """Show and keep what steps take, and write the timeline of one down."""
    torch.manual_seed(0)
    model, kept, shown = net_of(scenario), Kept(), io.StringIO()
    with opened(scenario, model, optimizer_of(scenario, model), folder) as step:
        with Monitor(step, writer=kept, stream=shown, every=1) as monitor:
            for batch in batches(scenario)[:3]:
                monitor(step(own_rows(batch, scenario)))
        recorded = record(step, own_rows(batches(scenario)[3], scenario))
        path = save_of_ranks(step, recorded, folder / "timelines")
    return {"kept": kept.found, "shown": shown.getvalue(), "path": str(path or "")}


def lengths(_: Scenario, folder: Path) -> dict[str, Any]:
    """Rows of other lengths on each rank, of which no process has one batch: ranks draw numbers of their own."""

    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(48, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(self.layer(x), 0.5).mean(1)

    torch.manual_seed(RANK)
    model = Pooled()
    scenario = SCENARIOS["adamw"]
    own = torch.get_rng_state()
    with opened(scenario, model, optimizer_of(scenario, model), folder) as step:
        batch = [torch.ones(4, 2 + RANK, 48), torch.zeros(4, dtype=torch.int64)]
        losses = [step(batch) for _ in range(2)]
        return {
            "losses": losses,
            "moved": not torch.equal(torch.get_rng_state(), own),
            "model": step.state_dict()["model"],
        }


def _with(
    change: Callable[[TrainingStep, torch.optim.Optimizer], object], *, on_all: bool = False
) -> Callable[..., Any]:
    def run(scenario: Scenario, folder: Path) -> dict[str, Any]:
        torch.manual_seed(0)
        model = net_of(scenario)
        optimizer = optimizer_of(scenario, model)
        batch = own_rows(batches(scenario)[0], scenario)
        found: dict[str, Any] = {}
        with opened(scenario, model, optimizer, folder) as step:
            try:
                step(batch)
                if on_all or RANK == SIZE - 1:
                    change(step, optimizer)
                step(batch)
            except RankError as error:
                found = {"rank": error.rank, "said": str(error)}
            except GASCompileError as error:
                return {"own": type(error).__name__, "said": str(error)}
        return {**found, "lost": [name for name, p in model.named_parameters() if p.is_meta]}

    return run


def _other_lr(_: TrainingStep, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = 0.5


def _read(step: TrainingStep, _: object) -> None:
    step.state_dict()


def _edit(step: TrainingStep, optimizer: torch.optim.Optimizer) -> None:
    parameter = optimizer.param_groups[0]["params"][-1]
    with torch.no_grad():
        parameter.add_(1.0 + RANK)


def _edit_moments(step: TrainingStep, optimizer: torch.optim.Optimizer) -> None:
    state = optimizer.state_dict()
    for entry in state["state"].values():
        entry["exp_avg"] = entry["exp_avg"] + RANK
    optimizer.load_state_dict(state)


def _local_norm(scenario: Scenario, folder: Path) -> dict[str, Any]:
    """A batch norm that is called where it is not computed over all ranks, and a buffer that rows change."""

    class Own(nn.Module):
        mean: torch.Tensor

        def __init__(self, *, by_rows: bool) -> None:
            super().__init__()
            self.layer, self.by_rows = nn.Linear(48, 3), by_rows
            self.register_buffer("mean", torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.layer(x)
            if self.by_rows:
                self.mean.mul_(0.9).add_(y.detach().mean(0))
                return y
            return torch.batch_norm(y, None, None, None, None, True, 0.1, 1e-5, False)

    said = []
    for by_rows in (False, True):
        model = Own(by_rows=by_rows)
        try:
            with opened(scenario, model, optimizer_of(scenario, model), folder) as step:
                step(own_rows(batches(scenario)[0], scenario))
        except GASCompileError as error:
            said.append(f"{type(error).__name__}: {error}")
    return {"said": said}


def _fail(*_: object) -> None:
    raise ValueError("a hook of the user's")


def _kill_in_the_middle(*_: object) -> None:
    signal.setitimer(signal.ITIMER_REAL, 0.001)  # its default ends the process


def _other_model(scenario: Scenario, folder: Path) -> dict[str, Any]:
    model = net_of(scenario) if RANK else nn.Linear(8, 1)
    return _not_opened(scenario, model, folder)


def _other_options(scenario: Scenario, folder: Path) -> dict[str, Any]:
    return _not_opened(scenario, net_of(scenario), folder, on_nan="raise" if RANK else "ignore")


def _not_opened(
    scenario: Scenario, model: nn.Module, folder: Path, **options: Any
) -> dict[str, Any]:
    try:
        opened(scenario, model, optimizer_of(scenario, model), folder, **options)
    except RankError as error:
        return {"rank": error.rank, "said": str(error)}
    return {}


KINDS: dict[str, Callable[[Scenario, Path], dict[str, Any]]] = {
    "trains": trains,
    "resumes": resumes,
    "nan": meets_nan,
    "forgets": forgets,
    "refuses": refuses,
    "lengths": lengths,
    "watched": watched,
    "other lr": _with(_other_lr),
    "eval": _with(
        lambda step, _: step.eval(own_rows(batches(SCENARIOS["adamw"])[0], SCENARIOS["adamw"]))
    ),
    "edits": _with(_edit),
    "edits of its own": _with(_edit, on_all=True),
    "moments of its own": _with(_edit_moments, on_all=True),
    "reads": _with(_read),
    "local norm": _local_norm,
    "raises": _with(_fail),
    "killed": _with(_kill_in_the_middle),
    "other model": _other_model,
    "other options": _other_options,
}


def main() -> None:
    """Run the scenarios that are asked for, ``kind:name``, one after the other."""
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    for asked in sys.argv[2:]:
        kind, _, name = asked.partition(":")
        scenario = SCENARIOS[name or "adamw"]
        own = folder / (name or "adamw")
        own.mkdir(exist_ok=True, parents=True)
        try:
            found = KINDS[kind](scenario, own)
        except ValueError as error:
            found = {"raised": str(error)}
        torch.save(found, folder / f"{asked.replace(':', '-')}.{RANK}-of-{SIZE}.pt")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
