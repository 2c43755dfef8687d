"""Pieces: a call with a cache of fixed size as calls of few shapes.

A prompt of any length is cut into pieces of at most ``most`` tokens. Masks are made piece by piece, so that none is
larger than a piece times the text before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from gascompile.capture.calls import RangedCall
from gascompile.core.errors import PlanMismatchError
from gascompile.integrations.cache_argument import CACHE_ARGUMENTS, argument_in, cache_argument

if TYPE_CHECKING:
    from gascompile.integrations.fixed_cache import FixedCache

KNOWN = frozenset(
    {"input_ids", "position_ids", "attention_mask", *CACHE_ARGUMENTS, "use_cache", "logits_to_keep",
     "return_dict"}
)  # fmt: skip
"""What a piece can be cut out of."""
_OF_MASKS = ("token_type_ids", "mm_token_type_ids", "block_sequence_ids")
_OTHER_MASKS = ("layer_types", "sliding_window", "attention_chunk_size")
"""Settings with which layers look at other tokens than all before."""
_MORE = ("output_hidden_states", "output_attentions", "output_router_logits")
"""Settings of a model with which it returns more than logits and a cache."""


def is_cut(compiled: Any, kwargs: Mapping[str, Any]) -> bool:
    """Return whether pieces can be cut out of a call, and their results be put together."""
    mask, keep = kwargs.get("attention_mask"), kwargs.get("logits_to_keep")
    return (
        kwargs.get("input_ids") is not None
        and {name for name, value in kwargs.items() if value is not None} <= KNOWN
        and (mask is None or (isinstance(mask, torch.Tensor) and mask.dim() == 2))
        # Others than so many of the last tokens may lie in any piece.
        and (keep is None or (isinstance(keep, int) and keep >= 0))
        and not any(getattr(compiled.config.get_text_config(), name, False) for name in _MORE)
    )


def piece_of(
    compiled: Any, kwargs: Mapping[str, Any], begin: int, end: int, keep: int | None
) -> dict[str, Any]:
    """Return the arguments for the tokens of a call from ``begin`` up to ``end``.

    Args:
        compiled: the model.
        kwargs: the whole call, whose mask has two dimensions if there is one.
        begin: first token, of those that the cache does not hold.
        end: token after the last.
        keep: of how many tokens logits are wanted, 0 for all; ``None`` for a model that is not asked.
    """
    piece = dict(kwargs)
    ids = kwargs["input_ids"]
    num_tokens = ids.shape[1]
    piece["input_ids"] = ids[:, begin:end].contiguous()
    if (positions := kwargs.get("position_ids")) is not None:
        piece["position_ids"] = positions[..., begin:end].contiguous()
    if keep is not None:
        piece["logits_to_keep"] = keep
    mask = kwargs.get("attention_mask")
    if mask is not None and end < num_tokens:
        mask = mask[:, : mask.shape[1] - (num_tokens - end)]
    piece["attention_mask"] = mask
    return piece


def with_masks(
    compiled: Any, call: Mapping[str, Any], rows: int, num_tokens: int
) -> dict[str, Any]:
    """Return a call with the masks that its layers need, of one shape whatever they leave out.

    Raises:
        PlanMismatchError: the call has a mask of its own making, for keys of another length.
    """
    from transformers.masking_utils import create_masks_for_generate

    cache: FixedCache = call[argument_in(call)]
    window = cache.look(num_tokens)
    mask = call.get("attention_mask")
    if mask is None:
        mask = torch.ones(rows, cache.get_seq_length() + num_tokens, dtype=torch.long)
    if isinstance(mask, torch.Tensor) and mask.dim() == 2:
        quick = token_mask(compiled, call, mask, window) if num_tokens == 1 else None
        if quick is not None and cache.has_plain_masks:
            return dict(call) | {"attention_mask": quick}
        make: Any = getattr(compiled, "create_masks_for_generate", create_masks_for_generate)
        mask = make(
            config=compiled.config,
            inputs_embeds=torch.empty(rows, num_tokens, 0, dtype=cache.dtype),
            attention_mask=mask,
            position_ids=call.get("position_ids"),
            **{cache_argument(make): cache},
            **{name: call.get(name) for name in _OF_MASKS},
        )
    else:
        quick = None
    masks = mask.values() if isinstance(mask, dict) else (mask,)
    if any(of is not None and of.shape[-1] != window for of in masks):
        raise PlanMismatchError(
            f"the mask is not for the {window} positions that this call looks at; pass attention_mask= of [rows, "
            "tokens], from which the model makes what it needs"
        )

    def whole(of: torch.Tensor | None) -> torch.Tensor:
        if of is not None:
            return of.contiguous()
        # Left out where all before a token counts; attention alone would take its shape for that.
        past = cache.get_seq_length()
        return (
            (torch.arange(past, past + num_tokens)[:, None] >= torch.arange(window)[None])
            .expand(rows, 1, num_tokens, window)
            .contiguous()
        )

    made = {k: whole(of) for k, of in mask.items()} if isinstance(mask, dict) else whole(mask)
    if num_tokens == 1:
        # From then on as long as nothing says otherwise: the library's way takes longer than small layers do.
        cache.has_plain_masks = (
            isinstance(quick, torch.Tensor)
            and isinstance(made, torch.Tensor)
            and torch.equal(made, quick)
        )
    return dict(call) | {"attention_mask": made}


def token_mask(
    compiled: Any, call: Mapping[str, Any], mask: torch.Tensor, window: int
) -> torch.Tensor | None:
    """Return the mask of one token that looks at all before it, or ``None`` where layers may need others.

    Args:
        compiled: the model.
        call: with what masks may depend on beside positions.
        mask: which tokens count, ``[rows, tokens]`` with that of the call.
        window: positions that the call looks at.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

    config = compiled.config.get_text_config()
    if (
        getattr(compiled, "create_masks_for_generate", None) is not None
        or any(call.get(name) is not None for name in _OF_MASKS)
        or any(getattr(config, name, None) is not None for name in _OTHER_MASKS)
        or not getattr(config, "is_causal", True)
        or config._attn_implementation != "sdpa"
        or ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] is not sdpa_mask
    ):
        return None
    rows, num_tokens = mask.shape
    if num_tokens != call[argument_in(call)].get_seq_length() + 1:
        return None
    seen = torch.zeros(rows, 1, 1, window, dtype=torch.bool)
    seen[:, 0, 0, :num_tokens] = mask
    return seen


def ranged(piece: Mapping[str, Any], most: int) -> RangedCall:
    """Return what the plan for pieces of two to ``most`` tokens, or of one, is made from, after texts of any length.

    Args:
        piece: a call of any number of tokens, with its masks.
        most: tokens of the longest one.
    """
    held = argument_in(piece)
    cache: FixedCache = piece[held]
    window = cache.seen.shape[0]
    seen = torch.export.Dim("seen", min=2, max=cache.size)
    tokens = torch.export.Dim("tokens", min=2, max=most) if most > 1 else None

    def of(name: str, value: Any) -> tuple[Any, Any]:
        """Return a value for the longest call and its dimensions."""
        if name == held:
            nothing = [None] * len(value.layers)
            return value.whole(), [None, {0: seen}, nothing, nothing]
        if isinstance(value, dict):
            parts = {key: of(name, part) for key, part in value.items()}
            return {k: p[0] for k, p in parts.items()}, {k: p[1] for k, p in parts.items()}
        if not isinstance(value, torch.Tensor):
            return value, None
        shape, dims = list(value.shape), {}
        if name == "attention_mask" and shape[-1] == window:
            dims[value.dim() - 1], shape[-1] = seen, cache.size
        dim = {"input_ids": 1, "position_ids": value.dim() - 1}.get(name, 2)
        if dim < value.dim():
            shape[dim] = most
            dims |= {dim: tokens} if tokens is not None else {}
        return value.new_zeros(shape), dims or None

    made = {name: of(name, value) for name, value in piece.items()}
    return RangedCall({k: p[0] for k, p in made.items()}, {k: p[1] for k, p in made.items()})


def held_bytes(cache: FixedCache, call: RangedCall | None = None) -> int:
    """Return what the caller of a piece has in memory: the cache, a layer of it that is put in order, and masks."""
    num_bytes = cache.num_bytes + cache.keys_bytes
    if call is None:
        return num_bytes
    given = dict(call.kwargs) | {argument_in(call.kwargs): None}
    # A mask is put together from another one.
    return num_bytes + 2 * sum(
        leaf.numel() * leaf.element_size()
        for leaf in pytree.tree_leaves(given)
        if isinstance(leaf, torch.Tensor)
    )


def joined(results: list[Any]) -> Any:
    """Return the result of a call from those of its pieces, whose logits are all wanted."""
    last = results[-1]
    if len(results) == 1:
        return last
    if isinstance(last, tuple):
        return (torch.cat([result[0] for result in results], 1), *last[1:])
    last.logits = torch.cat([result.logits for result in results], 1)
    return last
