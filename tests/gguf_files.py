"""Blocks and files of llama.cpp's format for tests, by the ``gguf`` package's own writer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf.quants import dequantize

from gascompile.formats.layout import BLOCKS, row_bytes

TYPES: Mapping[str, Any] = {
    form: getattr(gguf.GGMLQuantizationType, form.upper()) for form in BLOCKS
}
_SCALES_AT = {"q8_0": (0,), "q4_0": (0,), "q4_k": (0, 2), "q6_k": (208,)}


def random_blocks(form: str, rows: int, columns: int, *, scale: float = 0.01) -> torch.Tensor:
    """Return ``[rows, row_bytes]`` in which every bit is random but the float16 scales, which stay small."""
    raw = torch.randint(0, 256, (rows, row_bytes(form, columns, 0)), dtype=torch.uint8)
    blocks = raw.view(rows, -1, BLOCKS[form][1])
    for offset in _SCALES_AT[form]:
        halves = (torch.randn(*blocks.shape[:2], 1) * scale).half()
        blocks[..., offset : offset + 2] = halves.view(torch.uint8)
    return raw


def oracle(rows: torch.Tensor, form: str) -> torch.Tensor:
    """Return what the ``gguf`` package takes blocks to be."""
    return torch.from_numpy(dequantize(rows.numpy(), TYPES[form]))


def packed(values: torch.Tensor, form: str) -> torch.Tensor:
    """Return a matrix as blocks: rounded where the package can do that, else random ones of about that size."""
    if form in ("q8_0", "q4_0"):
        return torch.from_numpy(gguf.quants.quantize(values.numpy(), TYPES[form]))
    return random_blocks(form, *values.shape, scale=float(values.std()) / 100)


def write_gguf(
    model: Any,
    path: Path,
    form: Callable[[str], str],
    *,
    architecture: str = "llama",
    more: Mapping[str, Any] | None = None,
    tensors: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Write a decoder of transformers as llama.cpp's converter does.

    Args:
        model: with float32 weights.
        path: of the file.
        form: given a name of llama.cpp's, says how that matrix is stored; vectors are float32.
        architecture: llama.cpp's word for the model.
        more: metadata that is added, or takes the place of what the model has.
        tensors: vectors that are added.
    """
    config = model.config
    rope = config.rope_parameters
    metadata: dict[str, Any] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": rope["rope_theta"],
        "vocab_size": config.vocab_size,
    }
    writer = gguf.GGUFWriter(path, architecture)
    own = {f"{architecture}.{key}": value for key, value in metadata.items()}
    for key, value in {**own, **(more or {})}.items():
        is_count = isinstance(value, int) and not isinstance(value, bool)
        kind = gguf.GGUFValueType.UINT32 if is_count else gguf.GGUFValueType.get_type(value)
        writer.add_key_value(key, value, kind)
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    table = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, tensor in model.named_parameters():
        known = table.get_name(name, try_suffixes=(".weight", ".bias"))
        assert known is not None, name
        values = tensor.detach().float()
        if architecture == "llama" and ".attn_q." in known:
            values = _permuted(values, config.num_attention_heads)
        elif architecture == "llama" and ".attn_k." in known:
            values = _permuted(values, config.num_key_value_heads)
        _add(writer, known, values, form(known) if values.dim() == 2 else "float32")
    for name, tensor in (tensors or {}).items():
        _add(writer, name, tensor, "float32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _permuted(values: torch.Tensor, heads: int) -> torch.Tensor:
    """Return the rows of queries or keys in the order in which llama.cpp's converter puts them."""
    apart = values.view(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return apart.swapaxes(1, 2).reshape(values.shape)


def _add(writer: gguf.GGUFWriter, name: str, values: torch.Tensor, form: str) -> None:
    if form in BLOCKS:
        writer.add_tensor(name, packed(values, form).numpy(), raw_dtype=TYPES[form])
    elif form == "bfloat16":
        raw = values.bfloat16().view(torch.uint8).numpy()
        writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    else:
        writer.add_tensor(name, values.to(getattr(torch, form)).contiguous().numpy())
