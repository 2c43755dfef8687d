"""The two plans of generation, prefill and decode, which share weights, arena and budget.

Where a long prefill does not fit, shorter ones are tried; at the smallest budgets decode reads the prompt as well.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gascompile.api.compile import Job
from gascompile.api.together import plan_together
from gascompile.api.unit import Unit
from gascompile.capture.calls import RangedCall

_SHRINK = 4  # each size is planned: of 128 tokens, 32 and 8 follow
_SHORTEST = 3
"""Fewer tokens than this gain nothing over decode, and a dynamic dimension starts at two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """The plans of a generator."""

    decode: Unit
    prefill: Unit | None
    prefill_tokens: int
    """Most tokens of one prefill; 1 where decode reads the prompt token by token."""


def plan_generation(job: Job, prefill_tokens: int, *, again: bool = False) -> Units:
    """Return the plans of decode and of a prefill of at most ``prefill_tokens`` tokens.

    ``job.model`` is a ``DecodingStep``. The tokens of one prefill shrink where the budget asks for it. ``again``
    divides the budget anew, as runs have taught more about the memory of ops.

    Raises:
        InfeasiblePlanError: the budget is too small for decode alone; names the smallest feasible one.
        CaptureError: the model cannot be traced.
    """
    sizes = []
    while prefill_tokens >= _SHORTEST:
        sizes.append(prefill_tokens)
        prefill_tokens //= _SHRINK
    decode = _call(1)
    choices = [[decode, _call(tokens)] for tokens in sizes] + [[decode]]
    choice, units = plan_together(job, choices, again=again)
    return Units(
        decode=units[0],
        prefill=units[1] if len(units) > 1 else None,
        prefill_tokens=[*sizes, 1][choice],
    )


def _call(tokens: int) -> RangedCall:
    inputs = {
        "input_ids": torch.zeros(1, tokens, dtype=torch.long),
        "position": torch.tensor(0),
    }
    if tokens == 1:
        return RangedCall(inputs, None)
    length = torch.export.Dim("tokens", min=2, max=tokens)
    return RangedCall(inputs, {"input_ids": {1: length}, "position": None})
