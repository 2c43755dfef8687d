"""Models whose layers keep a past that is no keys and values: states of recurrences and of convolutions."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import gascompile
from gascompile.core.errors import CaptureError
from gascompile.integrations.huggingface import returns_past


def _mamba() -> Any:
    config = transformers.MambaConfig(
        hidden_size=32, num_hidden_layers=2, vocab_size=64, state_size=4
    )
    return transformers.MambaForCausalLM(config)


def _lfm2() -> Any:
    config = transformers.Lfm2Config(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        layer_types=["conv", "full_attention", "conv"],
    )
    return transformers.Lfm2ForCausalLM(config)


@pytest.fixture(params=[_mamba, _lfm2], ids=["recurrence", "convolutions and attention"])
def model(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(3)
    return request.param().eval()


IDS = torch.tensor([[5, 1, 40, 7, 2]])


def test_the_error_says_what_to_pass_and_that_helps(model: Any) -> None:
    with pytest.raises(CaptureError, match="use_cache=False"):
        gascompile.compile(model, "16MiB", (IDS,))
    inputs = {"input_ids": IDS, "use_cache": False}
    with torch.no_grad(), gascompile.compile(model, "16MiB", inputs) as compiled:
        torch.testing.assert_close(compiled(**inputs).logits, model(**inputs).logits)


@pytest.mark.parametrize("beams", [1, 2])
def test_texts_are_those_of_eager(model: Any, beams: int, caplog: pytest.LogCaptureFixture) -> None:
    how: dict[str, Any] = {
        "max_new_tokens": 4,
        "num_beams": beams,
        "do_sample": False,
        "pad_token_id": 0,
    }
    wanted = model.generate(IDS, **how)
    with (
        caplog.at_level(logging.WARNING, "gascompile"),
        gascompile.compile(model, "16MiB") as compiled,
    ):
        assert torch.equal(compiled.generate(IDS, **how), wanted)
    assert model.config.use_cache


def test_a_folder_runs_as_its_owner_would_have_to_run_it(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "model")
    with torch.no_grad(), gascompile.compile(tmp_path / "model", "16MiB") as compiled:
        assert not compiled.config.use_cache
        found = compiled(input_ids=IDS).logits
        torch.testing.assert_close(found, model(input_ids=IDS, use_cache=False).logits)


def test_decoders_with_keys_and_values_return_them() -> None:
    assert returns_past(transformers.GPT2Config())
    assert returns_past(transformers.BertConfig())
    assert returns_past(transformers.MistralConfig(sliding_window=4))
    assert not returns_past(transformers.MambaConfig())
