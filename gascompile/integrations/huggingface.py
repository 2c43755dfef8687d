"""Hugging Face transformers: its output types, its directories, its weight names."""

from __future__ import annotations

import sys
from typing import Any

from torch.utils import _pytree as pytree


def register_pytrees() -> None:
    """Teach torch's pytrees the cache types that transformers models return; does nothing without transformers."""
    if "transformers" not in sys.modules:
        return
    from transformers.cache_utils import EncoderDecoderCache
    from transformers.integrations.executorch import register_dynamic_cache_export_support

    register_dynamic_cache_export_support()
    if EncoderDecoderCache not in pytree.SUPPORTED_NODES:
        pytree.register_pytree_node(
            EncoderDecoderCache,
            _flatten_encoder_decoder_cache,
            _unflatten_encoder_decoder_cache,
            serialized_type_name="transformers.cache_utils.EncoderDecoderCache",
        )


def _flatten_encoder_decoder_cache(cache: Any) -> tuple[list[Any], None]:
    return [cache.self_attention_cache, cache.cross_attention_cache], None


def _unflatten_encoder_decoder_cache(values: Any, context: None) -> Any:
    from transformers.cache_utils import EncoderDecoderCache

    return EncoderDecoderCache(*values)
