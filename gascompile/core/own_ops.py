"""Own ops: the spaces of names of our ops of training steps, and which module registers each.

A process that reads a program with such ops may not have imported it yet.
"""

from __future__ import annotations

from typing import Final

OWN_OPS: Final = {
    "gascompile_dropout": "gascompile.training.capture.exact_dropout",
    "gascompile_norms": "gascompile.training.capture.cumulative_norms",
    "gascompile_ranks": "gascompile.training.optimizers.rank_ops",
    "gascompile_rows": "gascompile.training.planning.row_draws",
    "gascompile_stages": "gascompile.distributed.stage_ops",
    "gascompile_updates": "gascompile.training.optimizers.update_ops",
}
