"""``generate`` of compiled language models: what transformers' own loop gives in every mode, by a few plans."""

from __future__ import annotations

import copy
import logging
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache

import gascompile
from gascompile.core.errors import (
    CaptureError,
    InfeasiblePlanError,
    PlanMismatchError,
    UnsupportedOpError,
)
from gascompile.integrations import fixed_layer
from gascompile.integrations.generation import Generator
from tests.allocator import peak_growth_bytes
from tests.integrations import generation_table as table
from tests.integrations.generation_table import DECODERS, HELD, MODES, OTHERS, made, past_of, text

Compiled = Callable[..., Any]


def both(model: Any, it: Any, ids: torch.Tensor, **options: Any) -> tuple[Any, Any]:
    """What eager gives, and what the compiled model gives for the same random numbers."""
    options = {"max_new_tokens": 6, "do_sample": False} | options
    results = []
    for one in (model, it):
        torch.manual_seed(3)
        results.append(one.generate(ids.clone(), **options))
    return results[0], results[1]


_FAMILIES = {
    "Bloom": ["greedy"],
    "Gemma3": ["greedy", "assistant"],
    "Llama": [mode for mode in MODES if mode not in {"scores", "negative prompt"}],
    "T5": ["greedy"],
}
"""Families and modes that are tried each time; all of them with ``GASCOMPILE_FAMILIES=all``, or those named there."""


_REFUSED = {("Bart", "negative prompt")}
"""Two streams of an encoder-decoder, of other sizes than one another."""


_OTHER_STATES = {"Mamba"}
"""Families whose past is no keys and values."""


def _asked() -> dict[str, list[str]]:
    asked = os.environ.get("GASCOMPILE_FAMILIES", "")
    names = [*DECODERS, *OTHERS] if asked == "all" else asked.split(",")
    return {name: list(MODES) for name in names} if asked else _FAMILIES


@pytest.mark.parametrize("family", sorted(_asked()))
def test_generate_is_transformers_own(family: str, compiled: Compiled) -> None:
    model = table.made(family)
    it = compiled(model)
    inputs = table.prompt(family)
    for mode in _asked()[family]:
        try:
            wanted = table.generated(model, inputs, mode)
        except (ValueError, NotImplementedError, RuntimeError, TypeError):
            # What transformers itself cannot do; none of what is tried each time.
            assert mode not in _FAMILIES.get(family, ())
            continue
        if family in _OTHER_STATES:
            with pytest.raises(UnsupportedOpError, match="use_cache=False"):
                table.generated(it, inputs, mode)
            continue
        if (family, mode) in _REFUSED:
            with pytest.raises(CaptureError):
                table.generated(it, inputs, mode)
            continue
        assert table.same(table.generated(it, inputs, mode), wanted), mode


def test_attention_that_is_returned_is_as_long_as_the_text(compiled: Compiled) -> None:
    model = made("Llama")
    model.set_attn_implementation("eager")
    full = {"return_dict_in_generate": True, "output_attentions": True, "max_new_tokens": 2}
    wanted, found = both(model, compiled(model), text(1, 4), **full)
    for one, other in zip(found.attentions, wanted.attentions, strict=True):
        torch.testing.assert_close(one, other)


def test_rows_of_other_lengths_are_padded_on_the_left(compiled: Compiled) -> None:
    model = made("Mistral")
    it = compiled(model)
    ids = text(3, 9)
    mask = torch.ones_like(ids)
    for row, missing in enumerate((0, 4, 8)):
        ids[row, :missing], mask[row, :missing] = 0, 0
    wanted, found = both(model, it, ids, attention_mask=mask)
    assert torch.equal(found, wanted)


def test_long_prompts_are_read_in_pieces(compiled: Compiled) -> None:
    """Longer than a piece and than the smallest cache; and one token after whole pieces."""
    model = made("Llama")
    it = compiled(model)
    for length in (300, 257, 129):
        wanted, found = both(model, it, text(1, length), max_new_tokens=2)
        assert torch.equal(found, wanted), length
    assert len(it._gascompile.units) <= 6, "two or three for each size of the cache"


def test_the_cache_is_part_of_the_budget(
    compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that a whole ``generate`` takes: the arena, the cache, and what torch has handed out to plans and loop."""
    mapped: list[int] = []

    def map_memory(file: int, size_bytes: int, **options: Any) -> mmap.mmap:
        mapped.append(size_bytes)
        return mmap.mmap(file, size_bytes, **options)

    flags = {name: getattr(mmap, name) for name in ("MAP_PRIVATE", "MAP_ANONYMOUS")}
    model, least = made("Llama"), 240_000
    it = compiled(model, f"{least}")
    wanted, found = both(model, it, text(1, 100))
    assert torch.equal(found, wanted)
    monkeypatch.setattr(fixed_layer, "mmap", SimpleNamespace(mmap=map_memory, **flags))
    taken = peak_growth_bytes(lambda: it.generate(text(1, 100), max_new_tokens=3, do_sample=False))
    assert taken + sum(mapped) + it.plan.arena_bytes["cpu"] <= least
    assert sum(mapped) >= 2 * 2 * 2 * 256 * 8 * 4
    with pytest.raises(InfeasiblePlanError):
        it.generate(text(1, 100), max_new_tokens=1000, do_sample=False)


def test_prompts_tokens_and_drafts_share_an_arena(compiled: Compiled) -> None:
    model = made("Llama")
    it = compiled(model)
    sessions, moved = set(), []

    class Watch(table.Heard):
        def put(self, value: torch.Tensor) -> None:
            if it._gascompile.units:
                sessions.add(it._gascompile.session)
                moved.append(sum(it.last_run.link_bytes.values()))

    ids = text(1, 7).repeat(1, 2)
    options = {"max_new_tokens": 7, "do_sample": False, "prompt_lookup_num_tokens": 3}
    wanted = model.generate(ids, **options)
    assert torch.equal(it.generate(ids, streamer=Watch(), **options), wanted)
    assert len(sessions) == 1
    assert not any(moved), "drafts are verified with the weights that the prompt was read with"
    reports = [unit.last_run for unit in it._gascompile.units if unit.last_run is not None]
    assert sum(sum(report.link_bytes.values()) for report in reports) > 0


def test_later_tokens_go_on_from_the_cache(compiled: Compiled) -> None:
    model = made("Llama")
    it = compiled(model)
    ids = text(1, 6)
    wanted = model.generate(ids, max_new_tokens=8, do_sample=False)
    first = it.generate(ids, max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
    kept = copy.deepcopy(past_of(first))
    for past in (past_of(first), kept):
        found = it.generate(first.sequences, max_new_tokens=4, do_sample=False, **{HELD: past})
        assert torch.equal(found, wanted)
    with pytest.raises(UnsupportedOpError, match="compiled models"):
        model.generate(wanted, max_new_tokens=2, do_sample=False, **{HELD: copy.deepcopy(kept)})
    longer = torch.cat((wanted, text(1, 245)), 1)
    found = it.generate(longer, max_new_tokens=2, do_sample=False, **{HELD: kept})
    assert torch.equal(found, model.generate(longer, max_new_tokens=2, do_sample=False))
    kept.reset()
    found = it.generate(ids, max_new_tokens=8, do_sample=False, **{HELD: kept})
    assert torch.equal(found, wanted)


def test_a_loop_of_ones_own(compiled: Compiled) -> None:
    """The cache of a ``generate`` goes on in calls by place and by name, whatever form their results have."""
    model = made("Llama")
    it = compiled(model)
    ids = text(1, 6)
    wanted = model.generate(ids, max_new_tokens=5, do_sample=False)
    first = it.generate(ids, max_new_tokens=2, do_sample=False, return_dict_in_generate=True)
    tokens, cache = first.sequences, past_of(first)
    with torch.no_grad():
        for args, kwargs in (
            ((None, None, cache), {}),
            ((None, None, cache), {"return_dict": False}),
            ((), {HELD: cache}),
        ):
            result = it(tokens[:, -1:], *args, **kwargs)
            assert (result[1] if isinstance(result, tuple) else past_of(result)) is cache
            tokens = torch.cat((tokens, result[0][:, -1:].argmax(-1)), 1)
    assert torch.equal(tokens, wanted)


def test_a_cache_of_transformers_own_goes_on_as_it_is(compiled: Compiled) -> None:
    """One that is longer than its window, and one that was cropped, whose memory is laid out otherwise."""
    for name, num_removed in (("Mistral", 0), ("Llama", 3)):
        model = made(name)
        it = compiled(model)
        past = DynamicCache(config=model.config)
        with torch.no_grad():
            model(text(1, 12), **{HELD: past})
            if num_removed:
                past.crop(-num_removed)
            for _ in range(2):
                token = text(1, 1, seed=num_removed)
                wanted = model(token, **{HELD: copy.deepcopy(past)})
                found = it(token, **{HELD: copy.deepcopy(past)})
                torch.testing.assert_close(found.logits, wanted.logits)
                past = past_of(found)
                assert past.get_seq_length() == past_of(wanted).get_seq_length()


def test_code_that_needs_a_cache_that_grows_gets_one(compiled: Compiled) -> None:
    """GPT-Neo's takes the length of the keys for that of the text: with a fixed one it would be silently wrong."""
    model = made("GPTNeo")
    ids = text(1, 5)
    wanted, found = both(model, compiled(model), ids, max_new_tokens=3)
    assert torch.equal(found, wanted)
    with pytest.raises(UnsupportedOpError, match="does not say"):
        Generator(model, "8MiB", max_length=32, machine="cpu-nvme")


def test_states_of_another_kind_are_left_out(compiled: Compiled) -> None:
    model = made("Mamba")
    ids = text(1, 5)
    for how in ({"use_cache": False}, {}):
        wanted, found = both(model, compiled(model), ids, max_new_tokens=2, **how)
        assert torch.equal(found, wanted)


def test_plans_are_found_again(compiled: Compiled, caplog: pytest.LogCaptureFixture) -> None:
    """A second compile of the same model captures nothing, whatever the length of the text."""
    model = made("Llama")
    wanted, found = both(model, compiled(model), text(1, 9))
    assert torch.equal(found, wanted)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        wanted, found = both(model, compiled(model), text(1, 14))
    assert torch.equal(found, wanted)
    assert caplog.text.count("from the cache in") == 2
    assert "captured and planned" not in caplog.text


def test_a_plan_for_given_inputs_alone_says_so(tmp_path: Path) -> None:
    model = made("Llama")
    with (
        gascompile.compile(
            model,
            "8MiB",
            example_inputs={"input_ids": text(1, 4)},
            machine="cpu-nvme",
            cache_dir=tmp_path,
        ) as it,
        pytest.raises(PlanMismatchError, match="compile the model without example_inputs"),
    ):
        it.generate(text(1, 5), max_new_tokens=2)


def test_hidden_states_of_a_model_that_never_gave_any(compiled: Compiled) -> None:
    """The library sets its hooks at the first call that asks: they are there before a plan, and once each."""
    model, other = made("Llama"), made("Llama")
    other.load_state_dict(model.state_dict())
    it = compiled(model)
    for use_cache in (True, False):
        full: dict[str, Any] = {"return_dict_in_generate": True, "output_hidden_states": True}
        full |= {"max_new_tokens": 3, "do_sample": False, "use_cache": use_cache}
        found, wanted = (one.generate(text(2, 5), **full) for one in (it, other))
        assert torch.equal(found.sequences, wanted.sequences)
        for one, expected in zip(found.hidden_states, wanted.hidden_states, strict=True):
            for state, of in zip(one, expected, strict=True):
                torch.testing.assert_close(state, of)
    assert it(text(2, 5), use_cache=False).hidden_states is None


def test_caches_of_a_fixed_size_that_are_not_ours_are_refused(compiled: Compiled) -> None:
    """What attention returns over one is as long as the cache, not the text; and T5 makes no cache of ours."""
    model = made("Llama")
    it, static = compiled(model), StaticCache(config=model.config, max_cache_len=16)
    with pytest.raises(UnsupportedOpError, match=f"leave out {HELD}="):
        it.generate(text(1, 4), max_new_tokens=2, **{HELD: static})
    with pytest.raises(UnsupportedOpError, match="StaticCache"):
        it.generate(
            text(1, 4), max_new_tokens=2, output_attentions=True, cache_implementation="static"
        )
    it = compiled(made("T5"))
    with pytest.raises(UnsupportedOpError, match="StaticCache"):
        it.generate(text(1, 4), max_new_tokens=2, cache_implementation="static")


def test_layers_that_look_ahead_see_what_they_do_with_a_cache_that_grows(
    compiled: Compiled,
) -> None:
    model = table.made("Gemma3")
    model.config.is_causal = False
    options = {"output_scores": True, "return_dict_in_generate": True, "max_new_tokens": 3}
    wanted, found = both(model, compiled(model), torch.arange(2, 24).view(2, 11), **options)
    torch.testing.assert_close(found.scores, wanted.scores, atol=1e-4, rtol=1e-4)
