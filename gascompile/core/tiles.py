"""Names of tiles: ``w[b:e]`` are rows ``b`` to ``e`` of the weight ``w``, ``op[b:e]`` is what ``op`` does with them.

A tile writes its part of the op's one result. A *part* makes a result of its own, ``%op[b:e]``, and an op that has the
name of the whole joins them: so the parts of a layer can be computed by several processors.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NamedTuple

_PATTERN = re.compile(r"(.*)\[([0-9]{1,18}):([0-9]{1,18})\]", re.DOTALL)


class Tile(NamedTuple):
    """Rows of a weight, or the part of an op that computes with them."""

    base: str
    """Name of the whole."""
    begin: int
    end: int

    @property
    def name(self) -> str:
        """The tile's own name in workloads and plans."""
        return f"{self.base}[{self.begin}:{self.end}]"


def parse_tile(name: str) -> Tile | None:
    """Return which tile ``name`` means; ``None`` for the name of something whole."""
    match = _PATTERN.fullmatch(name) if name.endswith("]") else None
    return Tile(match[1], int(match[2]), int(match[3])) if match else None


def base_name(name: str) -> str:
    """Return the name of the whole that ``name`` is a tile of, or ``name`` itself."""
    tile = parse_tile(name)
    return tile.base if tile else name


def result_name(op: str, writes: Collection[str]) -> str:
    """Return the name of what an op makes: of a part that part, of a tile the result of the whole op."""
    own = f"%{op}"
    return own if own in writes else f"%{base_name(op)}"


def is_tile(op: str, writes: Collection[str]) -> bool:
    """Return whether an op does a tile of a whole one, and writes to a result that it shares with the others."""
    return parse_tile(op) is not None and f"%{op}" not in writes
