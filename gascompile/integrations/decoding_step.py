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
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from gascompile.capture.fake_twin import fake_twin
from gascompile.core.errors import UnsupportedOpError


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
        shapes = _cache_shapes(lm)
        self._num_layers = len(shapes)
        for i, (key, value) in enumerate(shapes):
            self.register_buffer(f"key_{i}", _zeros(key, max_length), persistent=False)
            self.register_buffer(f"value_{i}", _zeros(value, max_length), persistent=False)

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
            _FixedLayer(self.get_buffer(f"key_{i}"), self.get_buffer(f"value_{i}"), position)
            for i in range(self._num_layers)
        ]
        positions = torch.arange(input_ids.shape[1], device=input_ids.device) + position
        options = {"logits_to_keep": 1, "position_ids": positions[None]}
        result = self.lm(
            input_ids=input_ids,
            past_key_values=Cache(layers=layers),
            use_cache=True,
            return_dict=True,
            **{name: value for name, value in options.items() if name in self._accepted},
        )
        logits: torch.Tensor = result.logits[:, -1]
        return logits


class _FixedLayer(CacheLayerMixin):
    """Keys and values of one layer, as long as the whole cache."""

    is_compileable = True
    is_sliding = False
    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, position: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keys = keys
        self.values = values
        self.is_initialized = True
        self._position = position

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the tensors are there from the start."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new keys and values at their positions and return all of them."""
        del args, kwargs
        positions = torch.arange(key_states.shape[-2], device=key_states.device) + self._position
        self.keys.index_copy_(2, positions, key_states)
        self.values.index_copy_(2, positions, value_states)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the length of the keys and the position of the first."""
        del query_length
        return self.get_max_length(), 0

    def get_seq_length(self) -> Any:
        """Return how many tokens were there before this call, as a tensor."""
        return self._position

    def get_max_length(self) -> int:
        """Return how many tokens fit."""
        return int(self.keys.shape[-2])


def _cache_shapes(lm: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return keys and values per layer as a run without data leaves them: shapes and dtypes to go by."""
    twin: Any = fake_twin(lm, device="cpu")[0]
    # The default, grouped matrix products, has no shape formula for all dtypes outside of a capture.
    twin.set_experts_implementation("batched_mm")
    (mode,) = {tensor.fake_mode for tensor in twin.parameters()}
    cache = DynamicCache(config=lm.config)
    with mode, torch.no_grad():
        twin(input_ids=torch.zeros(1, 2, dtype=torch.long), past_key_values=cache, use_cache=True)
    layers: list[Any] = cache.layers
    for i, layer in enumerate(layers):
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) or layer.keys is None:
            raise UnsupportedOpError(
                f"layer {i} of {type(lm).__name__} keeps its past as {type(layer).__name__}; generation supports "
                "keys and values per position. Compile the model's forward with use_cache=False instead"
            )
    if not layers:
        raise UnsupportedOpError(
            f"{type(lm).__name__} does not fill the cache that it is given, so each token would need the whole "
            "prompt again. Compile the model's forward instead"
        )
    return [(layer.keys, layer.values) for layer in layers]


def _zeros(like: torch.Tensor, max_length: int) -> torch.Tensor:
    batch, heads, _, width = like.shape
    return torch.zeros(batch, heads, max_length, width, dtype=like.dtype)
