"""A key/value cache of fixed size, of which every call sees the same shapes however much it holds.

Every layer keeps all positions, those with a sliding window too; the model's own mask leaves out what lies before the
window, so results are those of a cache that grows. How much is there is a tensor: one captured program serves any.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.fx._pytree import register_pytree_flatten_spec
from torch.utils import _pytree as pytree
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from gascompile.capture.fake_twin import fake_twin
from gascompile.core.errors import UnsupportedOpError


class FixedCache(Cache):
    """The past of all layers, and the one position that they are filled up to.

    Attributes:
        position: tokens that it holds, a scalar tensor; who calls the model moves it on with ``advance``.
    """

    def __init__(
        self, position: torch.Tensor, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
    ) -> None:
        self.position = position
        self._num_tokens = 0
        super().__init__(
            layers=[FixedLayer(*past, position) for past in zip(keys, values, strict=True)]
        )

    def update(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values of a layer and return all of them; in captured programs alone.

        Raises:
            UnsupportedOpError: a model that is not compiled was given it, and would move nothing on.
        """
        if not torch.compiler.is_exporting():
            raise UnsupportedOpError(
                "a cache that a compiled model has filled is for compiled models; give this one none, "
                "and the whole text"
            )
        return super().update(*args, **kwargs)

    def require_room(self, num_tokens: int) -> None:
        """Raise ``ValueError`` where so many tokens more do not fit."""
        size = self.layers[0].get_max_length()
        if self._num_tokens + num_tokens > size:
            raise ValueError(
                f"the cache holds {self._num_tokens} of at most {size} tokens, and {num_tokens} more are to come: "
                "generate without past_key_values=, from the whole text"
            )

    def advance(self, num_tokens: int) -> None:
        """Count the tokens of a call that has been made."""
        self.position.add_(num_tokens)
        self._num_tokens += num_tokens

    def reset(self) -> None:
        """Forget all tokens."""
        super().reset()  # type: ignore[no-untyped-call]
        self.position.zero_()
        self._num_tokens = 0


class FixedLayer(CacheLayerMixin):
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


def cache_shapes(lm: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return keys and values per layer as a run without data leaves them: shapes and dtypes to go by.

    Raises:
        UnsupportedOpError: the model keeps another kind of past than keys and values per position, or is not known
            to compute with one of a fixed size.
    """
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
    if not getattr(lm, "_can_compile_fullgraph", False):
        # Code that takes the length of the keys for the length of the text, as GPT-Neo's, would be silently wrong.
        raise UnsupportedOpError(
            f"transformers does not say that {type(lm).__name__} computes the same with a cache of a fixed size; "
            "compile the model and call its generate, which then fills a cache that grows"
        )
    return [(layer.keys, layer.values) for layer in layers]


def empty_past(like: torch.Tensor, max_length: int, batch: int | None = None) -> torch.Tensor:
    """Return zeros for the keys or the values of a layer: those of ``like``, for so many tokens and rows."""
    rows, heads, _, width = like.shape
    return torch.zeros(batch or rows, heads, max_length, width, dtype=like.dtype)


_PARTS = ("position", "keys", "values")


def _parts(cache: FixedCache) -> tuple[list[Any], None]:
    layers: list[Any] = cache.layers
    return [cache.position, [one.keys for one in layers], [one.values for one in layers]], None


def _with_names(cache: FixedCache) -> tuple[list[tuple[pytree.KeyEntry, Any]], None]:
    names: list[pytree.KeyEntry] = [pytree.MappingKey(name) for name in _PARTS]
    return list(zip(names, _parts(cache)[0], strict=True)), None


def _of_parts(parts: Iterable[Any], _: None) -> FixedCache:
    return FixedCache(*parts)


pytree.register_pytree_node(
    FixedCache,
    _parts,
    _of_parts,
    serialized_type_name="gascompile.integrations.fixed_cache.FixedCache",
    flatten_with_keys_fn=_with_names,
)
register_pytree_flatten_spec(FixedCache, lambda cache, _: _parts(cache)[0])
