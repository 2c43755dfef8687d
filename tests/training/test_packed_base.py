"""Adapters over a base that stays packed in its checkpoint: trained as peft trains them over its dequantised values."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import gascompile
from gascompile.core.errors import UnsupportedOpError
from tests.gguf_files import write_gguf
from tests.quantised_files import (
    AWQ,
    FP8,
    GPTQ,
    Folder,
    Layer,
    awq,
    compressed,
    compressed_config,
    fp8,
    gptq,
    quantised_folder,
)
from tests.training.adapted import by_peft, next_tokens, token_batches
from tests.training.runs import MACHINE, PLANNING_S, adamw

BUDGET_BYTES = (4 << 20) + 700_000
"""Four MiB of transfer buffers, and less than the base has as values."""
RATES = tuple(
    dataclasses.replace(MACHINE.rates[0], dtype=dtype) for dtype in ("bfloat16", "float16")
)
HOST = dataclasses.replace(MACHINE, name="by hand, in three dtypes", rates=(*MACHINE.rates, *RATES))
TOKENS = token_batches(96)
CASES: Mapping[str, tuple[torch.dtype, Callable[[int, int], Layer], Mapping[str, Any]]] = {
    "gptq": (torch.float32, partial(gptq, ordered=True), {**GPTQ, "desc_act": True}),
    "awq": (torch.float32, awq, AWQ),
    "packed": (torch.bfloat16, compressed, compressed_config()),
    "fp8": (torch.float32, fp8, FP8),
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in which the page memory is compiled once."""
    return tmp_path_factory.mktemp("cache")


def made(dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    model: Any = transformers.LlamaForCausalLM(config)
    return model.to(dtype)


def outline(folder: Folder) -> nn.Module:
    with torch.device("meta"):
        found: nn.Module = transformers.LlamaForCausalLM(folder.model.config)
    return found.to(folder.model.dtype)


def eager_losses(model: nn.Module, steps: int) -> list[float]:
    optimizer, losses = adamw(model), []
    for number in range(steps):
        optimizer.zero_grad()
        loss = next_tokens(model, TOKENS[number % 2])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


def opened(
    folder: Folder,
    model: nn.Module,
    cache: Path,
    budget: int = BUDGET_BYTES,
    optimizer: torch.optim.Optimizer | None = None,
) -> Any:
    return gascompile.compile_step(
        model,
        next_tokens,
        optimizer or adamw(model),
        budget,
        TOKENS[0],
        checkpoint=folder.path,
        machine=HOST,
        cache_dir=cache,
        time_limit_s=PLANNING_S,
    )


@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_over_the_values(case: str, tmp_path: Path, cache: Path) -> None:
    dtype, make, config = CASES[case]
    folder = quantised_folder(made(dtype), tmp_path / "base", make, config)
    before = digests(folder.path)
    model = by_peft(outline(folder))
    with opened(folder, model, cache) as step:
        losses = [step(TOKENS[number % 2]).item() for number in range(4)]
        assert step.last_run.peak_bytes["cpu"] <= BUDGET_BYTES
        wires = {t.forms.wire for t in step.plan.tensors.values() if t.forms}
        assert len(wires) == 1
        places = step.state_places()
        file = next(place[0] for name, place in places.items() if "lora" in name)
        slots_bytes = os.fstat(file).st_size
        step.settle()
    eager = by_peft(folder.model)
    assert losses == eager_losses(eager, 4)
    # Adapters with their moments, and tables: nothing of the base.
    trained_bytes = sum(p.nbytes for p in eager.parameters() if p.requires_grad)
    assert slots_bytes <= 4 * trained_bytes + (64 << 10)
    assert digests(folder.path) == before
    wanted = dict(eager.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, wanted[name]), name


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    path = tmp_path_factory.mktemp("packed") / "base"
    return quantised_folder(made(torch.float32), path, gptq, GPTQ)


def test_values_are_read_saved_and_kept(packed: Folder, tmp_path: Path, cache: Path) -> None:
    """While a step is open, and in what it saves, a packed weight has its values; nothing gives it others."""
    name = "base_model.model.model.layers.1.mlp.up_proj.weight"
    wanted = packed.model.model.layers[1].mlp.up_proj.weight.detach()
    model = by_peft(outline(packed))
    with opened(packed, model, cache) as step:
        first = [step(tokens).item() for tokens in TOKENS]
        assert torch.equal(model.get_parameter(name).detach().clone(), wanted)
        state = step.state_dict()
        assert torch.equal(state["model"][name], wanted)
        eager = by_peft(copy.deepcopy(packed.model))
        eager_losses(eager, 2)
        assert step.eval(TOKENS[1]).item() == next_tokens(eager, TOKENS[1]).item()
        step.save(tmp_path / "saved")
        later = step(TOKENS[0]).item()
        step.load(tmp_path / "saved")
        assert step(TOKENS[0]).item() == later
        step.load_state_dict(state)
        assert step(TOKENS[0]).item() == later
        state["model"][name] = state["model"][name] + 1
        with pytest.raises(UnsupportedOpError, match="cannot get other values"):
            step.load_state_dict(state)
    assert torch.equal(model.get_parameter(name), wanted)
    again = by_peft(outline(packed))
    with opened(packed, again, cache) as step:
        assert [step(tokens).item() for tokens in TOKENS] == first


def test_a_plan_of_other_bytes_is_none_for_these(
    packed: Folder, tmp_path: Path, cache: Path
) -> None:
    """The same model, its base packed in another way: kept plans go by the form."""
    other = quantised_folder(
        made(torch.float32), tmp_path / "other", partial(gptq, version=2), {**GPTQ, "checkpoint_format": "gptq_v2"}
    )  # fmt: skip
    for folder in (packed, other):
        model = by_peft(outline(folder))
        with opened(folder, model, cache) as step:
            found = step(TOKENS[0]).item()
        assert found == eager_losses(by_peft(folder.model), 1)[0]


def test_what_is_packed_cannot_be_trained(packed: Folder, cache: Path) -> None:
    model = outline(packed)
    with pytest.raises(UnsupportedOpError, match=r"cannot be trained: freeze the base"):
        opened(packed, model, cache)
    frozen = by_peft(outline(packed))
    every = torch.optim.AdamW(frozen.parameters(), lr=1e-3, fused=True)
    with opened(packed, frozen, cache, 8 << 20, every) as step:
        frozen.get_parameter("base_model.model.model.layers.0.mlp.up_proj.weight").requires_grad_()
        with pytest.raises(UnsupportedOpError, match="leave it frozen"):
            step(TOKENS[0])


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_a_base_in_blocks(kind: str, tmp_path: Path, cache: Path) -> None:
    """Of the family llama the rows of queries and keys lie pair by pair."""
    config = transformers.AutoConfig.for_model(
        kind,
        vocab_size=96,
        hidden_size=128,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    whole = transformers.AutoModelForCausalLM.from_config(config)
    file = tmp_path / "model.gguf"
    write_gguf(whole, file, lambda name: "q4_0" if ".ffn_" in name else "q8_0", architecture=kind)
    with torch.device("meta"):
        empty = transformers.AutoModelForCausalLM.from_config(config)
    model = by_peft(empty)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=file.name, dtype=torch.float32
    )
    with opened(Folder(path=file, model=whole), model, cache, 8 << 20) as step:
        losses = [step(tokens).item() for tokens in TOKENS]
    assert losses == eager_losses(by_peft(loaded), 2)
