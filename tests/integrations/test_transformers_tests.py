"""The runner of transformers' own tests: what it puts in their place, and what it says of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from benchmarks.transformers_tests import plugin
from benchmarks.transformers_tests.__main__ import count, sorted_out
from gascompile.api.compiled import CompiledModel
from gascompile.integrations.trainer import GasTrainer
from tests.integrations.generation_table import made

FILE = "tests/models/llama/test_modeling_llama.py"
_TEST = """
def of_test(model):
    from transformers import Seq2SeqTrainer, Trainer
    return model.eval(), model.eval(), Trainer, Seq2SeqTrainer
"""


def line(name: str, outcome: str = "passed", reason: str = "", calls: int = 0) -> dict[str, Any]:
    return {"name": f"{FILE}::{name}", "outcome": outcome, "reason": reason, "calls": calls}


def test_what_is_said_of_each_test() -> None:
    static = "LlamaModelTest::test_generate_with_static_cache"
    names = ("runs", "nothing", "wrong", "skips", static)
    plain = [line(name) for name in names]
    plain += [line("network", "failed", "OSError"), line("gpu", "skipped", "no accelerator")]
    compiled = [
        line("runs", calls=3),
        line("nothing"),
        line("wrong", "failed", "AssertionError: 1 != 2", 2),
        line("skips", "skipped", "no such argument", 1),
        line(static, "failed", "AssertionError", 20),
        line("network", "failed", "OSError"),
    ]
    found = sorted_out(plain, compiled)
    assert found["passed"] == {FILE: ["runs"]}
    assert found["passed_without_a_call"] == {FILE: ["nothing"]}
    assert found["failed"] == {FILE: {"AssertionError: 1 != 2": ["wrong"]}}
    assert found["fails_without_us"] == {FILE: {"OSError": ["network"]}}
    assert found["skipped_by_the_library"] == {
        FILE: {"no accelerator": ["gpu"], "no such argument": ["skips"]}
    }
    assert [*found["does_not_apply"][FILE].values()] == [[static]]
    assert {kind: count(part) for kind, part in found.items()} == {
        "passed": 1, "passed_without_a_call": 1, "does_not_apply": 1, "failed": 1,
        "skipped_by_the_library": 2, "fails_without_us": 1,
    }  # fmt: skip


def test_what_tests_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code of the checkout's tests meets compiled models and planned trainers; other code its own."""
    replaced, model = plugin._Replaced(tmp_path / "tests"), made("Llama")
    own = transformers.Trainer
    with monkeypatch.context() as patch:
        plugin._replace(replaced, patch)
        names: dict[str, Any] = {}
        exec(compile(_TEST, str(tmp_path / "tests" / "test_it.py"), "exec"), names)
        one, again, trainer, seq2seq = names["of_test"](model)
        assert isinstance(one, CompiledModel)
        assert again is one
        assert issubclass(trainer, GasTrainer)
        assert issubclass(seq2seq, GasTrainer)
        assert model.eval() is model
        replaced.forget()
    assert transformers.Trainer is own
