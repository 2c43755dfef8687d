"""Tiny causal language models of several families, and generators of them on a machine of fixed numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from gascompile.core.machine import ComputeRate, Link, Machine, MemoryRate, Place
from gascompile.integrations.generation import Generator

SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
}
SHALLOW = {**SIZES, "num_hidden_layers": 1}
MACHINE = Machine(
    name="test",
    places=(Place.named("cpu", 8 << 30), Place.named("nvme", 64 << 30)),
    links=(Link(source_tier="nvme", target_tier="cpu", bandwidth_bytes_per_s=1e9, latency_s=1e-4),),
    rates=(ComputeRate(device="cpu", dtype="float32", flops_per_s=5e10),),
    memory=(MemoryRate(device="cpu", bandwidth_bytes_per_s=1e10, op_overhead_s=1e-6),),
)
PROMPT = torch.arange(7, 19)
NUM_NEW = 14
MAX_LENGTH = 40


def tiny_llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


def tiny_gpt2() -> Any:
    config = transformers.GPT2Config(
        vocab_size=101,
        n_embd=64,
        n_layer=2,
        n_head=4,
        n_positions=64,
        bos_token_id=None,
        eos_token_id=None,
    )
    return transformers.GPT2LMHeadModel(config)


def tiny_mixtral() -> Any:
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**SHALLOW, num_local_experts=4)
    )


def tiny_qwen2_tied() -> Any:
    config = transformers.Qwen2Config(**SHALLOW, tie_word_embeddings=True)
    return transformers.Qwen2ForCausalLM(config)


def tiny_mistral() -> Any:
    return transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, sliding_window=6))


def tiny_falcon() -> Any:
    config = transformers.FalconConfig(
        vocab_size=101, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    return transformers.FalconForCausalLM(config)


def lively(model: Any) -> Any:
    """Return ``model`` with weights large enough that its answer is not one token over and over."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "embed" not in name and "wte" not in name:
                parameter.mul_(8.0)
    return model.eval()


def weights_bytes(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def open_generator(source: Any, budget: int | str, cache: Path, **options: Any) -> Generator:
    given = {"max_length": MAX_LENGTH, "prefill_tokens": 8, **options}
    return Generator(source, budget, cache_dir=cache, machine=MACHINE, **given)
