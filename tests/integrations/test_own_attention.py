"""Attention functions of the program: told of where a trace gives them a mask that calls do not."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import gascompile
from tests.zoo import eager

transformers = pytest.importorskip("transformers")
LOGGER = "gascompile"


def by_hand(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **rest: Any
) -> tuple[Any, Any]:
    """Attend to everything where there is no mask, as if nothing else could be meant by that."""
    weights = query @ key.transpose(2, 3) * query.shape[-1] ** -0.5
    if attention_mask is not None:
        weights = weights.masked_fill(~attention_mask, float("-inf"))
    return (weights.softmax(-1) @ value).transpose(1, 2).contiguous(), weights


class ByHand:
    def attend(self, *args: Any, **rest: Any) -> tuple[Any, Any]:
        return by_hand(*args, **rest)

    __call__ = attend


def own_mask(*args: Any, **rest: Any) -> Any:
    from transformers.masking_utils import sdpa_mask

    return sdpa_mask(*args, **rest)


@pytest.fixture
def model(request: pytest.FixtureRequest) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=50, use_cache=False,
    )  # fmt: skip
    config._attn_implementation = request.param
    return LlamaForCausalLM(config).eval()


@pytest.fixture(autouse=True)
def registered() -> Any:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    tables = (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS)
    before = [dict(table._global_mapping) for table in tables]
    ALL_ATTENTION_FUNCTIONS.register("masked_by_hand", by_hand)
    ALL_MASK_ATTENTION_FUNCTIONS.register("masked_by_hand", sdpa_mask)
    ALL_ATTENTION_FUNCTIONS.register("partly", partial(by_hand, by="hand"))
    ALL_MASK_ATTENTION_FUNCTIONS.register("partly", sdpa_mask)
    ALL_ATTENTION_FUNCTIONS.register("of_object", ByHand())
    ALL_MASK_ATTENTION_FUNCTIONS.register("of_object", partial(sdpa_mask))
    ALL_ATTENTION_FUNCTIONS.register("of_method", ByHand().attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register("of_method", own_mask)
    ALL_ATTENTION_FUNCTIONS.register("by_hand", by_hand)
    yield
    for table, known in zip(tables, before, strict=True):
        table._global_mapping.clear()
        table._global_mapping.update(known)


@pytest.mark.parametrize(
    "model", ["masked_by_hand", "partly", "of_object", "of_method"], indirect=True
)
def test_a_mask_that_only_a_trace_gives_is_told_of(
    model: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ids = torch.arange(12)[None]
    with gascompile.compile(model, "64MiB", (ids,), cache_dir=tmp_path) as compiled:
        assert not torch.allclose(compiled(ids).logits, model(ids).logits)  # transformers' own
    told = [r.getMessage() for r in caplog.records if r.name == LOGGER]
    name = model.config._attn_implementation
    assert sum(f"the attention '{name}'" in line for line in told) == 1


@pytest.mark.parametrize("model", ["masked_by_hand"], indirect=True)
def test_training_tells_of_it_once(
    model: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ids = torch.arange(12)[None]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = model(batch, labels=batch).loss
        return found

    gascompile.compile_step(model, loss, optimizer, "64MiB", ids, cache_dir=tmp_path).close()
    told = [r.getMessage() for r in caplog.records if r.name == LOGGER]
    assert sum("'masked_by_hand'" in line for line in told) == 1


@pytest.mark.parametrize("model", ["sdpa", "eager", "by_hand"], indirect=True)
def test_others_are_eagers_without_a_word(
    model: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told = {"input_ids": torch.arange(12)[None]}
    with gascompile.compile(model, "64MiB", told, cache_dir=tmp_path, fuse="off") as compiled:
        torch.testing.assert_close(compiled(**told).logits, eager(model, told)[0])
    assert not [r for r in caplog.records if "attention" in r.getMessage()]
