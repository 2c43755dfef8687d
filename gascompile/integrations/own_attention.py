"""Own attention: functions of the program that transformers gives a mask under a trace, and none in a call."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from functools import partial

from torch import nn

from gascompile.capture.fingerprint.code_origin import origin_of_code, origin_of_name

_SKIPPING = ("sdpa_mask", "flash_attention_mask")
"""What makes masks and, where no row is padded, leaves the whole mask out; under a trace it cannot see that."""


def doubts(model: nn.Module) -> Iterator[str]:
    """Yield, in words, what a trace of the model may do otherwise than its calls do."""
    if "transformers" not in sys.modules:
        return
    from transformers import PreTrainedModel, masking_utils
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    skipping = {getattr(masking_utils, name, None) for name in _SKIPPING}
    models = (module for module in model.modules() if isinstance(module, PreTrainedModel))
    for name in sorted({str(module.config._attn_implementation) for module in models}):
        attend = _body(ALL_ATTENTION_FUNCTIONS.get(name))
        mask = _body(masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.get(name))
        if not _is_library(attend) and (mask in skipping or not _is_library(mask)):
            own = getattr(attend, "__qualname__", type(attend).__qualname__)
            yield (
                f"the attention '{name}' is the program's own, {own}: where no row is padded, transformers may call "
                "it without a mask when it runs eagerly, and with one when it is traced; the results are eager's "
                "only if it computes the same with both"
            )


def _body(function: object) -> object:
    """Return what is called in the end, within wrappers, partial calls and methods."""
    while isinstance(function, partial):
        function = function.func
    inner = inspect.unwrap(function) if callable(function) else function
    return inner.__func__ if inspect.ismethod(inner) else inner


def _is_library(function: object) -> bool:
    if inspect.isfunction(function):
        return origin_of_code(function).versioned
    return origin_of_name(type(function).__module__).versioned
