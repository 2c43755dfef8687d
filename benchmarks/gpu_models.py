"""Llama models with random weights for the GPU benchmark, made where it runs: the same in every process."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

SHAPES: dict[str, dict[str, int]] = {
    "8B": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
    },
    "3B": {
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
    },
    "32B": {
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
    },
    "toy": {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 1000,
    },
}
_SHARD_BYTES = 2 * 10**9
_STEPS = 1 << 24
"""Random values are drawn this many at a time, so that little of the device's memory is taken for it."""


def empty_llama(shape: dict[str, int]) -> nn.Module:
    """Return the model in bfloat16 with its parameters on the meta device and its buffers in memory."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    options: dict[str, Any] = dict(shape)
    config = LlamaConfig(**options, tie_word_embeddings=False)
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    # The only buffers of the model; they are computed from the configuration, not loaded.
    model.model.rotary_emb = LlamaRotaryEmbedding(config)
    made: nn.Module = model.eval()
    return made


def random_weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a value in CPU memory for each parameter, drawn on the GPU where there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for number, (name, parameter) in enumerate(model.named_parameters()):
        value = torch.empty(parameter.shape, dtype=parameter.dtype)
        if parameter.dim() == 1:
            yield name, value.fill_(1.0)
            continue
        # Keeps the size of activations from layer to layer, so that results can be compared.
        spread = 1 / math.sqrt(parameter.shape[1])
        generator = torch.Generator(device).manual_seed(number)
        for part in value.view(-1).split(_STEPS):
            drawn = torch.empty(part.shape, dtype=part.dtype, device=device)
            part.copy_(drawn.normal_(0.0, spread, generator=generator))
        yield name, value


def llama_in_memory(shape: dict[str, int]) -> nn.Module:
    """Return the model with all its weights in CPU memory."""
    model = empty_llama(shape)
    model.load_state_dict(dict(random_weights(model)), strict=False, assign=True)
    return model.requires_grad_(requires_grad=False)


def write_checkpoint(shape: dict[str, int], folder: Path) -> Path:
    """Write the same weights as a sharded checkpoint unless it is there; one shard is in memory at a time."""
    index_path = folder / "model.safetensors.index.json"
    if index_path.exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    shard: dict[str, torch.Tensor] = {}
    weight_map: dict[str, str] = {}
    size_bytes = 0
    for name, value in random_weights(empty_llama(shape)):
        if shard and size_bytes + value.nbytes > _SHARD_BYTES:
            _write_shard(folder, shard, weight_map)
            shard, size_bytes = {}, 0
        shard[name] = value
        size_bytes += value.nbytes
    _write_shard(folder, shard, weight_map)
    index_path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}, indent=1))
    return folder


def weight_bytes(shape: dict[str, int]) -> int:
    """Return the bytes of all weights in bfloat16."""
    return sum(p.numel() * p.element_size() for p in empty_llama(shape).parameters())


def embedding_bytes(shape: dict[str, int]) -> int:
    """Return the bytes of the table of embeddings in bfloat16; it shares none with the last layer."""
    return 2 * shape["vocab_size"] * shape["hidden_size"]


def _write_shard(folder: Path, shard: dict[str, torch.Tensor], weight_map: dict[str, str]) -> None:
    file = f"model-{len(set(weight_map.values())) + 1:05d}.safetensors"
    save_file(shard, folder / file, metadata={"format": "pt"})
    weight_map.update(dict.fromkeys(shard, file))
