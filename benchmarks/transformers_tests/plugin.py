"""A plugin of pytest that runs tests of transformers against compiled models and planned training steps.

Loaded with ``-p benchmarks.transformers_tests.plugin`` by ``python -m benchmarks.transformers_tests``. Wherever a test
itself calls ``model.eval()`` or ``model.generate(...)`` it meets ``gascompile.compile(model, budget)``; where it makes
a ``Trainer`` it gets ``GasTrainer``. The library's own calls of these are left as they are. One JSON line per test
says how it ended, and how many calls of compiled models and planned steps there were.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel
from transformers.generation.utils import GenerationMixin

import gascompile
from gascompile.api.compiled import CompiledModel
from gascompile.api.runner import Runner
from gascompile.integrations.trainer import GasTrainer
from gascompile.training.step import TrainingStep

BUDGET = "64MiB"
REPORT = "GASCOMPILE_TESTS_REPORT"
"""Variable with the file that lines are appended to."""
MODE = "GASCOMPILE_TESTS_MODE"
"""Variable: ``plain`` leaves models and trainers alone, ``compiled`` replaces them."""
CALLS = "gascompile_calls"


class _Replaced:
    """The compiled models of the test that runs, and how often they were called."""

    def __init__(self, tests: Path) -> None:
        self._tests = f"{tests}{os.sep}"
        self._models: dict[int, CompiledModel] = {}
        self._is_busy = False
        self.calls = 0

    def is_called_by_test(self) -> bool:
        """Return whether the caller of the caller is code of a test."""
        return not self._is_busy and sys._getframe(2).f_code.co_filename.startswith(self._tests)

    def compiled(self, model: Any) -> Any:
        """Return what is compiled of a model, the same one each time."""
        if isinstance(model, CompiledModel):
            return model
        if id(model) not in self._models:
            self._is_busy = True
            try:
                self._models[id(model)] = gascompile.compile(model, BUDGET)
            finally:
                self._is_busy = False
        return self._models[id(model)]

    def forget(self) -> None:
        """Close what the test before has compiled."""
        for compiled in self._models.values():
            compiled.close()
        self._models.clear()
        self.calls = 0


class _Budgeted(GasTrainer):
    """A ``GasTrainer`` with a budget, as tests construct it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, budget=BUDGET, **options)


class _BudgetedSeq2Seq(GasTrainer, transformers.Seq2SeqTrainer):  # type: ignore[misc]
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, budget=BUDGET, **options)


def _counted(replaced: _Replaced, cls: type, name: str) -> Callable[..., Any]:
    inner = getattr(cls, name)

    @functools.wraps(inner)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        replaced.calls += 1
        return inner(self, *args, **kwargs)

    return call


def _replace(replaced: _Replaced, patch: pytest.MonkeyPatch) -> None:
    """Put compiled models and planned trainers in the place of the library's."""
    to_eval, generate = torch.nn.Module.eval, GenerationMixin.generate

    def eval_compiled(self: Any) -> Any:
        result = to_eval(self)
        return replaced.compiled(result) if replaced.is_called_by_test() else result

    @functools.wraps(generate)
    def generate_compiled(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_asked = isinstance(self, PreTrainedModel) and replaced.is_called_by_test()
        return generate(replaced.compiled(self) if is_asked else self, *args, **kwargs)

    patch.setattr(PreTrainedModel, "eval", eval_compiled, raising=False)
    patch.setattr(GenerationMixin, "generate", generate_compiled)
    # In the modules that define them, too: some tests import the package anew.
    for module in (transformers, transformers.trainer):
        patch.setattr(module, "Trainer", _Budgeted)
    for module in (transformers, transformers.trainer_seq2seq):
        patch.setattr(module, "Seq2SeqTrainer", _BudgetedSeq2Seq)
    patch.setattr(Runner, "call", _counted(replaced, Runner, "call"))
    patch.setattr(TrainingStep, "__call__", _counted(replaced, TrainingStep, "__call__"))


class _Plugin:
    def __init__(self, config: pytest.Config) -> None:
        self._replaced = _Replaced(config.rootpath / "tests")
        self._patch = pytest.MonkeyPatch()
        report = os.environ.get(REPORT)
        is_worker = hasattr(config, "workerinput")
        self._report = Path(report) if report and not is_worker else None
        if os.environ.get(MODE) == "compiled":
            _replace(self._replaced, self._patch)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        self._replaced.forget()
        try:
            return (yield)
        finally:
            item.user_properties.append((CALLS, self._replaced.calls))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        is_end = report.when == "call" or report.outcome != "passed"
        if self._report is None or not is_end:
            return
        line = {
            "name": report.nodeid,
            "outcome": report.outcome,
            "reason": _reason(report),
            "calls": dict(report.user_properties).get(CALLS, 0),
            "seconds": round(report.duration, 1),
        }
        with self._report.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def pytest_unconfigure(self) -> None:
        self._replaced.forget()
        self._patch.undo()


def _reason(report: pytest.TestReport) -> str:
    """Return the first line of what a test was skipped or failed for."""
    if report.outcome == "passed":
        return ""
    found = report.longrepr
    if isinstance(found, tuple):
        text = found[2]
    else:
        crash = getattr(found, "reprcrash", None)
        text = crash.message if crash is not None else str(found)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0][:300] if lines else ""


def pytest_configure(config: pytest.Config) -> None:
    """Begin before modules of tests are imported, which take names from transformers."""
    config.pluginmanager.register(_Plugin(config), "gascompile-transformers")
