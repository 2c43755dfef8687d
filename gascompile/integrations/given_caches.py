"""Given caches: a cache of keys and values that a caller passes to a model, and has longer after the call."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Any

_log = logging.getLogger("gascompile")
_GROWING = ("DynamicCache", "EncoderDecoderCache")
"""Those that a call adds to by other tensors; what is written in place is written by plans, too."""


def give_back(given: Sequence[Any], outputs: Any) -> Any:
    """Let a cache among ``given`` hold what the model returns as its cache, and return that one, as models do.

    Args:
        given: the arguments of a call.
        outputs: what the plan returned, which is the caller's.
    """
    library = sys.modules.get("transformers.cache_utils")
    if library is None:
        return outputs
    kinds = tuple(getattr(library, name) for name in _GROWING)
    caches = [value for value in given if isinstance(value, kinds)]
    if not caches:
        return outputs
    (cache,) = caches[:1]
    named = outputs.items() if isinstance(outputs, dict) else enumerate(outputs)
    is_holder = isinstance(outputs, (dict, tuple, list))
    made = [key for key, value in named if type(value) is type(cache)] if is_holder else []
    if len(caches) > 1 or not made:
        _log.warning(
            "the cache that was given to the model is as long as before: the call returns no cache, which would be "
            "the longer one. Pass use_cache=True"
        )
        return outputs
    returned = [*outputs] if isinstance(outputs, tuple) else outputs
    vars(cache).update(vars(returned[made[0]]))
    returned[made[0]] = cache
    return type(outputs)(returned) if isinstance(outputs, tuple) else returned
