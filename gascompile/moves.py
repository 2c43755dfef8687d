"""The moves that a plan inserts into a graph, as functions an FX node can call.

Each hands its arguments to the ``Mover`` that the runtime passes in, so that a rewritten graph reads
as a schedule while passes and runtime stay unknown to each other.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Mover(Protocol):
    """What the runtime does for a move. Only ``wait`` blocks."""

    def resident(self, tensor: str) -> torch.Tensor: ...

    def prefetch(self, tensor: str, link: str, address: int) -> None: ...

    def wait(self, tensor: str, address: int) -> torch.Tensor: ...

    def release(self, tensor: str, address: int) -> None: ...


def resident(mover: Mover, tensor: str) -> torch.Tensor:
    """Return the view of a weight or state that stays in the compute tier."""
    return mover.resident(tensor)


def prefetch(mover: Mover, tensor: str, link: str, address: int) -> None:
    """Start moving ``tensor`` over ``link`` to arena offset ``address``; returns at once."""
    mover.prefetch(tensor, link, address)


def wait(mover: Mover, tensor: str, address: int) -> torch.Tensor:
    """Block until ``tensor`` is at ``address`` and return the view of it."""
    return mover.wait(tensor, address)


def release(mover: Mover, tensor: str, address: int) -> None:
    """Promise that nothing reads ``tensor`` at ``address`` any more."""
    mover.release(tensor, address)


MOVES = (resident, prefetch, wait, release)
