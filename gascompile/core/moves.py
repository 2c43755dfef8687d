"""The moves that a plan inserts into a graph, as functions an FX node can call.

Each hands its arguments to the ``Mover`` that the runtime passes in, so that a rewritten graph reads
as a schedule while passes and runtime stay unknown to each other.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Mover(Protocol):
    """What the runtime does for a move. Only ``wait``, ``gather`` and ``settle`` block."""

    def resident(self, tensor: str) -> torch.Tensor: ...

    def fetch(self, tensor: str, link: str, place: str, address: int) -> None: ...

    def evict(self, tensor: str, place: str, address: int) -> None: ...

    def prefetch(self, tensor: str, link: str, address: int) -> None: ...

    def wait(self, tensor: str, address: int) -> torch.Tensor: ...

    def release(self, tensor: str, address: int) -> None: ...

    def gather(self, tensor: str, indices: torch.Tensor) -> torch.Tensor: ...

    def offload(self, tensor: str, link: str, value: torch.Tensor) -> None: ...

    def reload(self, tensor: str, link: str, value: torch.Tensor) -> None: ...

    def send(self, tensor: str, link: str, value: torch.Tensor) -> torch.Tensor: ...

    def settle(self, tensor: str) -> None: ...

    def drop(self, tensor: str, value: torch.Tensor) -> None: ...


def resident(mover: Mover, tensor: str) -> torch.Tensor:
    """Return the view of a weight or state that stays in the compute tier."""
    return mover.resident(tensor)


def fetch(mover: Mover, tensor: str, link: str, place: str, address: int) -> None:
    """Start reading ``tensor`` over ``link`` to offset ``address`` of the arena in ``place``, half the way."""
    mover.fetch(tensor, link, place, address)


def evict(mover: Mover, tensor: str, place: str, address: int) -> None:
    """Promise that ``tensor`` is not pushed on from ``place`` any more."""
    mover.evict(tensor, place, address)


def prefetch(mover: Mover, tensor: str, link: str, address: int) -> None:
    """Start moving ``tensor`` over ``link`` to arena offset ``address``; returns at once."""
    mover.prefetch(tensor, link, address)


def wait(mover: Mover, tensor: str, address: int) -> torch.Tensor:
    """Block until ``tensor`` is at ``address`` and return the view of it."""
    return mover.wait(tensor, address)


def release(mover: Mover, tensor: str, address: int) -> None:
    """Promise that nothing reads ``tensor`` at ``address`` any more."""
    mover.release(tensor, address)


def gather(mover: Mover, tensor: str, indices: torch.Tensor) -> torch.Tensor:
    """Read the rows of ``tensor`` that ``indices`` names from its slow tier and return them: an embedding."""
    return mover.gather(tensor, indices)


def offload(mover: Mover, tensor: str, link: str, value: torch.Tensor) -> None:
    """Start copying the memory of ``value`` out over ``link``; returns at once.

    What has a name of its own goes where it is kept, a result of an op (``%...``) to wherever there is room meanwhile.
    """
    mover.offload(tensor, link, value)


def reload(mover: Mover, tensor: str, link: str, value: torch.Tensor) -> None:
    """Take memory for ``value`` and its views again and start copying back; returns at once."""
    mover.reload(tensor, link, value)


def send(mover: Mover, tensor: str, link: str, value: torch.Tensor) -> torch.Tensor:
    """Start copying ``value`` to the processor at the other end of ``link``, and return the copy; returns at once.

    Ops on both processors go on, and wait at ``settle``.
    """
    return mover.send(tensor, link, value)


def settle(mover: Mover, tensor: str) -> None:
    """Block until the newest copy of ``tensor``, out or back, is complete."""
    mover.settle(tensor)


def drop(mover: Mover, tensor: str, value: torch.Tensor) -> None:
    """Give back the memory of ``value`` and its views, which stay as they are but for their bytes."""
    mover.drop(tensor, value)


HEAP_MOVES = (offload, reload, settle, drop)
"""Moves of what has no place in the arena."""
MOVES = (resident, fetch, evict, prefetch, wait, release, gather, send, *HEAP_MOVES)


def linear_tile(
    out: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    begin: int,
    features: int,
) -> torch.Tensor:
    """Compute the output features of a linear layer that begin at ``begin``, in place, and return all of them.

    Args:
        out: what the tiles before have written; ``None`` makes room for all ``features``.
        x: the layer's input.
        weight: the rows of the layer's weight that belong to the tile.
        bias: the layer's whole bias.
        begin: first output feature of the tile.
        features: output features of the layer.
    """
    if out is None:
        out = x.new_empty((*x.shape[:-1], features))
    part = out.view(-1, features)[:, begin : begin + weight.shape[0]]
    rows = x.reshape(-1, x.shape[-1])
    if bias is None:
        torch.mm(rows, weight.t(), out=part)
    else:
        torch.addmm(bias[begin : begin + weight.shape[0]], rows, weight.t(), out=part)
    return out
