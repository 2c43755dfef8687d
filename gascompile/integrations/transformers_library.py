"""Hugging Face transformers as a model library: the hooks that the core asks, each where its work is done."""

from gascompile.integrations.first_call import set_at_first_call
from gascompile.integrations.generate import methods
from gascompile.integrations.given_caches import give_back
from gascompile.integrations.hub import fetch
from gascompile.integrations.huggingface import (
    build_skeleton,
    ignorable_weights,
    register_ops,
    register_pytrees,
    register_types,
)
from gascompile.integrations.huggingface import is_model_directory as is_directory
from gascompile.integrations.lost_buffers import rebuild_buffers
from gascompile.integrations.own_attention import doubts
from gascompile.integrations.traced_experts import describable
from gascompile.integrations.weight_names import with_model_names

__all__ = [
    "build_skeleton",
    "describable",
    "doubts",
    "fetch",
    "give_back",
    "ignorable_weights",
    "is_directory",
    "methods",
    "rebuild_buffers",
    "register_ops",
    "register_pytrees",
    "register_types",
    "set_at_first_call",
    "with_model_names",
]
