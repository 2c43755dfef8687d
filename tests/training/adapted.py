"""Small language models with adapters, and what they are trained to do."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

MASK = torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()


def token_batches(vocabulary: int) -> list[torch.Tensor]:
    """Return two batches of tokens."""
    seeds = (torch.Generator().manual_seed(n) for n in (1, 2))
    return [torch.randint(0, vocabulary, (2, 8), generator=seed) for seed in seeds]


def next_tokens(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Return how badly the next tokens were guessed."""
    logits = model(input_ids=ids, attention_mask=MASK, use_cache=False).logits
    return functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())


def by_peft(model: nn.Module) -> nn.Module:
    """Let peft put adapters in float32 around queries and values, with the same values wherever the base is."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    with warnings.catch_warnings():
        # Of transformers, about its own attribute that peft asks for.
        warnings.simplefilter("ignore", FutureWarning)
        found: nn.Module = peft.get_peft_model(model, config)
    for name, part in found.named_modules():
        if name.endswith((".lora_A", ".lora_B")):
            if any(p.is_meta for p in part.parameters()):
                part.to_empty(device="cpu")
            part.float()
    return filled(found)


def filled(model: nn.Module) -> nn.Module:
    """Give adapters their values."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 10)
    return model.train()
