"""A key/value cache of fixed size, of which every call sees the same shapes however much it holds.

Every layer keeps all positions, those with a sliding window too; the model's own mask leaves out what lies before the
window, so results are those of a cache that grows. How much is there is a tensor: one captured program serves any.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.fx._pytree import register_pytree_flatten_spec
from torch.utils import _pytree as pytree
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from gascompile.capture.calls import register_flat
from gascompile.capture.fake_twin import fake_twin
from gascompile.core.errors import UnsupportedOpError
from gascompile.integrations.cache_argument import cache_argument
from gascompile.integrations.fixed_layer import SPARE, FixedLayer, lasting_past, longer_past


class FixedCache(Cache):
    """The past of all layers, and the one position that they are filled up to.

    Attributes:
        position: tokens that it holds, a scalar tensor; who calls the model moves it on with ``advance``.
        seen: a tensor whose length is that of the keys that the next call looks at. Programs have it as an input of
            any length, so that the time of a token follows the text, not the size of the cache.
    """

    def __init__(
        self,
        position: torch.Tensor,
        seen: torch.Tensor,
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
    ) -> None:
        self.position, self.seen = position, seen
        self._num_tokens = 0
        layers = [FixedLayer(*past, position) for past in zip(keys, values, strict=True)]
        super().__init__(layers=layers)  # type: ignore[arg-type]  # a list of a class below that
        self._show(seen)

    @staticmethod
    def empty(
        like: Sequence[tuple[torch.Tensor, torch.Tensor]], size: int, rows: int
    ) -> FixedCache:
        """Return a cache that holds nothing yet and has room for ``size`` tokens of so many rows."""
        keys, values = (
            [lasting_past(kind, size + SPARE, rows) for kind in kinds]
            for kinds in zip(*like, strict=True)
        )
        with torch.inference_mode(mode=False):
            position = torch.tensor(0)
        cache = FixedCache(position, _length(size), keys, values)
        _known[id(cache.position)] = cache
        return cache

    def is_of(
        self,
        position: torch.Tensor,
        seen: torch.Tensor,
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
    ) -> bool:
        """Return whether it is made of these very tensors."""
        layers = self._fixed
        return (
            position is self.position
            and seen is self.seen
            and len(keys) == len(values) == len(layers)
            and all(map(operator.is_, keys, [layer.keys for layer in layers]))
            and all(map(operator.is_, values, [layer.values for layer in layers]))
        )

    @property
    def _fixed(self) -> list[FixedLayer]:
        return self.layers  # type: ignore[return-value]  # as made

    @property
    def size(self) -> int:
        """Tokens that it has room for."""
        return int(self._fixed[0].keys.shape[-2]) - SPARE

    @property
    def rows(self) -> int:
        """Texts that it holds."""
        return int(self._fixed[0].keys.shape[0])

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, None]]:
        """Give keys and values of each layer, of the tokens that it holds, as a cache that grows does."""
        for layer in self._fixed:
            end = self._num_tokens
            yield layer.keys[:, :, :end], layer.values[:, :, :end], None

    @property
    def num_bytes(self) -> int:
        """Bytes of all keys and values."""
        pasts = [past for layer in self._fixed for past in (layer.keys, layer.values)]
        return sum(past.numel() * past.element_size() for past in pasts)

    @property
    def dtype(self) -> torch.dtype:
        """That of keys and values, which models compute in."""
        return self._fixed[0].keys.dtype

    @property
    def keys_bytes(self) -> int:
        """Bytes of the keys, or the values, of the largest layer."""
        pasts = [past for layer in self._fixed for past in (layer.keys, layer.values)]
        return max(past.numel() * past.element_size() for past in pasts)

    @property
    def is_compileable(self) -> bool:
        """Whether masks are made for it before a call; a call makes them piece by piece."""
        return self._has_masks

    _latest = -1
    _positions: torch.Tensor | None = None
    _has_masks = False
    has_plain_masks = False
    """Whether the masks of the latest token were those of a layer that looks at all before it."""
    has_drafts = False
    """Whether tokens come that are taken back where the model would not have chosen them."""

    def take_masks(self, whether: bool) -> None:
        """Have the next call come with the masks of all its tokens, or make its own."""
        self._has_masks = whether

    def _show(self, seen: torch.Tensor) -> None:
        self.seen = seen
        for layer in self._fixed:
            layer.window = seen.shape[0]

    def look(self, num_tokens: int) -> int:
        """Have the next call, of so many tokens, look at as many positions as there will be; return how many."""
        window = -(-(self._num_tokens + num_tokens) // _STEP) * _STEP
        self._show(_length(min(window, self.size)))
        return int(self.seen.shape[0])

    def whole(self) -> FixedCache:
        """Return the same cache for calls that look at all of it."""
        layers = self._fixed
        keys, values = [of.keys for of in layers], [of.values for of in layers]
        return FixedCache(self.position, _length(self.size), keys, values)

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values of a layer and return all of them; in captured programs alone.

        Raises:
            UnsupportedOpError: a model that is not compiled was given it, and would move nothing on.
        """
        if not torch.compiler.is_exporting():
            raise UnsupportedOpError(
                "a cache that a compiled model has filled is for compiled models; give this one none, "
                "and the whole text"
            )
        if layer_idx <= self._latest:
            # Another pass over the layers, which all write to the same positions.
            self._positions = None
        self._latest = layer_idx
        layer = self._fixed[layer_idx]
        if self._positions is None:
            self._positions = layer.positions(key_states)
        layer.at = self._positions
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """Return how many tokens it holds; to a program that is captured, as a tensor."""
        del layer_idx
        return self.position if torch.compiler.is_exporting() else self._num_tokens

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the length of the keys that a call of so many tokens looks at, and the position of the first."""
        if not torch.compiler.is_exporting():
            self.look(query_length)
        return super().get_mask_sizes(query_length, layer_idx)

    def make_room(self, num_tokens: int) -> None:
        """Have room for so many tokens more, in twice the memory or more where there is too little."""
        needed = self._num_tokens + num_tokens
        if needed <= self.size:
            return
        size = 1 << (needed - 1).bit_length()
        for layer in self._fixed:
            layer.keys = longer_past(layer.keys, size + SPARE)
            layer.values = longer_past(layer.values, size + SPARE)

    def advance(self, num_tokens: int) -> None:
        """Count the tokens of a call that has been made."""
        self.position.add_(num_tokens)
        self._num_tokens += num_tokens

    def crop(self, tokens_to_remove: int) -> None:
        """Forget so many of the latest tokens, a number below zero; what comes next is written over them."""
        if tokens_to_remove > 0 or -tokens_to_remove > self._num_tokens:
            raise ValueError(
                f"the cache holds {self._num_tokens} tokens: pass minus the number of those to forget, "
                f"not {tokens_to_remove}"
            )
        self.advance(tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Have each row go on from another one, as beams do."""
        end = self._num_tokens
        for layer in self._fixed:
            for past in (layer.keys, layer.values):
                # In place: rows that are swapped are no new memory.
                past[:, :, :end] = past[:, :, :end].index_select(0, beam_idx.to(past.device))

    def reset(self) -> None:
        """Forget all tokens."""
        super().reset()  # type: ignore[no-untyped-call]
        self.position.zero_()
        self._num_tokens = 0


_STEP = 64
"""Positions that calls look at are multiples of this, or all."""


def _length(size: int) -> torch.Tensor:
    """Return a tensor that says nothing but its length."""
    with torch.inference_mode(mode=False):
        return torch.zeros(size, dtype=torch.int8)


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
        tokens = torch.zeros(1, 2, dtype=torch.long)
        try:
            twin(input_ids=tokens, use_cache=True, **{cache_argument(twin.forward): cache})
        except DataDependentOutputException as error:
            raise UnsupportedOpError(
                f"{type(lm).__name__} decides by values what it computes ({error}), which no plan does for all calls"
            ) from error
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


_PARTS = ("position", "seen", "keys", "values")


def _parts(cache: FixedCache) -> tuple[list[Any], None]:
    layers: list[Any] = cache.layers
    pasts = [[one.keys for one in layers], [one.values for one in layers]]
    return [cache.position, cache.seen, *pasts], None


def _with_names(cache: FixedCache) -> tuple[list[tuple[pytree.KeyEntry, Any]], None]:
    names: list[pytree.KeyEntry] = [pytree.MappingKey(name) for name in _PARTS]
    return list(zip(names, _parts(cache)[0], strict=True)), None


_known: WeakValueDictionary[int, FixedCache] = WeakValueDictionary()
"""Caches by their positions: a call that returns all parts of one returns that one."""


def _of_parts(parts: Iterable[Any], _: None) -> FixedCache:
    position, seen, keys, values = parts
    known = _known.get(id(position))
    if known is not None and known.is_of(position, seen, keys, values):
        return known
    return FixedCache(position, seen, keys, values)


pytree.register_pytree_node(
    FixedCache,
    _parts,
    _of_parts,
    serialized_type_name="gascompile.integrations.fixed_cache.FixedCache",
    flatten_with_keys_fn=_with_names,
)
register_pytree_flatten_spec(FixedCache, lambda cache, _: _parts(cache)[0])


def _flat(cache: FixedCache) -> tuple[list[Any], int]:
    position, seen, keys, values = _parts(cache)[0]
    return [position, seen, *keys, *values], len(keys)


register_flat(FixedCache, _flat)
