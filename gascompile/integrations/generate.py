"""``generate`` of a compiled language model: transformers' own loop, over calls of few shapes.

Its loop, with sampling, beams and what else it knows, stays transformers'. What changes is the cache that it fills:
one of fixed size, so that every token is a call of one plan, and a prompt of any length, in pieces, of another. Keys
and values are the caller's, as under transformers: the budget does not count them. What fixed sizes cannot serve
(encoder-decoders, states of another kind, drafts that are taken back) runs as it would, with a plan per length.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from gascompile.capture.calls import RangedCall, bind_call
from gascompile.core.errors import InfeasiblePlanError, PlanMismatchError, UnsupportedOpError

if TYPE_CHECKING:
    from gascompile.integrations.fixed_cache import FixedCache

_log = logging.getLogger(__name__)

_SHORTEST = 256
"""A cache holds so many tokens, or a power of two above it: calls of other lengths then meet the same plans."""
_PIECES = (128, 32, 8, 1)
"""Tokens of a prompt that are read at once; fewer where the budget is too small for more."""
_MODES = frozenset({"greedy_search", "sample", "beam_search", "beam_sample"})
"""Modes of transformers' ``generate`` that never take a token back."""
_KNOWN = frozenset(
    {"input_ids", "position_ids", "attention_mask", "past_key_values", "use_cache", "logits_to_keep",
     "return_dict"}
)  # fmt: skip
"""What a piece of a prompt can be cut out of."""

_pieces: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
_shapes: WeakKeyDictionary[Any, list[tuple[torch.Tensor, torch.Tensor]] | None] = (
    WeakKeyDictionary()
)


def methods(cls: type) -> dict[str, Callable[..., Any]]:
    """Return what a compiled model of ``cls`` does in another way than its class; of other libraries, nothing."""
    if not hasattr(cls, "_prepare_cache_for_generation") or not hasattr(cls, "generate"):
        return {}

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not any(hasattr(value, "advance") for value in (*args, *kwargs.values())):
            return self._gascompile.call(args, kwargs)
        args, kwargs = bind_call(self._gascompile.positional, args, kwargs)
        return _forward(self, kwargs["past_key_values"], args, kwargs)

    def prepare(self: Any, generation_config: Any, model_kwargs: Any, *args: Any, **kw: Any) -> Any:
        theirs = cls._prepare_cache_for_generation
        found = inspect.signature(theirs).bind(self, generation_config, model_kwargs, *args, **kw)
        cache = _cache_for(self, generation_config, model_kwargs, found.arguments)
        if cache is None:
            return theirs(self, generation_config, model_kwargs, *args, **kw)
        model_kwargs["past_key_values"] = cache
        # Of a configuration that the loop has made for itself. There is a plan already.
        generation_config.disable_compile = True
        return None

    return {"forward": forward, "_prepare_cache_for_generation": prepare}


def _cache_for(
    compiled: Any, config: Any, given: dict[str, Any], of: dict[str, Any]
) -> FixedCache | None:
    """Return an empty cache for one ``generate``, or ``None`` where transformers' own is to be taken."""
    mode = getattr(of.get("generation_mode"), "value", None)
    rows, length = of.get("batch_size"), of.get("max_cache_length")
    if mode not in _MODES or not isinstance(rows, int) or not isinstance(length, int):
        return None
    if given.get("past_key_values") is not None or config.use_cache is False:
        return None
    if config.cache_implementation is not None or getattr(config, "is_assistant", False):
        return None
    # What is returned of attention is as long as the cache.
    if getattr(config, "output_attentions", False):
        return None
    # An accelerator has copies of its inputs, which a program may not write to.
    if compiled._gascompile.planning.machine.compute_tier != "cpu":
        return None
    if compiled.config.is_encoder_decoder or not compiled._supports_default_dynamic_cache():
        return None
    shapes = _past_of(compiled)
    if shapes is None:
        return None
    from gascompile.integrations.fixed_cache import FixedCache, empty_past

    rows *= max(config.num_beams or 1, config.num_return_sequences or 1)
    size = max(_SHORTEST, 1 << (length - 1).bit_length())
    keys, values = (
        [empty_past(kind, size, rows) for kind in kinds] for kinds in zip(*shapes, strict=True)
    )
    return FixedCache(torch.tensor(0), keys, values)


def _past_of(compiled: Any) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
    """Return keys and values per layer, without values; ``None`` for a model that keeps another past."""
    if compiled not in _shapes:
        from gascompile.integrations.fixed_cache import cache_shapes

        try:
            _shapes[compiled] = cache_shapes(compiled._gascompile.planning.model)
        except UnsupportedOpError as error:
            _log.info("%s generates with a cache that grows: %s", type(compiled).__name__, error)
            _shapes[compiled] = None
    return _shapes[compiled]


def _forward(
    compiled: Any, cache: FixedCache, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call the model with a cache of fixed size, in pieces where it is a prompt."""
    ids: Any = kwargs.get("input_ids")
    keep = kwargs.get("logits_to_keep")
    is_known = not args and ids is not None and _is_cut(kwargs)
    sized = ids if ids is not None else kwargs.get("inputs_embeds")
    if sized is None:
        raise PlanMismatchError("a call with a cache has input_ids= or inputs_embeds=; pass one")
    num_tokens = sized.shape[1]
    cache.require_room(num_tokens)
    if not is_known:
        return _moved_on(compiled._gascompile.call(args, kwargs), cache, num_tokens)
    if num_tokens > _PIECES[0] and keep != 1:
        return _moved_on(compiled._gascompile.call(args, kwargs), cache, num_tokens)
    done = 0
    while done < num_tokens:
        most = _pieces.get(compiled, _PIECES[0]) if keep == 1 else _PIECES[0]
        end = min(done + most, num_tokens)
        piece = _cut(kwargs, done, end, num_tokens)
        try:
            result = compiled._gascompile.call((), piece, _ranged(piece, end - done, most))
        except InfeasiblePlanError:
            if most == 1 or end - done == 1 or keep != 1:
                raise
            _pieces[compiled] = next(size for size in _PIECES if size < end - done)
            continue
        result = _moved_on(result, cache, end - done)
        done = end
    return result


def _is_cut(kwargs: dict[str, Any]) -> bool:
    """Return whether pieces can be cut out of a call."""
    mask = kwargs.get("attention_mask")
    masks = mask.values() if isinstance(mask, dict) else (mask,)
    return {name for name, value in kwargs.items() if value is not None} <= _KNOWN and all(
        of is None or of.dim() == 4 for of in masks
    )


def _moved_on(result: Any, cache: FixedCache, num_tokens: int) -> Any:
    cache.advance(num_tokens)
    if isinstance(result, tuple):
        return tuple(cache if hasattr(value, "advance") else value for value in result)
    result.past_key_values = cache
    return result


def _cut(kwargs: dict[str, Any], begin: int, end: int, num_tokens: int) -> dict[str, Any]:
    """Return the arguments for some of the tokens of a call."""
    if (begin, end) == (0, num_tokens):
        return kwargs
    piece = dict(kwargs)
    piece["input_ids"] = kwargs["input_ids"][:, begin:end].contiguous()
    if (positions := kwargs.get("position_ids")) is not None:
        piece["position_ids"] = positions[..., begin:end].contiguous()
    mask = kwargs.get("attention_mask")
    if isinstance(mask, dict):
        piece["attention_mask"] = {name: _rows(of, begin, end) for name, of in mask.items()}
    elif mask is not None:
        piece["attention_mask"] = _rows(mask, begin, end)
    return piece


def _rows(mask: torch.Tensor | None, begin: int, end: int) -> torch.Tensor | None:
    return None if mask is None else mask[:, :, begin:end].contiguous()


def _ranged(piece: dict[str, Any], num_tokens: int, most: int) -> RangedCall | None:
    """Return what the plan of a piece is made from: one for all of two to ``most`` tokens."""
    if num_tokens == 1:
        return None
    tokens = torch.export.Dim("tokens", min=2, max=most)

    def of(name: str, value: Any) -> tuple[Any, Any]:
        """Return a value for ``most`` tokens and its dimensions."""
        if name == "past_key_values":
            nothing = [None] * len(value.layers)
            return value, [None, nothing, nothing]
        if isinstance(value, dict):
            parts = {key: of(name, part) for key, part in value.items()}
            return {k: p[0] for k, p in parts.items()}, {k: p[1] for k, p in parts.items()}
        if not isinstance(value, torch.Tensor):
            return value, None
        dim = {"input_ids": 1, "position_ids": value.dim() - 1}.get(name, 2)
        if value.shape[dim] != num_tokens:
            return value, None
        shape = [most if i == dim else size for i, size in enumerate(value.shape)]
        return value.new_zeros(shape), {dim: tokens}

    made = {name: of(name, value) for name, value in piece.items()}
    return RangedCall({k: p[0] for k, p in made.items()}, {k: p[1] for k, p in made.items()})
