"""Written values: what others than steps have written to an open step's states, as a number that ranks compare."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from gascompile.core.content import content_of


class WrittenValues:
    """Adds up digests of what was written, whichever name came first; of a process that is alone, nothing.

    Values that ranks write alike, as all of them do in a loop, leave them alike. Each writing others of its own would
    let the ranks' parameters drift apart, though all have written as often.
    """

    def __init__(self) -> None:
        """Begin with none."""
        self.number = 0
        self._times: Counter[str] = Counter()

    def clear(self) -> None:
        """Forget all: every value was replaced by one that all ranks have."""
        self.number = 0
        self._times.clear()

    def note(self, name: str, value: torch.Tensor | Mapping[Any, Any]) -> None:
        """Take note of a tensor, or of all in a container, that was written to what is called ``name``."""
        if not _has_others():
            return
        self._times[name] += 1
        digest = hashlib.blake2b(f"{name} {self._times[name]}".encode(), digest_size=8)
        for leaf in pytree.tree_leaves(value):
            digest.update(
                content_of(leaf) if isinstance(leaf, torch.Tensor) else repr(leaf).encode()
            )
        self.number = (self.number + int.from_bytes(digest.digest())) % 2**64


def _has_others() -> bool:
    distributed = torch.distributed
    return (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )
