"""Slots: the trainable parameters of an optimizer, and the tiles in which their moments are kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from gascompile.runtime.kernels import state_codes
from gascompile.runtime.kernels.state_codes import Code

TOTAL = "gradient"
"""Key of what gradients of several batches are added to."""
PART = "part"
"""Key of the elements that a rank has of a parameter of which none has all."""
Stage = Literal["kept", "again", "elsewhere"]
"""Of a divided parameter: gathered once, for both passes, or for each of them. Or it is another stage's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTile:
    """Elements ``begin`` to ``end`` of a moment of a parameter."""

    parameter: str
    key: str
    """Name in torch's ``state``: ``exp_avg``."""
    begin: int
    end: int
    code: Code | None = None
    """How elements are kept, where that is not float32."""

    @property
    def name(self) -> str:
        """Name in plans."""
        form = "" if self.code is None else ":8bit"
        return f"{self.parameter}:{self.key}{form}[{self.begin}:{self.end}]"

    @property
    def is_part(self) -> bool:
        """Return whether it has a parameter's own values."""
        return self.key == PART

    @property
    def num_elements(self) -> int:
        """Elements of the moment."""
        return self.end - self.begin

    @property
    def length(self) -> int:
        """Elements of the vector in which it is kept."""
        if self.code is None:
            return self.num_elements
        return state_codes.coded_bytes(self.num_elements)

    @property
    def dtype(self) -> torch.dtype:
        """Of that vector."""
        return torch.float32 if self.code is None else torch.uint8

    def kept(self, values: torch.Tensor) -> torch.Tensor:
        """Return float32 values as they are kept."""
        return values if self.code is None else state_codes.coded(values, self.code)

    def values(self, kept: torch.Tensor) -> torch.Tensor:
        """Return the float32 values of what ``kept`` returned, or an update wrote."""
        if self.code is None:
            return kept
        return state_codes.decoded(kept, self.num_elements, self.code)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One trainable parameter."""

    name: str
    index: int
    """Number in ``optimizer.state_dict()``."""
    group: int
    row: int
    """Place among the group's slots: where the hyperparameters have its number of updates."""
    is_frozen: bool
    """Requires no gradient today."""
    tiles: tuple[tuple[StateTile, ...], ...]
    """Per range of the parameter, one tile of each moment."""
    ranges: tuple[tuple[int, int], ...]
    """First element and the one after the last, in the parameter's order of memory."""
    bounds: tuple[tuple[int, ...], ...] = ()
    """Where the elements of each rank begin, and where the last ones end, per range, of which ``ranges`` has this
    rank's elements alone; empty where each rank updates all."""
    stage: Stage | None = None
    """Set where this rank does not have the whole parameter between its uses."""
    owner: int | None = None
    """Of a pipeline: the rank that updates the parameter; others have no ``ranges``."""
    keys: tuple[str, ...] = ()
    """Names of its moments, whoever keeps them."""

    @property
    def is_spread(self) -> bool:
        """Return whether it takes all ranks to read what is kept of it."""
        return bool(self.bounds) or self.owner is not None

    @property
    def parts(self) -> tuple[StateTile, ...]:
        """Return what a divided parameter is on this rank, a tile per range; nothing of a whole one."""
        if self.stage is None or self.owner is not None:
            return ()
        return tuple(
            StateTile(parameter=self.name, key=PART, begin=begin, end=end)
            for begin, end in self.ranges
        )

    @property
    def totals(self) -> tuple[StateTile, ...]:
        """Return what gradients of several batches are added to, a tile per range."""
        return tuple(
            StateTile(parameter=self.name, key=TOTAL, begin=begin, end=end)
            for begin, end in self.ranges
        )
