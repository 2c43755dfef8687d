"""Buffers that no checkpoint holds come back as the model's own constructor makes them, without a second model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaRotaryEmbedding

from gascompile.integrations.lost_buffers import rebuild_buffers

_SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip
_ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "theta": {"rope_theta": 500.0},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "longrope": {
        "rope_type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 2.1, 2.2, 2.3],
        "factor": 2.0, "original_max_position_embeddings": 32,
    },
}  # fmt: skip


def _llama(**rope: Any) -> Callable[[], nn.Module]:
    config = transformers.LlamaConfig(
        **_SMALL, rope_parameters={"rope_type": "default", "rope_theta": 10000.0, **rope}
    )
    return lambda: LlamaForCausalLM(config)


def _of(name: str) -> Callable[[], nn.Module]:
    config = transformers.AutoConfig.for_model(name, **_SMALL)
    return lambda: transformers.AutoModel.from_config(config)


_MODELS = {
    **{f"llama {name}": _llama(**rope) for name, rope in _ROPES.items()},
    **{name: _of(name) for name in ("gemma2", "gpt_neox", "gptj", "bert", "qwen2", "phi")},
}


def _lost(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def _expected(build: Callable[[], nn.Module]) -> dict[str, torch.Tensor]:
    """Return the non-persistent buffers of the model as it is built in memory."""
    model = build()
    kept = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name not in kept}


def _assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert expected
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("build", _MODELS.values(), ids=_MODELS.keys())
def test_as_the_constructor_makes_them(build: Callable[[], nn.Module]) -> None:
    model, expected, before = _lost(build), _expected(build), torch.get_rng_state()
    _assert_equal(rebuild_buffers(model), expected)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_library_model_is_not_built_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _lost(_llama())

    def refused(*_args: object, **_kwargs: object) -> None:
        raise AssertionError("a layer is built")

    monkeypatch.setattr(nn.Linear, "reset_parameters", refused)
    monkeypatch.setattr(nn.Embedding, "reset_parameters", refused)
    found = rebuild_buffers(model)
    monkeypatch.undo()
    _assert_equal(found, _expected(_llama()))


def test_a_class_of_the_program_has_the_last_word() -> None:
    class Halved(LlamaForCausalLM):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            table = self.model.rotary_emb.inv_freq
            self.model.rotary_emb.inv_freq = nn.Buffer(table * 0.5, persistent=False)

    config = transformers.LlamaConfig(**_SMALL)
    found = rebuild_buffers(_lost(lambda: Halved(config)))
    _assert_equal(found, _expected(lambda: Halved(config)))
    assert not torch.equal(
        found["model.rotary_emb.inv_freq"], found["model.rotary_emb.original_inv_freq"]
    )


def test_a_replaced_constructor_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = LlamaForCausalLM.__init__

    def init(self: Any, config: Any) -> None:
        plain(self, config)
        with torch.no_grad():
            self.model.rotary_emb.inv_freq.mul_(0.25)

    monkeypatch.setattr(LlamaForCausalLM, "__init__", init)
    model = _lost(_llama())
    _assert_equal(rebuild_buffers(model), _expected(_llama()))


@pytest.mark.parametrize("owner", [LlamaRotaryEmbedding, modeling_llama.LlamaPreTrainedModel])
def test_replaced_rules_count(owner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def table(config: Any, **_kwargs: Any) -> tuple[torch.Tensor, float]:
        size = config.hidden_size // config.num_attention_heads // 2
        return torch.arange(size, dtype=torch.float) + 7, 1.0

    def nothing(self: Any, module: nn.Module) -> None:
        """Leave a module as its constructor made it."""

    if owner is LlamaRotaryEmbedding:
        monkeypatch.setattr(owner, "compute_default_rope_parameters", staticmethod(table))
    else:
        monkeypatch.setattr(owner, "_init_weights", nothing)
    _assert_equal(rebuild_buffers(_lost(_llama())), _expected(_llama()))


def test_rubbish_is_never_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    from gascompile.integrations import lost_buffers

    monkeypatch.setattr(modeling_llama.LlamaPreTrainedModel, "_init_weights", lambda *_: None)
    monkeypatch.setattr(lost_buffers, "_is_of_library", lambda _: True)
    _assert_equal(rebuild_buffers(_lost(_llama())), _expected(_llama()))


def test_a_rounded_table_is_rounded_once() -> None:
    model = _lost(_llama()).to(torch.bfloat16)
    expected = {name: value.to(torch.bfloat16) for name, value in _expected(_llama()).items()}
    _assert_equal(rebuild_buffers(model), expected)


def test_inside_another_model() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = _llama(rope_theta=77.0)()

    found = rebuild_buffers(_lost(Wrapper))
    _assert_equal(found, _expected(Wrapper))
