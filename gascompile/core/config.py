"""What a compile may be told, validated once, and the one environment variable."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any, TypedDict

from gascompile.core.budget import Budget
from gascompile.core.own_files import own_cache

CACHE_VARIABLE = "GASCOMPILE_CACHE_DIR"

WEIGHT_FORMS = ("bf16", "int8", "int4", "auto")
FUSE = ("auto", "exact", "off")
GRAPHS = ("auto", "off")
ON_EXCEED = ("error", "warn")
SITES = ("one", "all", "parts")
OBJECTIVES = ("time", "energy")


def number_of(value: object) -> float:
    """Return an option as a number of Python's, also where it is one of NumPy's; NaN where it is none."""
    if isinstance(value, bool):
        return math.nan
    if isinstance(value, (int, float)):
        return value
    number: Any = value
    return float(number) if isinstance(value, Real) else math.nan


def default_cache_dir() -> Path:
    """Return ``$GASCOMPILE_CACHE_DIR``, else ``gascompile`` in the user's cache folder."""
    given = os.environ.get(CACHE_VARIABLE)
    if given:
        return Path(given).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "gascompile"


def folder_of(cache_dir: str | os.PathLike[str] | None, budget: object = None) -> Path:
    """Return where plans and what leaves memory are kept: as told, else the budget's ``nvme_path``, else by default.

    Raises:
        ValueError: ``cache_dir`` and the budget name two folders.
    """
    on_drive = budget.nvme_path if isinstance(budget, Budget) else None
    if cache_dir is None:
        return default_cache_dir() if on_drive is None else Path(on_drive)
    if on_drive is not None and os.path.abspath(on_drive) != os.path.abspath(cache_dir):
        raise ValueError(
            f"what leaves memory lies in one folder: leave out nvme_path={on_drive!r} or cache_dir={str(cache_dir)!r}"
        )
    return Path(cache_dir)


class SearchLimits(TypedDict):
    """What ends the search for a plan."""

    time_limit_s: float
    mip_gap: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileConfig:
    """Options of a compile that shape the plan; every field is part of the plan's fingerprint."""

    time_limit_s: float = 20.0
    """Wall clock the solver may take; the best plan known is used when it ends."""
    mip_gap: float = 0.01
    """Relative gap at which the solver may stop."""
    strategy: str | None = None
    """Force one candidate plan, for comparison; ``None`` takes the best."""
    weights: str | None = None
    """The form that weights move in; ``None`` moves them as they are stored, which loses nothing."""
    fuse: str = "auto"
    """``auto`` compiles the ops between two transfers into one kernel where that pays, ``exact`` where it gives the
    same bits, too; ``off`` never does."""
    fuse_runs: float = 1000.0
    """Compiling kernels may take as long as they save in so many runs; infinity fuses whatever gains anything."""
    sites: str = "one"
    """``one`` runs all ops on the tier that computes; ``all`` also on the host's processor, both at once; ``parts``
    also divides linear layers between the two."""
    objective: str = "time"
    """``time`` plans the fastest iteration; ``energy`` the one of the fewest joules, by the machine's model."""
    graphs: str = field(default="auto", metadata={"fingerprint": False})
    """``auto`` gives a device that has graphs the ops between two moves in one call; ``off`` one by one."""
    other_products: bool = field(default=True, metadata={"fingerprint": False})
    """Whether large products may be another library's than torch's, where ``fuse`` allows that and they fit."""
    on_exceed: str = field(default="error", metadata={"fingerprint": False})
    """``error`` stops a run before it takes more than the budget, ``warn`` says so afterwards."""
    cache_dir: Path = field(default_factory=default_cache_dir, metadata={"fingerprint": False})

    @classmethod
    def of(
        cls, cache_dir: str | os.PathLike[str] | None, budget: object = None, **options: Any
    ) -> CompileConfig:
        """Return options as public functions take them; the folder is that of ``folder_of``."""
        return cls(cache_dir=folder_of(cache_dir, budget), **options)

    def __post_init__(self) -> None:
        object.__setattr__(self, "cache_dir", own_cache(self.cache_dir.expanduser()))
        given = {name: getattr(self, name) for name in ("time_limit_s", "mip_gap", "fuse_runs")}
        for name, value in given.items():
            object.__setattr__(self, name, number_of(value))
        if not self.time_limit_s > 0:
            raise ValueError(f"time_limit_s must be positive, not {given['time_limit_s']!r}")
        if not 0 <= self.mip_gap < 1:
            raise ValueError(f"mip_gap is a fraction in [0, 1), not {given['mip_gap']!r}")
        if self.weights not in (None, *WEIGHT_FORMS):
            raise ValueError(
                f"weights is one of {', '.join(WEIGHT_FORMS)}, or None for as stored, not {self.weights!r}"
            )
        if self.fuse not in FUSE:
            raise ValueError(f"fuse is one of {', '.join(FUSE)}, not {self.fuse!r}")
        if self.graphs not in GRAPHS:
            raise ValueError(f"graphs is one of {', '.join(GRAPHS)}, not {self.graphs!r}")
        if self.sites not in SITES:
            raise ValueError(f"sites is one of {', '.join(SITES)}, not {self.sites!r}")
        if self.objective not in OBJECTIVES:
            raise ValueError(f"objective is one of {', '.join(OBJECTIVES)}, not {self.objective!r}")
        if self.on_exceed not in ON_EXCEED:
            raise ValueError(f"on_exceed is one of {', '.join(ON_EXCEED)}, not {self.on_exceed!r}")
        if not self.fuse_runs >= 0:
            raise ValueError(f"fuse_runs is a number of runs, not {given['fuse_runs']!r}")

    @property
    def has_sites(self) -> bool:
        """Whether ops may run on the host's processor, too."""
        return self.sites != "one"

    @property
    def has_parts(self) -> bool:
        """Whether both processors may have a part of one layer."""
        return self.sites == "parts"

    @property
    def search_limits(self) -> SearchLimits:
        """What ends a search, as ``make_plan`` takes it."""
        return {"time_limit_s": self.time_limit_s, "mip_gap": self.mip_gap}

    def fingerprint_fields(self) -> dict[str, str]:
        """Return every field that shapes the plan, as text."""
        return {
            name: repr(getattr(self, name))
            for name, f in self.__dataclass_fields__.items()
            if f.metadata.get("fingerprint", True)
        }
