"""Steps of a plan: what is done when, in the order of issue. A closed union, which ``verify`` walks.

A file calls a step by its ``TAG``. Two steps share one where a field, named in ``WITH``, tells them apart: what runs
for the first time and ``again``, what is loaded to an ``address`` of the arena and to the heap, and what is loaded to
or freed of a ``place`` on the way there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from gascompile.core.serial import json_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """Run op ``op`` of the workload."""

    TAG: ClassVar[str] = "run"

    op: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefetch:
    """Start reading ``tensor`` over ``link`` to ``address`` of the compute tier's arena."""

    TAG: ClassVar[str] = "load"
    WITH: ClassVar[str] = "address"

    op: int
    """Index of the op before which the step stands; ``len(ops)`` at the end of an iteration."""
    tensor: str
    link: str
    size_bytes: int = field(metadata=json_name("bytes"))
    address: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """Start reading ``tensor`` from its home over ``link`` to ``address`` of the arena of ``place``, half the way.

    From there a ``Prefetch`` over a link from ``place`` pushes it on, as often as it is needed; the push begins once
    the bytes are there, and nobody waits for them before.
    """

    TAG: ClassVar[str] = "load"
    WITH: ClassVar[str] = "place"

    op: int
    tensor: str
    link: str
    size_bytes: int = field(metadata=json_name("bytes"))
    place: str
    """The link's target, which does not compute."""
    address: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Evict:
    """From here on the bytes of ``tensor`` at ``address`` of the arena of ``place`` may be overwritten."""

    TAG: ClassVar[str] = "free"
    WITH: ClassVar[str] = "place"

    op: int
    tensor: str
    place: str
    address: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Block until the newest transfer of ``tensor`` (at ``address``) is complete."""

    TAG: ClassVar[str] = "wait"

    op: int
    tensor: str
    address: int | None = field(default=None, metadata={"left_out": True})
    site: str | None = field(default=None, metadata={"left_out": True})
    """The other site that alone blocks, where the tier that computes goes on; it waits by itself later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """From here on the bytes of ``tensor`` (at ``address``) may be overwritten."""

    TAG: ClassVar[str] = "free"

    op: int
    tensor: str
    address: int | None = field(default=None, metadata={"left_out": True})


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """Start copying ``tensor`` out of the compute tier over ``link``. Its bytes stay until a ``Release``."""

    TAG: ClassVar[str] = "store"
    address: ClassVar[None] = None
    """The tensor has no fixed place in the arena; the same holds for the steps around it."""

    op: int
    tensor: str
    link: str
    size_bytes: int = field(metadata=json_name("bytes"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reload:
    """Take memory for ``tensor`` and start copying it back over ``link``."""

    TAG: ClassVar[str] = "load"
    address: ClassVar[None] = None

    op: int
    tensor: str
    link: str
    size_bytes: int = field(metadata=json_name("bytes"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """Run op ``source`` again: what it writes comes back without a transfer."""

    TAG: ClassVar[str] = "run"
    WITH: ClassVar[str] = "again"

    op: int
    source: int = field(metadata=json_name("again"))


Step = Compute | Fetch | Evict | Prefetch | Wait | Release | Offload | Reload | Recompute
"""A plan's steps stand in program order. Of those that share a ``TAG``, who is told by more fields stands first."""


def fetched_to(steps: Iterable[Step]) -> dict[str, str]:
    """Return the place in between of each tensor that makes its way in two hops."""
    return {step.tensor: step.place for step in steps if isinstance(step, Fetch)}


def is_push(step: Step, middle: Mapping[str, str]) -> bool:
    """Return whether ``step`` is the second hop of a tensor; ``middle`` is what ``fetched_to`` returns."""
    return isinstance(step, Prefetch) and middle.get(step.tensor) == step.link.partition("->")[0]
