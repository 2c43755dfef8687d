"""Rank layout: which rank of a job this process is, and which part of a tensor it keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

STAGE_OPS = "gascompile_stages"
"""Namespace of the ops by which stages of a pipeline send each other values."""
MICROSECOND = 1e-6
"""Of a second: ranks tell each other times in whole ones."""
_ALIGNED = 1 << 10
"""Parts begin at multiples of so many elements, as kernels round a vector's elements otherwise than those left over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLayout:
    """One rank among several that train the same model, each on rows of its own."""

    rank: int
    size: int
    """Number of ranks."""

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ValueError: the rank is none of them.
        """
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} is none of {self.size}; they count from 0")

    def bounds(self, begin: int, end: int) -> tuple[int, ...]:
        """Return where the parts of elements ``begin`` to ``end`` begin, rank by rank, and where the last one ends.

        Parts are of about equal size, and empty where there is less than 1024 elements per rank.
        """
        count = end - begin
        inner = (count * rank // self.size // _ALIGNED * _ALIGNED for rank in range(1, self.size))
        return (begin, *(begin + part for part in inner), end)

    def own(self, begin: int, end: int) -> tuple[int, int]:
        """Return the elements that this rank keeps of a range."""
        bounds = self.bounds(begin, end)
        return bounds[self.rank], bounds[self.rank + 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshLayout:
    """One rank of a mesh of stages: pipelines beside each other, each of which takes rows of its own."""

    stage: int
    num_stages: int
    replica: int
    """Number of its pipeline."""
    num_replicas: int

    @staticmethod
    def of(layout: RankLayout, num_stages: int) -> MeshLayout:
        """Return the place of a rank among those that count stage by stage, pipeline by pipeline."""
        return MeshLayout(
            stage=layout.rank % num_stages,
            num_stages=num_stages,
            replica=layout.rank // num_stages,
            num_replicas=layout.size // num_stages,
        )

    @property
    def first(self) -> int:
        """Return the rank that is the first stage of this pipeline."""
        return self.replica * self.num_stages

    @property
    def peers(self) -> list[int]:
        """Return the ranks that have the same stage, this one among them."""
        return [self.stage + self.num_stages * replica for replica in range(self.num_replicas)]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLayout:
    """One rank of a pipeline, which runs a stage of the model, and who updates what."""

    rank: int
    size: int
    """Number of ranks."""
    owners: Mapping[str, int]
    """Parameter -> the rank that updates it."""
    held: frozenset[str]
    """What this rank has, copies of parameters that others update included."""
    elsewhere: frozenset[str] = frozenset()
    """What other ranks have alone."""
    replica: int = 0
    """Number of the pipeline; all have the same values, which those of the first one are asked for."""
