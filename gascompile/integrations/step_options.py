"""Options of steps that users give a trainer of another library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TRAINERS_OWN = [
    "accumulate",
    "max_grad_norm",
    "example_batch",
    "optimizer",
    "loss_fn",
    "model",
    "budget",
]
"""What trainers say, or have, in place of ``compile_step``'s arguments."""


def own_options(step_options: Mapping[str, Any] | None, who: str) -> dict[str, Any]:
    """Return what ``compile_step`` gets beside what ``who`` say; raises ``ValueError`` where both do."""
    options = dict(step_options or {})
    if twice := sorted(options.keys() & {*_TRAINERS_OWN}):
        raise ValueError(f"step_options has '{twice[0]}', which {who} say; leave it out")
    return options
