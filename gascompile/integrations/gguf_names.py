"""GGUF files under transformers' names: which tensor is which weight, by the tables of the ``gguf`` package.

A family is here only if its results were compared with those of transformers' own loading: converters of other
families change values on the way, which nothing in a file tells. What llama.cpp's does to those here is to put the rows
of queries and keys of the family ``llama`` in the order in which its rotary positions turn them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from gascompile.core.errors import CheckpointError
from gascompile.core.sources import WeightSource
from gascompile.integrations.adapter_names import base_name
from gascompile.integrations.huggingface import transformers_models
from gascompile.integrations.lost_buffers import rebuild_buffers
from gascompile.weights.checkpoint import Checkpoint
from gascompile.weights.gguf import Scalar
from gascompile.weights.rows import WeightRows


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """What is known of one of llama.cpp's architectures."""

    model_types: tuple[str, ...]
    """Those of transformers that it stands for."""
    interleaved: bool = False
    """Whether rows of queries and keys lie pair by pair."""


_FAMILIES: Final[Mapping[str, _Family]] = {
    "llama": _Family(model_types=("llama", "mistral"), interleaved=True),
    "qwen2": _Family(model_types=("qwen2",)),
    "qwen3": _Family(model_types=("qwen3",)),
}
_SETTINGS: Final[Mapping[str, str]] = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "rope.dimension_count": "head_dim",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
}
_OPTIONAL = frozenset(("rope.dimension_count", "attention.key_length", "attention.value_length"))
"""What a file says of its model, and where the model's configuration says it: a wrong one gives wrong results."""
_HARMLESS = frozenset(
    ("context_length", "vocab_size", "tensor_data_layout", "expert_used_count", "rope.scaling.type")
)
"""What else files say that changes no result, or is looked at by itself."""
_FACTORS = "rope_freqs.weight"


def with_gguf_names(model: Any, checkpoint: Checkpoint) -> Checkpoint:
    """Return a GGUF checkpoint with the names that ``model`` uses.

    Raises:
        CheckpointError: it is of a family that is not known, of another model than this one, or holds what the model
            has no place for; or the ``gguf`` package is missing.
    """
    metadata = checkpoint.gguf
    assert metadata is not None, "a GGUF file"
    inner = transformers_models(model)
    if len(inner) != 1:
        raise CheckpointError(
            "the names in GGUF files are known for models of transformers alone; convert the weights to safetensors"
        )
    ((path, owner),) = inner.items()
    name = metadata.get("general.architecture")
    family = _FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        raise CheckpointError(
            f"this GGUF file is of the architecture {name!a:.100}, those that are known are {', '.join(_FAMILIES)}; "
            "convert the model to safetensors: load it with transformers (gguf_file=) and save_pretrained it"
        )
    config: Any = owner.config
    _check_config(config, str(name), family, metadata)
    names = _names(owner, str(name), int(config.num_hidden_layers))
    sources: dict[str, WeightSource] = {}
    for gguf_name, source in checkpoint.sources.items():
        if gguf_name == _FACTORS:
            continue
        if gguf_name not in names:
            raise CheckpointError(
                f"the GGUF file holds '{gguf_name}', for which {type(owner).__name__} has no weight. Is it of this "
                "model class and configuration?"
            )
        target = f"{path}.{names[gguf_name]}" if path else names[gguf_name]
        heads = _interleaved_heads(gguf_name, metadata) if family.interleaved else 0
        sources[target] = replace(source, name=target, interleaved_heads=heads)
    _check_factors(owner, checkpoint)
    return replace(checkpoint, sources=sources)


def _check_config(
    config: Any, architecture: str, family: _Family, metadata: Mapping[str, Scalar]
) -> None:
    if config.model_type not in family.model_types:
        raise CheckpointError(
            f"the GGUF file is of the architecture {architecture}, the model is a {config.model_type}"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    for key, setting in _SETTINGS.items():
        given = metadata.get(f"{architecture}.{key}")
        if setting == "num_key_value_heads" and given is None:
            given = metadata.get(f"{architecture}.attention.head_count")
        wanted = rope.get(setting) if setting in rope else getattr(config, setting, None)
        if setting == "head_dim" and wanted is None:
            wanted = config.hidden_size // config.num_attention_heads
        if setting == "rope_theta" and given is None:
            given = 10000.0
        if given is None and key in _OPTIONAL:
            continue
        if not isinstance(given, (int, float)) or isinstance(given, bool):
            raise CheckpointError(
                f"the GGUF file does not say its {architecture}.{key} as one number, which is needed"
            )
        if not isinstance(wanted, (int, float)) or not math.isclose(given, wanted, rel_tol=1e-6):
            raise CheckpointError(
                f"the GGUF file says {architecture}.{key} = {given:.10g}, the model's {setting} is {wanted}; build the "
                "model with the configuration of this file"
            )
    if metadata.get(f"{architecture}.expert_count", 0):
        raise CheckpointError("GGUF files of mixtures of experts cannot be read; use safetensors")
    known = {*_SETTINGS, *_HARMLESS, "expert_count"}
    for key, value in metadata.items():
        if key.startswith(f"{architecture}.") and key.removeprefix(f"{architecture}.") not in known:
            raise CheckpointError(
                f"the GGUF file says {ascii(key)[1:-1]:.100} = {value!a:.100}, and it is not known what that changes; "
                "use safetensors"
            )
    kind = metadata.get(f"{architecture}.rope.scaling.type", "none")
    is_scaled = rope.get("rope_type", "default") not in ("default", "llama3")
    if kind != "none" or is_scaled:
        raise CheckpointError(
            f"rotary positions that are scaled ({kind!a:.50} in the GGUF file, {rope.get('rope_type')!r} in the model) "
            "cannot be compared with a GGUF file's; use safetensors"
        )


def _names(model: Any, architecture: str, num_layers: int) -> dict[str, str]:
    """Return llama.cpp's name -> model's name of all weights."""
    try:
        import gguf
    except ImportError as error:
        raise CheckpointError(
            f"names in GGUF files are known to the gguf package, which cannot be imported ({error}); install it with: "
            "pip install 'gascompile[gguf]'"
        ) from error
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    table = gguf.get_tensor_name_map(arch, num_layers)
    name_of: dict[str, str] = {}
    tied = set(getattr(model, "_tied_weights_keys", None) or ())
    is_tied = bool(getattr(model.config, "tie_word_embeddings", False))
    # Adapters around a layer have names that no table knows.
    for name in (base_name(n) for n, _ in model.named_parameters(remove_duplicate=False)):
        known = table.get_name(name, try_suffixes=(".weight", ".bias"))
        if known is not None and not (is_tied and name in tied):
            name_of[known] = name
    return name_of


def _interleaved_heads(name: str, metadata: Mapping[str, Scalar]) -> int:
    if name.endswith((".attn_q.bias", ".attn_k.bias")):
        raise CheckpointError(
            f"'{name}': biases of queries and keys lie in another order than the model has them; use safetensors"
        )
    heads = metadata["llama.attention.head_count"]
    if name.endswith(".attn_k.weight"):
        heads = metadata.get("llama.attention.head_count_kv", heads)
    elif not name.endswith(".attn_q.weight"):
        return 0
    return int(heads)


def _check_factors(model: Any, checkpoint: Checkpoint) -> None:
    """Refuse a file whose rotary frequencies are divided by other factors than the model's."""
    rope = model.config.rope_parameters or {}
    width = int(getattr(model.config, "head_dim", 0) or 0)
    width = width or model.config.hidden_size // model.config.num_attention_heads
    source = checkpoint.sources.get(_FACTORS)
    factors = torch.ones(width // 2)
    if source is not None:
        with WeightRows() as weights:
            factors = weights.whole(source).double()
    buffers = dict(model.named_buffers())
    if any(buffer.is_meta for buffer in buffers.values()):
        buffers |= rebuild_buffers(model)
    frequencies = [b for n, b in buffers.items() if n.endswith("rotary_emb.inv_freq")]
    exponents = torch.arange(0, width, 2, dtype=torch.float64) / width
    plain = rope.get("rope_theta", 10000.0) ** -exponents
    if not frequencies:
        raise CheckpointError(
            f"{type(model).__name__} has no rotary_emb.inv_freq to compare with the GGUF file's"
        )
    for own in frequencies:
        wanted = plain / factors if factors.shape == plain.shape else None
        # A model that was cast as a whole has them rounded.
        rtol = 1e-4 if own.dtype in (torch.float32, torch.float64) else 1e-2
        if wanted is None or not torch.allclose(own.double(), wanted, rtol=rtol, atol=0):
            raise CheckpointError(
                "the GGUF file turns rotary positions by other frequencies than the model; build the model with "
                "the configuration of this file (rope_parameters)"
            )
