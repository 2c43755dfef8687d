"""Caches that a caller passes and goes on with, beside what eager calls leave in them."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    GPT2Config,
    GPT2LMHeadModel,
    MistralConfig,
    MistralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import gascompile
from tests.training.trials import MACHINE

PROMPT = torch.arange(3, 8).view(1, 5)
TOKENS = torch.tensor([[[9]], [[4]], [[7]]])


def gpt2() -> Any:
    sizes: dict[str, Any] = {
        "n_layer": 2,
        "n_embd": 16,
        "n_head": 2,
        "vocab_size": 32,
        "n_positions": 32,
    }
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def mistral() -> Any:
    config = MistralConfig(
        vocab_size=32,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=32,
        sliding_window=4,
    )
    return MistralForCausalLM(config)


def decoded(call: Any, model: Any, *, returns_tuple: bool, has_config: bool) -> list[Any]:
    """Return lengths of the caller's cache and logits, token by token."""
    cache = DynamicCache(config=model.config) if has_config else DynamicCache()
    options = {"return_dict": False} if returns_tuple else {}
    found: list[Any] = []
    with torch.no_grad():
        for tokens in (PROMPT, *TOKENS):
            outputs = call(tokens, past_key_values=cache, **options)
            values = outputs if returns_tuple else outputs.values()
            assert any(value is cache for value in values)
            found += [cache.get_seq_length(), outputs[0]]
    return found


@pytest.mark.parametrize("has_config", [False, True])
@pytest.mark.parametrize("returns_tuple", [False, True])
@pytest.mark.parametrize("made", [gpt2, mistral])
def test_a_given_cache_grows(
    made: Callable[[], Any], returns_tuple: bool, has_config: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = made().eval()
    how = {"returns_tuple": returns_tuple, "has_config": has_config}
    expected = decoded(copy.deepcopy(model), model, **how)
    with gascompile.compile(model, "8MiB", machine=MACHINE, cache_dir=tmp_path) as compiled:
        found = decoded(compiled, model, **how)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_given_cache_of_encoder_and_decoder_grows(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    model: Any = T5ForConditionalGeneration(config).eval()
    eager = copy.deepcopy(model)
    with gascompile.compile(model, "8MiB", machine=MACHINE, cache_dir=tmp_path) as compiled:
        found = []
        for call in (eager, compiled):
            cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
            with torch.no_grad():
                outputs = call(PROMPT, decoder_input_ids=TOKENS[0], past_key_values=cache)
            assert outputs.past_key_values is cache
            found.append((cache.get_seq_length(), outputs.logits))
    assert found[0][0] == found[1][0] == 1
    torch.testing.assert_close(found[1][1], found[0][1])


def test_a_cache_that_does_not_come_back_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = gpt2().eval()
    compiled = gascompile.compile(model, "8MiB", machine=MACHINE, cache_dir=tmp_path)
    with compiled, caplog.at_level(logging.WARNING, "gascompile"), torch.no_grad():
        compiled(PROMPT, past_key_values=DynamicCache(), use_cache=False)
    assert "Pass use_cache=True" in caplog.text
