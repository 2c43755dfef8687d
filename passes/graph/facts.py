"""Facts of a program's ops: storages, kernels and workspace, from which costs follow. No torch in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from gascompile.cost_models.measure.op_memory import OpCall

SCALAR_BYTES = 256
"""Python numbers among an op's arguments become tensors of one element while it runs."""


class Decoded(NamedTuple):
    """A weight in its transfer format and the rows it is multiplied with."""

    form: str
    num_weights: int
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafOp:
    """One kernel an op dispatches to."""

    target: str
    flops: int
    read_bytes: int
    write_bytes: int
    dtype: str
    decoded: Decoded | None = None
    """Set where the op decodes a weight as it multiplies."""
    known: bool
    """False for an op whose cost no formula covers: only its bytes are counted."""


@dataclass(slots=True, kw_only=True)
class OpFacts:
    """What one op of the program does, in storages by workload name."""

    name: str
    reads: list[str] = field(default_factory=list)
    writes: list[str] = field(default_factory=list)
    patches: dict[str, int] = field(default_factory=dict)
    leaves: list[LeafOp] = field(default_factory=list)
    workspace_bytes: int = 0
    kind: str = ""
    """What its workspace depends on: the op, the layout of its tensors, the other arguments."""
    has_one_dtype: bool = True
    """Whether what it returns is of the dtype of all that it is given; under autocast it need not be."""
    features: int = 0
    """Size of the last dimension of its result, where all that it is given is of the same shape and dtype."""
    call: OpCall | None = None
    """The op itself where it computes."""
    unproven: OpCall | None = None
    """The op itself where one of its kernels may take more than formulas know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The result of a propagation."""

    ops: tuple[OpFacts, ...]
    size_bytes: dict[str, int]
    """Bytes of every storage by workload name."""
    outputs: frozenset[str]
    """Storages that the model returns."""
