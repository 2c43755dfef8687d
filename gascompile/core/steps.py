"""Steps of a plan: what is done when, in the order of issue. A closed union, which ``verify`` walks."""

from __future__ import annotations

from dataclasses import dataclass, field

from gascompile.core.serial import json_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """Run op ``op`` of the workload."""

    op: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefetch:
    """Start reading ``tensor`` over ``link`` to ``address`` of the compute tier's arena."""

    op: int
    """Index of the op before which the step stands; ``len(ops)`` at the end of an iteration."""
    tensor: str
    link: str
    size_bytes: int = field(metadata=json_name("bytes"))
    address: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Block until the newest transfer of ``tensor`` (at ``address``) is complete."""

    op: int
    tensor: str
    address: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """From here on the bytes of ``tensor`` (at ``address``) may be overwritten."""

    op: int
    tensor: str
    address: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """Start copying ``tensor`` out of the compute tier over ``link``. Its bytes stay until a ``Release``."""

    op: int
    tensor: str
    link: str
    size_bytes: int = field(metadata=json_name("bytes"))
    address: int | None = None
    """``None``: the tensor has no fixed place in the arena; the same holds for the steps around it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reload:
    """Take memory for ``tensor`` and start copying it back over ``link``."""

    op: int
    tensor: str
    link: str
    size_bytes: int = field(metadata=json_name("bytes"))
    address: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """Run op ``source`` again: what it writes comes back without a transfer."""

    op: int
    source: int


Step = Compute | Prefetch | Wait | Release | Offload | Reload | Recompute
"""A plan's steps stand in program order."""
