"""``generate`` of compiled language models: what transformers' own loop gives in every mode, by a few plans."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import gascompile
from gascompile.core.errors import PlanMismatchError, UnsupportedOpError
from gascompile.integrations.generation import Generator

_SMALL: dict[str, Any] = {
    "vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "eos_token_id": None, "pad_token_id": 0,
    "bos_token_id": 1, "dtype": "float32", "initializer_range": 0.2,
}  # fmt: skip
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("Mistral", {"sliding_window": 8}),
    "gemma3": ("Gemma3", {"head_dim": 8, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}),
    "gpt2": ("GPT2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512}),
    "mixtral": ("Mixtral", {"num_local_experts": 2, "sliding_window": None}),
}  # fmt: skip
_OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "neo": (
        "GPTNeo",
        {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 4},
    ),
    "mamba": ("Mamba", {"state_size": 4}),
}  # fmt: skip
_NAMES = {"gemma3": "Gemma3TextConfig"}
Compiled = Callable[..., Any]


def made(family: str) -> Any:
    torch.manual_seed(0)
    name, more = (_FAMILIES | _OTHERS)[family]
    library: Any = transformers
    config = getattr(library, _NAMES.get(family, f"{name}Config"))(**_SMALL | more)
    kind = {"gpt2": "GPT2LMHeadModel"}.get(family, f"{name}ForCausalLM")
    return getattr(library, kind)(config).eval()


@pytest.fixture
def compiled(tmp_path: Path) -> Iterator[Compiled]:
    found: list[Any] = []

    def compile_it(model: Any, budget: str = "8MiB") -> Any:
        found.append(
            gascompile.compile(model, budget, machine="cpu-nvme", cache_dir=tmp_path / "cache")
        )
        return found[-1]

    yield compile_it
    for one in found:
        one.close()


def both(model: Any, it: Any, ids: torch.Tensor, **options: Any) -> tuple[Any, Any]:
    """What eager gives, and what the compiled model gives for the same random numbers."""
    options = {"max_new_tokens": 6, "do_sample": False} | options
    results = []
    for one in (model, it):
        torch.manual_seed(3)
        results.append(one.generate(ids.clone(), **options))
    return results[0], results[1]


def text(*shape: int) -> torch.Tensor:
    return torch.randint(1, 60, shape, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("family", sorted(_FAMILIES))
def test_families_generate_as_eager_does(family: str, compiled: Compiled) -> None:
    model = made(family)
    it = compiled(model)
    for length in (5, 140):
        wanted, found = both(model, it, text(1, length), max_new_tokens=3)
        assert torch.equal(found, wanted)
    assert len(it._gascompile.units) == 2, "a plan for prompts and one for each further token"


def test_modes_of_the_loop(compiled: Compiled) -> None:
    model = made("llama")
    it = compiled(model)
    ids = text(1, 7)
    banned = transformers.LogitsProcessorList([transformers.NoRepeatNGramLogitsProcessor(1)])
    stop = transformers.StoppingCriteriaList(
        [lambda ids, scores: torch.full((ids.shape[0],), ids.shape[1] >= 10)]
    )
    for options in (
        {"do_sample": True, "top_k": 5, "temperature": 0.7},
        {"do_sample": True, "top_p": 0.8, "num_return_sequences": 3},
        {"num_beams": 3},
        {"num_beams": 3, "do_sample": True, "length_penalty": 0.5},
        {"logits_processor": banned, "repetition_penalty": 1.3},
        {"stopping_criteria": stop},
        {"cache_implementation": "dynamic", "max_new_tokens": 2},
    ):
        wanted, found = both(model, it, ids, **options)
        assert torch.equal(found, wanted), options
    full = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    wanted, found = both(model, it, ids, **full)
    assert torch.equal(found.sequences, wanted.sequences)
    for one, other in zip(found.logits, wanted.logits, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_attention_that_is_returned_is_as_long_as_the_text(compiled: Compiled) -> None:
    model = made("llama")
    model.set_attn_implementation("eager")
    full = {"return_dict_in_generate": True, "output_attentions": True, "max_new_tokens": 2}
    wanted, found = both(model, compiled(model), text(1, 4), **full)
    for one, other in zip(found.attentions, wanted.attentions, strict=True):
        torch.testing.assert_close(one, other)


def test_rows_of_other_lengths_are_padded_on_the_left(compiled: Compiled) -> None:
    model = made("mistral")
    it = compiled(model)
    ids = text(3, 9)
    mask = torch.ones_like(ids)
    for row, missing in enumerate((0, 4, 8)):
        ids[row, :missing], mask[row, :missing] = 0, 0
    wanted, found = both(model, it, ids, attention_mask=mask)
    assert torch.equal(found, wanted)


def test_long_prompts_are_read_in_pieces(compiled: Compiled) -> None:
    """Longer than a piece and than the smallest cache; and one token after whole pieces."""
    model = made("llama")
    it = compiled(model)
    for length in (300, 257, 129):
        wanted, found = both(model, it, text(1, length), max_new_tokens=2)
        assert torch.equal(found, wanted), length
    assert len(it._gascompile.units) <= 6, "two or three for each size of the cache"


def test_a_small_budget_reads_smaller_pieces(
    compiled: Compiled, caplog: pytest.LogCaptureFixture
) -> None:
    model = made("llama")
    least = 220 << 10
    it = compiled(model, f"{least}")
    with caplog.at_level(logging.INFO):
        wanted, found = both(model, it, text(1, 100))
    assert torch.equal(found, wanted)
    assert it.last_run.peak_bytes["cpu"] <= least


def test_later_tokens_go_on_from_the_cache(compiled: Compiled) -> None:
    model = made("llama")
    it = compiled(model)
    ids = text(1, 6)
    wanted = model.generate(ids, max_new_tokens=8, do_sample=False)
    first = it.generate(ids, max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
    kept = copy.deepcopy(first.past_key_values)
    for past in (first.past_key_values, kept):
        found = it.generate(
            first.sequences, max_new_tokens=4, do_sample=False, past_key_values=past
        )
        assert torch.equal(found, wanted)
    with pytest.raises(ValueError, match="at most 256 tokens"):
        it.generate(
            torch.cat((wanted, text(1, 245)), 1),
            max_new_tokens=2,
            do_sample=False,
            past_key_values=kept,
        )
    with pytest.raises(UnsupportedOpError, match="compiled models"):
        model.generate(
            wanted, max_new_tokens=2, do_sample=False, past_key_values=copy.deepcopy(kept)
        )
    kept.reset()
    found = it.generate(ids, max_new_tokens=8, do_sample=False, past_key_values=kept)
    assert torch.equal(found, wanted)


def test_a_loop_of_ones_own(compiled: Compiled) -> None:
    """The cache of a ``generate`` goes on in calls by place and by name, whatever form their results have."""
    model = made("llama")
    it = compiled(model)
    ids = text(1, 6)
    wanted = model.generate(ids, max_new_tokens=5, do_sample=False)
    first = it.generate(ids, max_new_tokens=2, do_sample=False, return_dict_in_generate=True)
    tokens, cache = first.sequences, first.past_key_values
    with torch.no_grad():
        for args, kwargs in (
            ((None, None, cache), {}),
            ((None, None, cache), {"return_dict": False}),
            ((), {"past_key_values": cache}),
        ):
            result = it(tokens[:, -1:], *args, **kwargs)
            assert (result[1] if isinstance(result, tuple) else result.past_key_values) is cache
            tokens = torch.cat((tokens, result[0][:, -1:].argmax(-1)), 1)
    assert torch.equal(tokens, wanted)


def test_drafts_and_encoder_decoders_keep_their_own_cache(compiled: Compiled) -> None:
    model = made("llama")
    it = compiled(model)
    ids = text(1, 6).repeat(1, 2)
    wanted, found = both(model, it, ids, prompt_lookup_num_tokens=2, max_new_tokens=2)
    assert torch.equal(found, wanted)


def test_code_that_needs_a_cache_that_grows_gets_one(compiled: Compiled) -> None:
    """GPT-Neo's takes the length of the keys for that of the text: with a fixed one it would be silently wrong."""
    model = made("neo")
    ids = text(1, 5)
    wanted, found = both(model, compiled(model), ids, max_new_tokens=3)
    assert torch.equal(found, wanted)
    with pytest.raises(UnsupportedOpError, match="does not say"):
        Generator(model, "8MiB", max_length=32, machine="cpu-nvme")


def test_states_of_another_kind_are_refused(compiled: Compiled) -> None:
    model = made("mamba")
    ids = text(1, 5)
    wanted, found = both(model, compiled(model), ids, use_cache=False, max_new_tokens=2)
    assert torch.equal(found, wanted)
    with pytest.raises(UnsupportedOpError, match="use_cache=False"):
        compiled(model).generate(ids, max_new_tokens=2, do_sample=False)


def test_plans_are_found_again(compiled: Compiled, caplog: pytest.LogCaptureFixture) -> None:
    """A second compile of the same model captures nothing, whatever the length of the text."""
    model = made("llama")
    wanted, found = both(model, compiled(model), text(1, 9))
    assert torch.equal(found, wanted)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        wanted, found = both(model, compiled(model), text(1, 14))
    assert torch.equal(found, wanted)
    assert caplog.text.count("from the cache in") == 2
    assert "captured and planned" not in caplog.text


def test_a_plan_for_given_inputs_alone_says_so(tmp_path: Path) -> None:
    model = made("llama")
    with (
        gascompile.compile(
            model,
            "8MiB",
            example_inputs={"input_ids": text(1, 4)},
            machine="cpu-nvme",
            cache_dir=tmp_path,
        ) as it,
        pytest.raises(PlanMismatchError),
    ):
        it.generate(text(1, 5), max_new_tokens=2)
