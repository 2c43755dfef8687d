"""Saved plans: another process trains from them without capture and solver; what they are not of is refused."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from gascompile import TrainingStep, compile_step
from gascompile.cli import app
from gascompile.core import serial
from gascompile.core.errors import (
    FormatError,
    GASCompileError,
    PlanMismatchError,
    PlanVerificationError,
    StorageError,
)
from gascompile.core.plan import Plan
from gascompile.core.serial import raw_digest
from gascompile.core.sizes import parse_size
from gascompile.training.saved_plans import is_step_op
from tests.training.keeping_worker import MLP, batches, loss_fn, neither_captured_nor_planned
from tests.training.runs import PLANNING_S, doubling
from tests.training.trials import MACHINE, adamw

BUDGET = "5MiB"


def opened(cache: Path, model: nn.Module | None = None, **options: Any) -> TrainingStep:
    torch.manual_seed(1)
    model = model or MLP()
    made = {"budget": BUDGET, "machine": MACHINE, "time_limit_s": PLANNING_S, **options}
    fn = made.pop("loss", loss_fn)
    optimizer = made.pop("optimizer", adamw)(model)
    return compile_step(model, fn, optimizer, cache_dir=cache, **made)


def run(step: TrainingStep) -> list[torch.Tensor]:
    torch.manual_seed(4)
    found = [step(batch) for batch in batches()]
    return [*found, step.eval(batches()[0]), *step.state_dict()["model"].values()]


def child(plans: str, cache: str, saves: str) -> None:
    """Train, with plans that are saved or from those that were, and print what comes out, exactly."""
    torch.set_num_threads(1)
    if saves:
        with opened(Path(cache)) as step:
            found = run(step)
            step.save_plan(plans)
    else:
        with neither_captured_nor_planned(), opened(Path(cache), plan=plans) as step:
            found = run(step)
    sys.stdout.write(" ".join(float(loss).hex() for loss in found[:4]))


@pytest.fixture(scope="module")
def of_a_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[torch.Tensor]]:
    """Return a folder with the plans of steps and of evaluations, and what they returned."""
    folder = tmp_path_factory.mktemp("saved")
    with opened(folder / "cache") as step:
        found = run(step)
        step.save_plan(folder / "plans")
    return folder / "plans", found


@pytest.fixture
def saved(of_a_run: tuple[Path, list[torch.Tensor]], tmp_path: Path) -> Path:
    """Return a copy of the folder, to change."""
    return Path(shutil.copytree(of_a_run[0], tmp_path / "plans"))


@pytest.mark.parametrize("options", [{}, {"accumulate": 2, "max_grad_norm": 0.5}], ids=str)
def test_a_step_from_saved_plans_is_the_same(tmp_path: Path, options: dict[str, Any]) -> None:
    with opened(tmp_path / "cache", **options) as step:
        expected = run(step)
        step.save_plan(tmp_path / "plans")
        # Again, in the place of those from before.
        step.save_plan(tmp_path / "plans")
        plan = step.plan
    kinds = ["accumulation-1", "evaluation-1", "update-1"]
    names = sorted(path.name for path in (tmp_path / "plans").iterdir())
    assert names == (kinds if options else kinds[1:])
    with (
        neither_captured_nor_planned(),
        # Neither the cache nor the budget of before.
        opened(tmp_path / "other", plan=tmp_path / "plans", budget=None, **options) as step,
    ):
        assert all(map(torch.equal, run(step), expected))
        assert step.plan == plan
        assert not (tmp_path / "other" / "plans").exists()
        step.save_plan(tmp_path / "again")
    files = [path.relative_to(tmp_path / "plans") for path in (tmp_path / "plans").rglob("*.json")]
    for name in files:
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "plans" / name).read_bytes()


def test_another_process_needs_no_cache(tmp_path: Path) -> None:
    script = "import sys; from tests.training.test_saved_plans import child; child(*sys.argv[1:])"
    printed = []
    for cache, saves in (("first", "saves"), ("second", "")):
        command = [sys.executable, "-c", script, str(tmp_path / "plans"), str(tmp_path / cache)]
        done = subprocess.run(
            [*command, saves],
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parents[2],
        )
        printed.append(done.stdout)
    assert printed[0] == printed[1] != ""


class Wider(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(32, 5)


def halved(model: nn.Module, batch: Any) -> torch.Tensor:
    return loss_fn(model, batch) / 2


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("options", "batch", "words"),
    [
        ({"model": Wider()}, batches()[0], "other code or values behind the model and the loss"),
        ({"model": MLP(0.2)}, batches()[0], "other code or values behind the model and the loss"),
        ({"loss": halved}, batches()[0], "other code or values behind the model and the loss"),
        ({"optimizer": sgd}, batches()[0], "made for other optimizer"),
        ({"max_grad_norm": 1.0}, batches()[0], "other options of compile_step"),
        ({}, batches(1, rows=4)[0], "made for other batch"),
        ({"budget": "6MiB"}, batches()[0], "is for 5.00 MiB of cpu, the budget is 6.00 MiB"),
        ({"machine": "rtx4090-gen4"}, batches()[0], "was made for the machine 'cpu-nvme'"),
        ({"machine": None}, batches()[0], "was made for the machine 'cpu-nvme'"),
    ],
)
def test_what_plans_are_not_of_is_refused(
    tmp_path: Path, saved: Path, options: dict[str, Any], batch: Any, words: str
) -> None:
    model = copy.deepcopy(options.pop("model", MLP()))
    before = copy.deepcopy(model.state_dict())
    with neither_captured_nor_planned(), pytest.raises(PlanMismatchError, match=words):
        opened(tmp_path / "other", model, plan=saved, example_batch=batch, **options)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def edited(folder: Path, name: str, change: Callable[[Any], Any]) -> None:
    """Change a file of a bundle, and the checksum with it."""
    data = change(json.loads((folder / name).read_text()))
    (folder / name).write_text(json.dumps(data))
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][name] = raw_digest((folder / name).read_bytes())
    (folder / "manifest.json").write_text(json.dumps(manifest))


def _smaller_tensor(plan: Any) -> Any:
    tensor = next(t for t in plan["workload"]["tensors"] if t["kind"] == "activation")
    tensor["bytes"] //= 2
    return plan


def _without_steps(plan: Any) -> Any:
    plan["steps"] = plan["steps"][:-1]
    return plan


def _other_op(program: Any) -> Any:
    return json.loads(
        json.dumps(program).replace("aten.gelu_backward.default", "aten.from_file.default")
    )


@pytest.mark.parametrize(
    ("name", "change", "error"),
    [
        ("plan.json", _smaller_tensor, PlanMismatchError),
        ("plan.json", _without_steps, PlanVerificationError),
        ("program.json", _other_op, FormatError),
        ("step.json", lambda facts: {**facts, "num_groups": 7}, FormatError),
    ],
)
def test_forged_plans_are_refused(
    tmp_path: Path,
    saved: Path,
    name: str,
    change: Callable[[Any], Any],
    error: type[GASCompileError],
) -> None:
    edited(saved / "update-1", name, change)
    content = {path: path.read_bytes() for path in saved.rglob("*") if path.is_file()}
    with neither_captured_nor_planned(), pytest.raises((error, PlanVerificationError)):
        opened(tmp_path / "other", plan=saved, example_batch=batches()[0])
    # A folder of the user's: it stays as it is, whatever it holds.
    assert content == {path: path.read_bytes() for path in saved.rglob("*") if path.is_file()}


def test_damaged_folders_are_named(tmp_path: Path, saved: Path) -> None:
    (saved / "update-1" / "dependencies.json").unlink()
    with pytest.raises(FormatError, match="does not say what it depends on"):
        opened(tmp_path / "other", plan=saved, example_batch=batches()[0])
    (saved / "update-1" / "plan.json").write_text("{}")
    with pytest.raises(FormatError, match="checksum differs"):
        opened(tmp_path / "other", plan=saved)
    with pytest.raises(FormatError, match="holds no plans of a training step"):
        opened(tmp_path / "other", plan=tmp_path / "nothing")
    with (
        opened(tmp_path / "cache", example_batch=batches()[0]) as step,
        pytest.raises(StorageError, match="holds something else"),
    ):
        step.save_plan(tmp_path)
    with (
        opened(tmp_path / "cache") as step,
        pytest.raises(PlanMismatchError, match="nothing has been planned yet"),
    ):
        step.save_plan(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_what_cannot_be_compared_cannot_be_saved(tmp_path: Path) -> None:
    with (
        opened(tmp_path / "cache", loss=doubling(loss_fn), example_batch=batches()[0]) as step,
        pytest.raises(PlanMismatchError, match="cannot be saved"),
    ):
        step.save_plan(tmp_path / "plans")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache"]


def test_ops_of_steps_are_a_closed_set() -> None:
    for name in (
        "aten.mm.default",
        "aten.gelu_backward.default",
        "gascompile_updates.adam.default",
    ):
        assert is_step_op(name)
    for name in ("aten.from_file.default", "mine_backward.default", "mine.op_backward.default"):
        assert not is_step_op(name)


def test_verbs_take_saved_plans(tmp_path: Path, saved: Path) -> None:
    folder, workload = str(saved / "update-1"), str(tmp_path / "step.workload.json")
    cache = ["--cache-dir", str(tmp_path / "cache"), "--machine", MACHINE]
    for verb in (
        ["verify", folder],
        ["simulate", folder],
        ["explain", folder, "first.weight"],
        ["diff", folder, str(saved / "evaluation-1")],
        ["whatif", folder, "--time-limit", "0.05"],
        ["annotate", folder, "-o", workload, *cache],
        ["plan", folder, "--budget", "6MiB", "--time-limit", "0.1", *cache],
    ):
        result = CliRunner().invoke(app, [*verb, "--json"])
        assert result.exit_code == 0, (verb, result.output)
    planned = serial.from_json(Plan, json.loads(result.stdout))
    assert planned.budget_bytes["cpu"] == parse_size("6MiB")
    assert json.loads(Path(workload).read_text())["name"] == "step of MLP"
    several = CliRunner().invoke(app, ["verify", str(saved)])
    assert several.exit_code == 1
    assert "name one of them: evaluation-1, update-1" in " ".join(several.output.split())
