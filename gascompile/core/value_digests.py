"""Value digests: whether ranks have the same tensors, by a few bytes that they compare."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch

from gascompile.core.content import content_of


def digest_of(values: Iterable[Any]) -> str:
    """Return a digest of tensors of the host, their types and shapes, and of other values by what they print as."""
    digest = hashlib.blake2b(digest_size=16)
    for leaf in values:
        if not isinstance(leaf, torch.Tensor):
            digest.update(repr(leaf).encode())
            continue
        digest.update(f"{leaf.dtype} {list(leaf.shape)}".encode())
        digest.update(content_of(leaf))
    return digest.hexdigest()
