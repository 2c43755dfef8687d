"""Kept steps: a second compile without capture and solver, equal bit for bit; and never one that is stale."""

from __future__ import annotations

import copy
import logging
import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from typer.testing import CliRunner

import gascompile
from gascompile import compile_step
from gascompile.bundles import plan_cache
from gascompile.bundles.kept_captures import captures_dir
from gascompile.cli import app
from gascompile.core.errors import BudgetExceededError, FormatError
from tests.packages import fresh
from tests.training.keeping_worker import (
    CAPTURE,
    MLP,
    batches,
    loss_fn,
    neither_captured_nor_planned,
    trial,
)
from tests.training.runs import PLANNING_S, doubling
from tests.training.step_edits import EDITS, StepEdit
from tests.training.trials import MACHINE, Trial

STEP = int(os.environ.get("GASCOMPILE_EDITS_STEP", "13"))
"""Every how manyth edit is tried."""
OF_THE_STEP_ALONE = {
    "optimizer", "other optimizer", "momentum", "groups", "parameters of the optimizer", "clipping", "accumulation"
}  # fmt: skip
"""Edits after which the trace of the loss is the one from before."""


def captures_of(patch: pytest.MonkeyPatch) -> list[object]:
    """Return a list that grows with each capture."""
    from gascompile.training.capture.joint import capture_joint

    found: list[object] = []

    def counted(*args: Any, **options: Any) -> Any:
        found.append(args)
        return capture_joint(*args, **options)

    patch.setattr(CAPTURE, counted)
    return found


@pytest.mark.parametrize(
    "options",
    [{}, {"accumulate": 2, "states": "8bit"}, {"max_grad_norm": 0.5, "on_nan": "ignore"}],
    ids=str,
)
def test_second_compile_neither_captures_nor_plans(tmp_path: Path, options: dict[str, Any]) -> None:
    run = trial(tmp_path, **options)
    cold = run.planned()
    with neither_captured_nor_planned():
        warm = run.planned()
    warm.assert_equals(cold)
    assert warm.plan == cold.plan


def test_evaluations_are_kept_too(tmp_path: Path) -> None:
    run = trial(tmp_path)
    found = []
    for again in (False, True):
        model = copy.deepcopy(run.model)
        with (
            neither_captured_nor_planned() if again else nullcontext(),
            run.compiled(model, run.optimizer(model), None) as step,
        ):
            torch.manual_seed(4)
            step(run.batches[0])
            found.append(step.eval(run.batches[1]))
    assert torch.equal(*found)


def test_a_value_that_changes_after_a_kept_step_counts(tmp_path: Path) -> None:
    run = trial(tmp_path)
    run.planned()
    model = MLP()
    model.load_state_dict(run.model.state_dict())
    eager = copy.deepcopy(model)
    optimizer = run.optimizer(eager)
    torch.manual_seed(4)
    expected = []
    for rate in (0.1, 0.5):
        eager.dropout.p = rate
        loss = loss_fn(eager, run.batches[0])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.detach())
    with run.compiled(model, run.optimizer(model), None) as step:
        torch.manual_seed(4)
        with neither_captured_nor_planned():
            found = [step(run.batches[0])]
        model.dropout.p = 0.5
        found.append(step(run.batches[0]))
    assert all(map(torch.equal, found, expected))


class Adapted(nn.Module):
    """A frozen layer, a low-rank change of it that is trained, and a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.base = nn.Embedding(16, 16), nn.Linear(16, 16)
        self.down, self.up = nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False)
        self.head = nn.Linear(16, 16, bias=False)
        self.head.weight = self.embedding.weight
        self.base.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        found: torch.Tensor = self.head(self.base(x) + self.up(self.down(x)))
        return found


def _next_tokens(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten().roll(-1))


def _gpt2_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
    return found


@pytest.mark.parametrize("kind", ["adapted", "gpt2"])
def test_kept_steps_of_language_models(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(2)
    if kind == "adapted":
        model: nn.Module = Adapted()
    else:
        transformers = pytest.importorskip("transformers")
        config = transformers.GPT2Config(
            n_layer=1,
            n_embd=16,
            n_head=2,
            vocab_size=16,
            n_positions=8,
            bos_token_id=0,
            eos_token_id=0,
        )
        model = transformers.GPT2LMHeadModel(config).train()
    loss = _next_tokens if kind == "adapted" else _gpt2_loss
    tokens = [torch.randint(0, 16, (2, 8)) for _ in range(2)]
    run = Trial(model, loss, tokens, tmp_path)
    cold = run.planned()
    cold.assert_equals(run.eager())
    with neither_captured_nor_planned():
        run.planned().assert_equals(cold)


@pytest.mark.parametrize("name", ["program.json", "dependencies.json"])
def test_a_damaged_entry_is_made_again(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trial(tmp_path)
    cold = run.planned()
    (folder,) = plan_cache.plans_dir(tmp_path).iterdir()
    raw = (folder / name).read_bytes()
    (folder / name).write_bytes(raw[: len(raw) // 2])
    (trace,) = captures_dir(tmp_path).glob("*/capture.json")
    raw = trace.read_bytes()
    trace.write_bytes(raw[: len(raw) // 2])
    captures = captures_of(monkeypatch)
    with caplog.at_level(logging.INFO, logger="gascompile"):
        run.planned().assert_equals(cold)
    assert captures
    assert folder.name in caplog.text
    assert f"the kept capture {trace.parent.name} is not used" in caplog.text
    with neither_captured_nor_planned():
        run.planned().assert_equals(cold)


@pytest.mark.parametrize(
    "options",
    [{"max_grad_norm": 0.5}, {"accumulate": 2, "states": "8bit"}],
    ids=str,
)
def test_a_kept_capture_gives_the_plan_of_a_new_one(
    tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    trial(tmp_path / "both").planned()
    captures = captures_of(monkeypatch)
    kept = trial(tmp_path / "both", **options).planned(1 << 30)
    assert not captures
    new = trial(tmp_path / "other", **options).planned(1 << 30)
    assert captures
    kept.assert_equals(new)
    assert kept.plan is not None
    assert new.plan is not None
    certificate = new.plan.certificate
    assert kept.plan == replace(
        new.plan, certificate=replace(certificate, solve_s=kept.plan.certificate.solve_s)
    )


def test_what_is_not_kept_says_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Trial(MLP(), doubling(loss_fn), batches(1), tmp_path).planned()
    assert "Own has a backward pass of its own" in caplog.text
    assert not plan_cache.entries(tmp_path)


def test_a_kept_step_that_an_op_takes_beyond_its_budget_is_captured_again(tmp_path: Path) -> None:
    run = trial(tmp_path)
    run.planned()
    model = copy.deepcopy(run.model)
    with run.compiled(model, run.optimizer(model), None) as step:
        (unit,) = step._units
        assert unit.entry
        error = BudgetExceededError(
            op="addmm", planned_bytes=1, real_bytes=2, budget_bytes=3, tier="cpu"
        )
        assert step._maker.learns(unit, error) and step._drops(unit, error)
        assert not plan_cache.entries(tmp_path)
        step(run.batches[0])
        (unit,) = step._units
        assert not unit.entry


def test_two_processes_keep_one_step(tmp_path: Path) -> None:
    # Under its own name, as the model's class is part of the key.
    script = "from tests.training.keeping_worker import main; main()"
    command = [sys.executable, "-c", script, str(tmp_path)]
    root = Path(__file__).parents[2]
    workers = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) for _ in range(2)
    ]
    first, second = (worker.communicate(timeout=300)[0] for worker in workers)
    assert not any(worker.returncode for worker in workers)
    assert first == second
    assert len(plan_cache.entries(tmp_path)) == 1
    third = subprocess.run([*command, "warm"], capture_output=True, text=True, check=True, cwd=root)
    assert third.stdout == first


def test_kept_steps_are_bundles_for_the_verbs_but_not_for_load(tmp_path: Path) -> None:
    trial(tmp_path).planned()
    (entry,) = plan_cache.entries(tmp_path)
    assert (entry.ok, entry.model) == (True, "step of MLP")
    folder = str(plan_cache.plans_dir(tmp_path) / entry.key)
    for verb in (
        ["verify", folder],
        ["simulate", folder],
        ["explain", folder, "first.weight"],
        ["explain", folder, "first.weight:exp_avg[0:512]"],
        ["diff", folder, folder],
        ["whatif", folder, "--time-limit", "0.05"],
    ):
        result = CliRunner().invoke(app, [*verb, "--json"])
        assert result.exit_code == 0, (verb, result.output)
    with pytest.raises(FormatError, match="holds a training step"):
        gascompile.load(folder, cache_dir=tmp_path, allow_code=True)


@pytest.mark.parametrize("edit", EDITS[::STEP], ids=lambda edit: edit.name)
def test_edited_script_trains_as_eager_does(
    edit: StepEdit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    captures = captures_of(monkeypatch)
    found = []
    # With a budget of its own, the second run has a kept capture at the most.
    other = EDITS.index(edit) % 2
    for edited in (False, True):
        captures.clear()
        main = fresh(tmp_path, edit.sources(after=edited))
        try:
            eager = _trained(main, None)
            planned = _trained(main, tmp_path / "cache", (1 << 30) if edited and other else None)
        finally:
            main.undo()
        assert all(map(torch.equal, planned, eager))
        found.append(eager)
    assert (not captures) == (edit.is_kept or edit.name in OF_THE_STEP_ALONE)
    assert not all(map(torch.equal, *found)), "the edit changes nothing"


def _trained(main: ModuleType, cache: Path | None, budget: int | None = None) -> list[torch.Tensor]:
    """Return the losses and parameters of a run, by planned steps where there is a cache."""
    model, fn, optimizer, batches, options = main.make()
    if cache is None:
        torch.manual_seed(3)
        losses = [
            _eager_step(model, fn(model, batch), optimizer, options, number)
            for number, batch in enumerate(batches, 1)
        ]
    else:
        with compile_step(
            model,
            fn,
            optimizer,
            budget,
            batches[0],
            machine=MACHINE,
            cache_dir=cache,
            time_limit_s=PLANNING_S,
            **options,
        ) as step:
            torch.manual_seed(3)
            losses = [step(batch) for batch in batches]
    return [*losses, *model.state_dict().values()]


def _eager_step(
    model: nn.Module,
    loss: torch.Tensor,
    optimizer: torch.optim.Optimizer,
    options: dict[str, Any],
    number: int,
) -> torch.Tensor:
    loss.backward()
    if number % options.get("accumulate", 1) == 0:
        if "max_grad_norm" in options:
            torch.nn.utils.clip_grad_norm_(model.parameters(), options["max_grad_norm"])
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()
