"""The mask of one token that is made at once is the library's, or none where layers may look at others."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import transformers
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    create_masks_for_generate,
    sdpa_mask,
)

from benchmarks.anonymous import anonymous_bytes
from gascompile.integrations.fixed_cache import FixedCache, cache_shapes
from gascompile.integrations.fixed_layer import FixedLayer
from gascompile.integrations.pieces import token_mask
from tests.integrations.generation_table import HELD

NUM_PAST = 9
SIZES: dict[str, Any] = {
    "vocab_size": 20,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def model_of(kind: str, **options: Any) -> Any:
    library: Any = transformers
    config = getattr(library, f"{kind}Config")(**SIZES | options)
    return getattr(library, f"{kind}ForCausalLM")(config).eval()


def call_of(model: Any, rows: int) -> tuple[dict[str, Any], torch.Tensor, int]:
    """Return a call of one token after some others, the mask of its tokens, and how many it looks at."""
    cache = FixedCache.empty(cache_shapes(model), 256, rows)
    cache.advance(NUM_PAST)
    mask = torch.ones(rows, NUM_PAST + 1, dtype=torch.long)
    mask[0, :3] = 0
    positions = torch.full((rows, 1), NUM_PAST)
    return {HELD: cache, "position_ids": positions}, mask, cache.look(1)


@pytest.mark.parametrize("rows", [1, 3])
def test_it_is_the_library_s(rows: int) -> None:
    model = model_of("Llama")
    call, mask, window = call_of(model, rows)
    found = token_mask(model, call, mask, window)
    wanted = create_masks_for_generate(
        config=model.config,
        inputs_embeds=torch.empty(rows, 1, 0),
        attention_mask=mask,
        **{HELD: call[HELD]},
        position_ids=call["position_ids"],
    )
    assert found is not None
    assert torch.equal(found, wanted)


def test_layers_that_look_at_less_make_their_own() -> None:
    model = model_of("Mistral", sliding_window=4)
    call, mask, window = call_of(model, 1)
    assert token_mask(model, call, mask, window) is None


def test_what_else_masks_may_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("Llama")
    call, mask, window = call_of(model, 1)
    assert token_mask(model, call, mask, window) is not None
    assert token_mask(model, call | {"token_type_ids": mask}, mask, window) is None
    assert token_mask(model, call, mask[:, 1:], window) is None
    monkeypatch.setattr(model.config, "_attn_implementation", "eager")
    assert token_mask(model, call, mask, window) is None


def test_a_function_of_ones_own_is_asked() -> None:
    model = model_of("Llama")
    call, mask, window = call_of(model, 1)
    ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] = partial(sdpa_mask)
    try:
        assert token_mask(model, call, mask, window) is None
    finally:
        del ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    assert token_mask(model, call, mask, window) is not None


def test_a_large_cache_takes_the_memory_of_what_is_written() -> None:
    like = [(torch.empty(1, 4, 2, 32), torch.empty(1, 4, 2, 32, dtype=torch.bfloat16))]
    before_bytes = anonymous_bytes()
    cache = FixedCache.empty(like, 1 << 18, 2)
    assert cache.num_bytes > 300 << 20
    layer = cache.layers[0]
    assert isinstance(layer, FixedLayer)
    layer.keys[:, :, :10] = 1.0
    assert anonymous_bytes() - before_bytes < 32 << 20
    assert layer.keys.dtype == torch.float32
    assert layer.values.dtype == torch.bfloat16
    assert layer.keys[1, 3, 9].eq(1.0).all()
    assert layer.keys[1, 3, 10:].eq(0.0).all()
    assert layer.values[0, 0, :100].eq(0.0).all()
