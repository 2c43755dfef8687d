"""Looked up: what was found in the cache for a compile."""

from __future__ import annotations

from dataclasses import dataclass

from gascompile.api.unit import Unit
from gascompile.bundles.reuse import CachedPlan
from gascompile.weights.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class LookedUp:
    """A place in the cache, and the plan in it, ready to run; ``None`` where none holds."""

    entry: CachedPlan
    checkpoint: Checkpoint | None
    unit: Unit | None
