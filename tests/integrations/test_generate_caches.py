"""Caches that ``generate`` of a compiled model returns, and models whose rotary tables follow the text's length."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from gascompile.core.errors import CaptureError, PlanMismatchError
from tests.integrations.generation_table import HELD, made, past_of, text
from tests.integrations.language_models import SIZES, lively

Compiled = Callable[..., Any]


def test_rows_of_a_cache_are_chosen_repeated_and_given(compiled: Compiled) -> None:
    model = made("Llama")
    calls = (text(1, 1), text(3, 4), text(2, 1))

    def logits_of(one: Any) -> list[torch.Tensor]:
        cache = past_of(
            one.generate(
                text(1, 6), max_new_tokens=2, do_sample=False, return_dict_in_generate=True
            )
        )
        given = [past[0].clone() for past in cache]
        with torch.no_grad():
            results = [one(calls[0], **{HELD: cache}).logits]
            cache.batch_repeat_interleave(3)
            results.append(one(calls[1], **{HELD: cache}).logits)
            cache.batch_select_indices(torch.tensor([2, 0]))
            results.append(one(calls[2], **{HELD: cache}).logits)
        return [*given, *results]

    it = compiled(model)
    for found, wanted in zip(logits_of(it), logits_of(model), strict=True):
        torch.testing.assert_close(found, wanted)


def test_calls_that_a_cache_is_not_for_are_refused(compiled: Compiled) -> None:
    it = compiled(made("Llama"))
    first = it.generate(text(1, 6), max_new_tokens=2, return_dict_in_generate=True)
    with pytest.raises(PlanMismatchError, match="3 rows and the cache holds 1"):
        it(text(3, 1), **{HELD: past_of(first)})
    with pytest.raises(PlanMismatchError, match="a token at least"):
        it(text(1, 1)[:, :0], **{HELD: past_of(first)})


@pytest.mark.parametrize("keep", [torch.tensor([1, 3]), torch.tensor([-1]), 2, 0, -2])
def test_logits_of_the_tokens_that_are_asked_for(compiled: Compiled, keep: Any) -> None:
    model = made("Llama")
    found = []
    for one in (model, compiled(model)):
        first = one.generate(
            text(1, 6), max_new_tokens=2, do_sample=False, return_dict_in_generate=True
        )
        with torch.no_grad():
            call = {HELD: past_of(first), "logits_to_keep": keep}
            found.append(one(text(1, 5), **call).logits)
    torch.testing.assert_close(found[1], found[0])


def test_a_cache_filled_in_inference_mode_goes_on_outside_of_it(compiled: Compiled) -> None:
    model = made("Llama")
    it = compiled(model)
    wanted = model.generate(text(1, 6), max_new_tokens=6, do_sample=False)
    with torch.inference_mode():
        first = it.generate(
            text(1, 6), max_new_tokens=3, do_sample=False, return_dict_in_generate=True
        )
    rest = it.generate(wanted[:, :9], max_new_tokens=3, do_sample=False, **{HELD: past_of(first)})
    assert torch.equal(rest, wanted)


def _phi(**parameters: Any) -> Any:
    """Return a model that changes its rotary table with the length of the text."""
    config = transformers.Phi3Config(
        vocab_size=101, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, original_max_position_embeddings=32, pad_token_id=0,
        bos_token_id=None, eos_token_id=None, rope_parameters=parameters | {"rope_theta": 10_000.0},
    )  # fmt: skip
    return lively(transformers.Phi3ForCausalLM(config).eval())


_LONG_ROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 8,
    "long_factor": [4.0 + i for i in range(8)],
    "original_max_position_embeddings": 32,
}


def test_rotary_tables_that_follow_the_text_s_length(compiled: Compiled) -> None:
    """At the first call of all, which sets the table for long texts, and on either side of the length of training."""
    model = _phi(**_LONG_ROPE)
    it, eager = compiled(model), copy.deepcopy(model)
    for length, more in ((20, 3), (29, 6), (60, 3), (10, 3)):
        ids = text(1, length)
        wanted = eager.generate(ids, max_new_tokens=more, do_sample=False)
        assert torch.equal(it.generate(ids, max_new_tokens=more, do_sample=False), wanted)
    with torch.no_grad():
        for length in (20, 40, 12):
            ids = text(2, length)
            torch.testing.assert_close(it(ids).logits, eager(ids).logits)


def test_rotary_tables_that_are_chosen_by_values_are_refused(compiled: Compiled) -> None:
    parameters = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
    config = transformers.LlamaConfig(**SIZES | {"rope_parameters": parameters})
    it = compiled(transformers.LlamaForCausalLM(config).eval())
    with pytest.raises(CaptureError, match="max_seq_len_cached"):
        it.generate(text(1, 6), max_new_tokens=2)
