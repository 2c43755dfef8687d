"""What makes the plans of a compiled model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

from gascompile.api.unit import Unit
from gascompile.core.machine import Machine

if TYPE_CHECKING:
    from gascompile.weights.checkpoint import Checkpoint

Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]


class Planning(Protocol):
    """Makes the plans of a model; a ``Job``."""

    @property
    def model(self) -> nn.Module:
        """What plans are made of."""
        ...

    @property
    def machine(self) -> Machine:
        """What they are made for."""
        ...

    def prepare(
        self, args: Args, kwargs: Kwargs, planned: Callable[[Unit], object] = bool, /
    ) -> Unit:
        """Return the plan for one input signature; ``planned`` is told of a new one before its kernels are made."""
        ...

    @property
    def dynamic_shapes(self) -> Any:
        """What the user said of sizes; ``None`` for nothing, ``False`` for one plan per size."""
        ...

    def ranged(self, dynamic_shapes: Any, /) -> Planning:
        """Return the same for ranges of sizes."""
        ...

    def leaving(self, taken_bytes: int, /) -> Planning:
        """Return the same with so much of the budget for others."""
        ...

    def without_loss(self) -> Planning:
        """Return the same for weights as they are stored."""
        ...

    def planned_again(self, unit: Unit, /) -> Unit:
        """Return a plan with what runs have taught about the memory of ops."""
        ...

    def open_checkpoint(self) -> Checkpoint | None:
        """Read the checkpoint's headers, under the names that the model uses."""
        ...
