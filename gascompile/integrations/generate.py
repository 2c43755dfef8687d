"""``generate`` of a compiled language model: transformers' own loop, over calls of few shapes.

Its loop, with sampling, beams, drafts and what else it knows, stays transformers'. What changes is the cache that it
fills: one of fixed size, so that every token is a call of one plan, a prompt of any length, in pieces, of another, and
drafts are verified by a third. The plans share an arena and the budget, of which keys and values take a part.
What fixed sizes cannot serve (encoder-decoders, states of another kind) runs as it would, with a plan per length.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from gascompile.capture.calls import bind_call
from gascompile.core.errors import CaptureError, PlanMismatchError, UnsupportedOpError
from gascompile.integrations.cache_argument import (
    CACHE_ARGUMENTS,
    argument_in,
    cache_argument,
)
from gascompile.integrations.huggingface import returns_past
from gascompile.integrations.pieces import (
    held_bytes,
    is_cut,
    joined,
    piece_of,
    ranged,
    with_masks,
)

if TYPE_CHECKING:
    from gascompile.api.unit import Unit
    from gascompile.integrations.fixed_cache import FixedCache

_log = logging.getLogger(__name__)

_SHORTEST = 256
"""A cache holds so many tokens, or a power of two above it: calls of other lengths then meet the same plans."""
_PIECES = (128, 32, 8)
"""Tokens of a prompt that are read at once; fewer where the budget is too small for more."""
_DRAFTS = 16
"""Tokens whose logits are all wanted, as those of drafts, are read so many at once."""
_MODES = frozenset({"greedy_search", "sample", "beam_search", "beam_sample", "assisted_generation"})
"""Modes of transformers' ``generate`` in which rows fill a cache at one pace."""

_arenas: WeakKeyDictionary[Any, dict[Any, tuple[int, tuple[Unit, ...]]]] = WeakKeyDictionary()
"""By model and kind of call: tokens of a prompt that are read at once, and the plans that share an arena."""
_shapes: WeakKeyDictionary[Any, list[tuple[torch.Tensor, torch.Tensor]] | None] = (
    WeakKeyDictionary()
)


def methods(cls: type) -> dict[str, Callable[..., Any]]:
    """Return what a compiled model of ``cls`` does in another way than its class; of other libraries, nothing."""
    if not hasattr(cls, "_prepare_cache_for_generation") or not hasattr(cls, "generate"):
        return {}

    held = cache_argument(cls.forward)  # type: ignore[attr-defined]

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        for name in CACHE_ARGUMENTS:
            if name != held and kwargs.get(name) is not None and held not in kwargs:
                kwargs[held] = kwargs.pop(name)  # its name in code for other versions
        if not any(map(_is_fixed, (*args, *kwargs.values()))):
            _refuse_static(kwargs.get(held), held)
            return self._gascompile.call(args, kwargs)
        args, kwargs = bind_call(self._gascompile.names, args, kwargs)
        return _forward(self, kwargs[held], args, kwargs)

    def prepare(self: Any, generation_config: Any, model_kwargs: Any, *args: Any, **kw: Any) -> Any:
        theirs = cls._prepare_cache_for_generation
        call = inspect.signature(theirs).bind(self, generation_config, model_kwargs, *args, **kw)
        if generation_config.use_cache is not False and not returns_past(self.config):
            _warn_of_no_past(cls)
            generation_config.use_cache = False
        cache = _cache_for(self, generation_config, model_kwargs, call.arguments)
        if cache is None:
            return theirs(self, generation_config, model_kwargs, *args, **kw)
        model_kwargs[held] = cache
        # Of a configuration that the loop has made for itself. There is a plan already.
        generation_config.disable_compile = True
        return None

    def inputs(self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        cache: Any = kwargs.get(held)
        if _is_fixed(cache):
            # Masks that depend on more than positions are the model's to make, for the whole call.
            cache.take_masks(any(kwargs.get(name) is not None for name in _SEEN))
        inputs_of_call = cls.prepare_inputs_for_generation(self, input_ids, *args, **kwargs)  # type: ignore[attr-defined]
        # What reads stop strings is passed on to models, none of which takes it.
        inputs_of_call.pop("tokenizer", None)
        return inputs_of_call

    return {
        "forward": forward,
        "_prepare_cache_for_generation": prepare,
        "prepare_inputs_for_generation": inputs,
    }


@functools.cache
def _warn_of_no_past(cls: type) -> None:
    _log.warning(
        "%s keeps a past that plans cannot return: each new token is computed with all before it",
        cls.__name__,
    )


_SEEN = ("token_type_ids", "mm_token_type_ids", "block_sequence_ids")
"""What models let attention depend on beside positions."""


def _is_fixed(value: Any) -> bool:
    """Return whether a value is a cache of ours."""
    # What loads transformers' caches is imported with the first of ours.
    module = sys.modules.get("gascompile.integrations.fixed_cache")
    return module is not None and isinstance(value, module.FixedCache)


def _refuse_static(cache: Any, held: str) -> None:
    """Refuse transformers' own caches of a fixed size, which a call has under the name ``held``.

    Raises:
        UnsupportedOpError: says what to do.
    """
    library = sys.modules.get("transformers.cache_utils")
    if library is not None and isinstance(
        getattr(cache, "self_attention_cache", cache), library.StaticCache
    ):
        raise UnsupportedOpError(
            "a StaticCache is for calls that torch.compile traces, and no input of a plan; leave out "
            f"{held}= and cache_implementation=: a decoder that is compiled makes a cache of fixed size by itself"
        )


def _cache_for(
    compiled: Any, config: Any, given: dict[str, Any], of: dict[str, Any]
) -> FixedCache | None:
    """Return an empty cache for one ``generate``, or ``None`` where transformers' own is to be taken."""
    mode = getattr(of.get("generation_mode"), "value", None)
    rows, length = of.get("batch_size"), of.get("max_cache_length")
    if mode not in _MODES or not isinstance(rows, int) or not isinstance(length, int):
        return None
    if any(given.get(name) is not None for name in CACHE_ARGUMENTS) or config.use_cache is False:
        return None
    # Static caches are of a fixed size, too.
    if config.cache_implementation not in (None, "static"):
        return None
    # What is returned of attention is as long as the cache.
    if getattr(config, "output_attentions", False):
        return None
    # Layers with windows that look ahead see other tokens of a cache that grows.
    if not getattr(compiled.config.get_text_config(), "is_causal", True):
        return None
    # An accelerator has copies of its inputs, which a program may not write to.
    if compiled._gascompile.planning.machine.compute_tier != "cpu":
        return None
    if compiled.config.is_encoder_decoder or not compiled._supports_default_dynamic_cache():
        return None
    shapes = _past_of(compiled)
    if shapes is None:
        return None
    from gascompile.integrations.fixed_cache import FixedCache

    rows *= max(config.num_beams or 1, config.num_return_sequences or 1)
    cache = FixedCache.empty(shapes, max(_SHORTEST, 1 << (length - 1).bit_length()), rows)
    cache.has_drafts = mode == "assisted_generation"
    return cache


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
    """Call the model with a cache of fixed size, in pieces where it has several tokens.

    Raises:
        PlanMismatchError: the call has no tokens, or other rows than the cache.
    """
    ids: Any = kwargs.get("input_ids")
    sized = ids if ids is not None else kwargs.get("inputs_embeds")
    if sized is None:
        raise PlanMismatchError("a call with a cache has input_ids= or inputs_embeds=; pass one")
    if kwargs.get("return_dict") == getattr(compiled.config, "return_dict", None):
        # Loops that say what goes without saying meet the plans of those that do not.
        kwargs.pop("return_dict", None)
    rows, num_tokens = sized.shape[:2]
    if num_tokens == 0:
        raise PlanMismatchError("a call with a cache has a token at least that the cache lacks")
    if rows != cache.rows:
        raise PlanMismatchError(
            f"the call has {rows} rows and the cache holds {cache.rows}; its batch_repeat_interleave and "
            "batch_select_indices give it others"
        )
    cache.make_room(num_tokens)
    if args or not is_cut(compiled, kwargs):
        call = with_masks(compiled, kwargs, rows, num_tokens)
        result = compiled._gascompile.call(args, call, held_bytes(cache))
        return _moved_on(result, cache, num_tokens)
    keep = kwargs.get("logits_to_keep")
    wanted = num_tokens if not isinstance(keep, int) or keep == 0 else min(keep, num_tokens)
    most = _planned_for(compiled, cache, kwargs, rows)
    results, done = [], 0
    while done < num_tokens:
        is_prompt = wanted == 1 or num_tokens - done > wanted
        size = most if is_prompt or keep is None else _DRAFTS
        end = min(done + size, num_tokens if wanted == 1 or not is_prompt else num_tokens - wanted)
        asked = None if keep is None else int(is_prompt or end - done == 1)
        piece = piece_of(compiled, kwargs, done, end, asked)
        piece = with_masks(compiled, piece, rows, end - done)
        result = compiled._gascompile.call((), piece, held_bytes(cache))
        result = _moved_on(result, cache, end - done)
        if not is_prompt or wanted == 1:
            results.append(result)
        done = end
    return results[-1] if wanted == 1 else joined(results)


def _planned_for(compiled: Any, cache: FixedCache, kwargs: dict[str, Any], rows: int) -> int:
    """Have plans for all pieces of calls like this one, which share an arena; return how many tokens they have.

    Raises:
        InfeasiblePlanError: the budget is too small for the cache and a token; names the smallest feasible one.
    """
    names = tuple(name for name, value in kwargs.items() if value is not None)
    key = (rows, cache.size, cache.has_drafts, names)
    known = _arenas.setdefault(compiled, {})
    if key in known and compiled._gascompile.holds(known[key][1]):
        return known[key][0]
    keep = None if kwargs.get("logits_to_keep") is None else 1
    piece = with_masks(compiled, piece_of(compiled, kwargs, 0, 1, keep), rows, 1)
    drafts = []
    if cache.has_drafts and keep is not None:
        drafts.append(ranged(piece | {"logits_to_keep": 0}, _DRAFTS))
    from gascompile.api.together import plan_together  # most calls generate nothing

    token, prompts = ranged(piece, 1), [ranged(piece, size) for size in _PIECES]
    choices = [[token, prompt, *drafts] for prompt in prompts] + [[token, *drafts]]
    taken_bytes = [
        held_bytes(cache, longest) for longest in (*prompts, drafts[0] if drafts else token)
    ]
    try:
        choice, units = compiled._gascompile.together(
            lambda job: plan_together(job, choices, taken_bytes=taken_bytes)
        )
    except (CaptureError, UnsupportedOpError) as error:
        _log.info("%s gets a plan for each length: %s", type(compiled).__name__, error)
        choice, units = 0, ()
    known[key] = ([*_PIECES, 1][choice], units)
    return known[key][0]


def _moved_on(result: Any, cache: FixedCache, num_tokens: int) -> Any:
    cache.advance(num_tokens)
    if isinstance(result, tuple):
        return tuple(cache if _is_fixed(value) else value for value in result)
    setattr(result, argument_in(vars(result)), cache)
    return result
