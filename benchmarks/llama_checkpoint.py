"""Write a Llama of a given size with random weights as a sharded Hugging Face directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

SHAPE_1B = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
}
"""1.1 billion parameters, 4.4 GB in fp32."""


def write_llama(
    folder: Path, shape: dict[str, int], *, dtype: str = "float32", shard_bytes: int = 10**9
) -> Path:
    """Write the checkpoint unless it is there; at most one shard is in memory at a time."""
    index_path = folder / "model.safetensors.index.json"
    if index_path.exists():
        return folder
    from accelerate import init_empty_weights
    from transformers import LlamaConfig, LlamaForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    options: dict[str, Any] = dict(shape)
    config = LlamaConfig(**options, tie_word_embeddings=False, dtype=dtype)
    with init_empty_weights():
        model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    shard: dict[str, torch.Tensor] = {}
    weight_map: dict[str, str] = {}
    total_bytes = size_bytes = 0
    for name, parameter in model.named_parameters():
        value = torch.empty(parameter.shape, dtype=getattr(torch, dtype))
        if "norm" in name:
            value.fill_(1.0)
        else:
            value.normal_(0.0, 0.02, generator=generator)
        if shard and size_bytes + value.nbytes > shard_bytes:
            _write_shard(folder, shard, weight_map)
            shard, size_bytes = {}, 0
        shard[name] = value
        size_bytes += value.nbytes
        total_bytes += value.nbytes
    _write_shard(folder, shard, weight_map)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    index_path.write_text(json.dumps(index, indent=1))
    return folder


def _write_shard(folder: Path, shard: dict[str, torch.Tensor], weight_map: dict[str, str]) -> None:
    file = f"model-{len(set(weight_map.values())) + 1:05d}.safetensors"
    save_file(shard, folder / file, metadata={"format": "pt"})
    weight_map.update(dict.fromkeys(shard, file))
