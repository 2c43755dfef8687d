"""What a replay predicts and a run measures. Frozen, and free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

UNLIKELY = 1.1
"""So many times faster than its limit is more than good measurements spread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """Time an op waited for a transfer."""

    op: int
    tensor: str
    time_s: float
    link: str = ""
    cause: str = ""
    """Why it came late: ``link busy``, ``memory`` or ``bandwidth``; ``blocker`` is the tensor in its way."""
    blocker: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A replay of a plan on a machine."""

    seconds: float
    """Seconds of one iteration; in the steady state where the workload repeats."""
    first_iteration_s: float
    stalls: tuple[Stall, ...]
    """Stalls of the reported iteration."""
    link_busy_s: Mapping[str, float]
    link_bytes: Mapping[str, int]
    peak_bytes: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Energy:
    """What an iteration takes, and who says so."""

    joules: float
    source: str
    """``model``: constants of the machine times what the plan has; nothing was measured. Else the counter's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """What one execution of a plan measured."""

    seconds: float
    peak_bytes: Mapping[str, int]
    """Measured per tier: mapped arena + states + the most that the run took beside them, as ``peak_source`` says."""
    link_bytes: Mapping[str, int]
    """Bytes the engine delivered during the run, per link."""
    stall_s: float
    share_of_limit: float
    """``limit_s / seconds``: 1.0 is the physical limit of the plan's bytes and compute, more disproves the profile."""
    paths: Mapping[str, str]
    """The I/O path really taken per link: ``O_DIRECT``, ``page cache``, ``GPUDirect Storage``; + joins several."""
    stalls: tuple[Stall, ...] = ()
    process_peak_bytes: int = 0
    """The kernel's high-water mark of the whole process, interpreter and libraries included."""

    peak_source: str = "planned workspace"
    """Who counted: torch's ``allocator``, the ``device``, or the runtime: results and ``planned workspace``."""
    site_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds that each processor was at ops, where they run on several; a device: that it did not wait."""
    grad_norm: float | None = None
    """Of a training step with an update: the norm of all gradients before clipping, where it clips or was asked."""
    energy: Energy | None = field(default=None, metadata={"left_out": True})
    """What the machine's counters counted while it ran, others' work included; ``None`` where none of them did."""

    @property
    def joules(self) -> float | None:
        """What was counted; ``None`` is not nothing, but unknown."""
        return self.energy.joules if self.energy is not None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphReport:
    """How much of a plan a device is given in graphs, each one call for many ops."""

    num_ops: int
    """Ops that run in graphs."""
    num_graphs: int
    num_all_ops: int
    reason: str = ""
    """Why none does, or not yet; empty where some do."""
