"""Own attention: functions of the program that transformers gives a mask under a trace, and none in a call."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator

from torch import nn

from gascompile.capture.fingerprint.code_origin import origin_of_code

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
        function = ALL_ATTENTION_FUNCTIONS.get(name)
        if not inspect.isfunction(function) or origin_of_code(function).versioned:
            continue
        if masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.get(name) in skipping:
            yield (
                f"the attention '{name}' is {function.__module__}.{function.__qualname__}: where no row is padded, "
                "transformers calls it without a mask when it runs eagerly, and with one when it is traced; the "
                "results are eager's only if it computes the same with both"
            )
