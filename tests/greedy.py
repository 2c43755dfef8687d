"""The tokens that a language model of transformers answers with, in eager."""

from __future__ import annotations

from typing import Any

import torch


def eager_tokens(model: Any, prompt: torch.Tensor, num_new: int) -> list[int]:
    """Return the tokens after one prompt, the most likely one each time."""
    rows = prompt[None]
    output = model.generate(
        rows,
        attention_mask=torch.ones_like(rows),
        do_sample=False,
        max_new_tokens=num_new,
        pad_token_id=0,
    )
    return [int(token) for token in output[0, len(prompt) :]]
