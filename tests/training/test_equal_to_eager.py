"""Ten steps of small models in two or three budgets: losses, parameters and buffers have eager's bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional

from gascompile.core.steps import Recompute, Reload
from tests.training.trials import TRANSFER_BYTES, Trial, adamw

_STEPS = 10
Case = tuple[nn.Module, Callable[[nn.Module, Any], torch.Tensor], list[Any]]


def _tokens(*shape: int) -> torch.Tensor:
    return torch.randint(5, 90, shape)


def _next_token(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=batch, labels=batch).loss
    return loss


def gpt2() -> Case:
    config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=100, n_positions=16)
    return transformers.GPT2LMHeadModel(config), _next_token, _batches(lambda: _tokens(2, 16))


def llama() -> Case:
    config = transformers.LlamaConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        vocab_size=100,
    )
    return transformers.LlamaForCausalLM(config), _next_token, _batches(lambda: _tokens(2, 16))


def mixtral() -> Case:
    config = transformers.MixtralConfig(
        vocab_size=100, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config), _next_token, _batches(lambda: _tokens(2, 16))


def bert() -> Case:
    config = transformers.BertConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        vocab_size=100,
        max_position_embeddings=32,
    )
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, 7:] = 0

    def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = model(**batch).loss
        return loss

    batches = _batches(
        lambda: {"input_ids": _tokens(2, 12), "attention_mask": mask, "labels": _tokens(2, 12)}
    )
    return transformers.BertForMaskedLM(config), loss_fn, batches


def vit() -> Case:
    config = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        image_size=16,
        patch_size=8,
        hidden_dropout_prob=0.1,
    )
    config.num_labels = 5

    def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = model(pixel_values=batch[0], labels=batch[1]).loss
        return loss

    batches = _batches(lambda: (torch.randn(2, 3, 16, 16), torch.randint(0, 5, (2,))))
    return transformers.ViTForImageClassification(config), loss_fn, batches


def convolutional() -> Case:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, groups=2),
        nn.BatchNorm2d(16),
        nn.GELU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(144, 10),
    )

    def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])

    batches = _batches(lambda: (torch.randn(8, 3, 16, 16), torch.randint(0, 10, (8,))))
    return model, loss_fn, batches


def _batches(make: Callable[[], Any]) -> list[Any]:
    return [make() for _ in range(_STEPS)]


@pytest.mark.parametrize(
    ("make", "between"),
    [(gpt2, 1), (llama, 0), (mixtral, 0), (bert, 0), (vit, 0), (convolutional, 1)],
)
def test_bits_of_eager_in_every_budget(
    make: Callable[[], Case], between: int, tmp_path: Path
) -> None:
    model, loss_fn, batches = make()
    trial = Trial(model.train(), loss_fn, batches, tmp_path, adamw)
    eager = trial.eager()
    smallest = trial.smallest_budget()
    full = trial.planned()
    full.assert_equals(eager)
    assert full.plan is not None
    peak_bytes = full.plan.peak_bytes["cpu"]
    half = max(peak_bytes // 2 + TRANSFER_BYTES, smallest)
    for budget in (*[half] * between, smallest):
        result = trial.planned(budget)
        result.assert_equals(eager)
        assert result.plan is not None
        assert result.peak_bytes <= budget - TRANSFER_BYTES
        assert result.plan.peak_bytes["cpu"] <= budget
    assert result.plan is not None
    kinds = {type(step) for step in result.plan.steps}
    assert kinds & {Reload, Recompute}, "the smallest budget holds all there is"
