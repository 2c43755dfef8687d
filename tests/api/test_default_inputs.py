"""Default inputs of a model of transformers: no more tokens than it has positions, and a log line says so."""

from __future__ import annotations

import logging

import pytest
import torch
import transformers

from gascompile.api.sources import default_inputs


@pytest.mark.parametrize(("tokens", "made"), [(16, 16), (32, 32), (100_000, 32)])
def test_tokens_beyond_a_models_positions_are_left_out_and_said(
    caplog: pytest.LogCaptureFixture, tokens: int, made: int
) -> None:
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16, n_positions=32)
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config)
    with caplog.at_level(logging.WARNING, "gascompile"):
        inputs = default_inputs(model, batch=2, tokens=tokens)
    assert inputs["input_ids"].shape == (2, made)
    said = f"has 32 positions: 32 tokens in place of {tokens}"
    assert (said in caplog.text) is (made < tokens)
