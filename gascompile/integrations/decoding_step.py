"""One step of a causal language model over a key/value cache of fixed size, as a module to capture.

The cache's tensors are buffers of the module, so a captured program mutates them as states. Positions
are an input: the same module, captured with one token or with many, continues the same sequence. Every
layer keeps all positions, those with a sliding window too; the model's own mask leaves out what lies
before the window, so results are those of a cache that grows.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache

from gascompile.integrations.cache_argument import cache_argument
from gascompile.integrations.fixed_cache import cache_shapes, empty_past
from gascompile.integrations.fixed_layer import FixedLayer


class DecodingStep(nn.Module):
    """A causal language model and its cache; a call returns the logits of the last token."""

    def __init__(self, lm: Any, max_length: int) -> None:
        """Allocate the cache.

        Args:
            lm: a causal language model of transformers, its parameters on any device.
            max_length: tokens the cache holds.

        Raises:
            UnsupportedOpError: the model keeps another kind of cache than keys and values per position.
        """
        super().__init__()
        self.lm = lm
        self.max_length = max_length
        self._accepted = frozenset(inspect.signature(lm.forward).parameters)
        self._cache = cache_argument(lm.forward)
        shapes = cache_shapes(lm)
        self._num_layers = len(shapes)
        for i, (key, value) in enumerate(shapes):
            self.register_buffer(f"key_{i}", empty_past(key, max_length), persistent=False)
            self.register_buffer(f"value_{i}", empty_past(value, max_length), persistent=False)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the keys and values of all layers."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.cache_tensors())

    def cache_tensors(self) -> list[torch.Tensor]:
        """Return the tensors of the cache."""
        return [
            self.get_buffer(f"{kind}_{i}")
            for i in range(self._num_layers)
            for kind in ("key", "value")
        ]

    def forward(self, input_ids: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Return the logits ``[1, vocabulary]`` of the last token.

        Args:
            input_ids: tokens ``[1, n]``.
            position: index of the first of them in the sequence, a scalar tensor. The cache holds all
                earlier tokens.
        """
        layers: list[Any] = [
            FixedLayer(self.get_buffer(f"key_{i}"), self.get_buffer(f"value_{i}"), position)
            for i in range(self._num_layers)
        ]
        positions = torch.arange(input_ids.shape[1], device=input_ids.device) + position
        options = {"logits_to_keep": 1, "position_ids": positions[None]}
        result = self.lm(
            input_ids=input_ids,
            use_cache=True,
            return_dict=True,
            **{self._cache: Cache(layers=layers)},
            **{name: value for name, value in options.items() if name in self._accepted},
        )
        logits: torch.Tensor = result.logits[:, -1]
        return logits
