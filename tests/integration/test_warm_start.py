"""A start with the plan in the cache: what a new process does not do, and that no table of another model is used."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaRotaryEmbedding

import gascompile

_SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip
_BUDGET = 60_000
_IDS = torch.arange(12).reshape(1, 12)

_START = """
import json, sys
import torch
from transformers import AutoConfig, LlamaForCausalLM
from torch import nn

folder, cache = sys.argv[1:]
with torch.device("meta"):
    model = LlamaForCausalLM(AutoConfig.from_pretrained(folder)).eval()

built = []

def seen(frame, event, argument):
    if event == "call" and frame.f_code is nn.Linear.__init__.__code__:
        built.append("a layer")

ids = torch.arange(12).reshape(1, 12)
before = set(sys.modules)
import gascompile

inputs = {"input_ids": ids, "use_cache": False}
sys.setprofile(seen)  # replaced functions would be part of the plan
compiled = gascompile.compile(
    model, 60_000, checkpoint=folder, example_inputs=inputs, machine="cpu-nvme", cache_dir=cache
)
sys.setprofile(None)
new = sorted(set(sys.modules) - before)
with compiled:
    logits = compiled(**inputs).logits
print(json.dumps({"new": new, "logits": logits.tolist(), "built": built}))
"""


def _save(folder: Path, **rope: Any) -> Any:
    """Write a small model and return it in memory."""
    config = transformers.LlamaConfig(
        **_SIZES, rope_parameters={"rope_type": "default", "rope_theta": 10000.0, **rope}
    )
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config)
    model.eval()
    folder.mkdir(exist_ok=True)
    config.save_pretrained(folder)
    save_file({n: t.clone() for n, t in model.state_dict().items()}, folder / "model.safetensors")
    return model


def test_what_other_modules_bind_anew_is_no_part_of_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # As in a script that says ``model = gascompile.compile(model, ...)``, beside code that has a ``self.model``.
    script = ModuleType("a_script")
    script.__file__ = str(tmp_path / "script.py")
    script.model = model = _save(tmp_path)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "a_script", script)
    inputs: dict[str, Any] = {"input_ids": _IDS, "use_cache": False}
    for _ in range(2):
        script.model = model  # type: ignore[attr-defined]
        with gascompile.compile(
            model, _BUDGET, example_inputs=inputs, machine="cpu-nvme", cache_dir=tmp_path / "cache"
        ) as compiled:
            script.model = compiled  # type: ignore[attr-defined]
            assert torch.equal(compiled(**inputs).logits, _eager(model))
    assert "captured again" not in caplog.text


def _eager(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=_IDS, use_cache=False).logits
    return logits


def _compiled(folder: Path, cache: Path, build: Callable[[Any], nn.Module]) -> torch.Tensor:
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = build(config).eval()
    inputs = {"input_ids": _IDS, "use_cache": False}
    with gascompile.compile(
        model,
        _BUDGET,
        checkpoint=folder,
        example_inputs=inputs,
        machine="cpu-nvme",
        cache_dir=cache,
    ) as compiled:
        logits: torch.Tensor = compiled(**inputs).logits
    return logits


def _started(*arguments: str) -> dict[str, Any]:
    """Return what a process of its own has to say."""
    command = [sys.executable, "-c", _START, *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert ran.returncode == 0, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


def test_a_new_process_neither_traces_nor_solves_nor_builds_the_model_again(tmp_path: Path) -> None:
    folder, cache = tmp_path / "model", tmp_path / "cache"
    expected = _eager(_save(folder))
    solver = {"pulp", "highspy", "networkx", "sympy"}
    for start in ("cold", "warm"):
        found = _started(str(folder), str(cache))
        assert torch.equal(torch.tensor(found["logits"]), expected), start
        own = {name.removeprefix("gascompile.") for name in found["new"]}
        assert "api.compile" in own
        assert not found["built"]
        needed = own & {"capture.export", "passes.plan.make_plan", "passes.graph.annotate", *solver}
        needed |= {name for name in own if name.startswith(("passes.search", "torch._export"))}
        assert bool(needed) == (start == "cold"), sorted(needed)


def test_another_configuration_has_other_tables(tmp_path: Path) -> None:
    folder, cache = tmp_path / "model", tmp_path / "cache"
    found = []
    for rope in ({}, {"rope_theta": 50.0}, {"rope_type": "linear", "factor": 4.0}, {}):
        expected = _eager(_save(folder, **rope))
        found.append(_compiled(folder, cache, LlamaForCausalLM))
        assert torch.equal(found[-1], expected), rope
    assert not torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[3])


def test_edited_rules_give_other_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, cache = tmp_path / "model", tmp_path / "cache"
    first = _eager(_save(folder))
    assert torch.equal(_compiled(folder, cache, LlamaForCausalLM), first)

    def table(config: Any, **_kwargs: Any) -> tuple[torch.Tensor, float]:
        del config
        return torch.arange(4, dtype=torch.float) / 7, 1.0

    monkeypatch.setattr(
        LlamaRotaryEmbedding, "compute_default_rope_parameters", staticmethod(table)
    )
    edited = _eager(_save(folder))
    assert not torch.equal(edited, first)
    assert torch.equal(_compiled(folder, cache, LlamaForCausalLM), edited)
    monkeypatch.undo()
    assert torch.equal(_compiled(folder, cache, LlamaForCausalLM), first)


def test_rules_in_a_table_of_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope: dict[str, Any] = {"rope_type": "linear", "factor": 4.0}
    folder, cache = tmp_path / "model", tmp_path / "cache"
    first = _eager(_save(folder, **rope))
    assert torch.equal(_compiled(folder, cache, LlamaForCausalLM), first)
    plain = ROPE_INIT_FUNCTIONS["linear"]

    def halved(*args: Any, **kwargs: Any) -> Any:
        table, scale = plain(*args, **kwargs)
        return table / 2, scale

    monkeypatch.setitem(ROPE_INIT_FUNCTIONS, "linear", halved)
    edited = _eager(_save(folder, **rope))
    assert not torch.equal(edited, first)
    assert torch.equal(_compiled(folder, cache, LlamaForCausalLM), edited)


def test_a_subclass_that_scales_its_tables(tmp_path: Path) -> None:
    class Scaled(LlamaForCausalLM):
        def __init__(self, config: Any, by: float = 0.5) -> None:
            super().__init__(config)
            with torch.no_grad():
                self.model.rotary_emb.inv_freq.mul_(by)

    folder, cache = tmp_path / "model", tmp_path / "cache"
    weights = _save(folder).state_dict()
    for _ in range(2):
        model: Any = Scaled(transformers.AutoConfig.from_pretrained(folder))
        model.eval()
        model.load_state_dict(weights)
        assert torch.equal(_compiled(folder, cache, Scaled), _eager(model))
