"""Moves of activations: out to the spill file and back while their op's result stays what it is.

Memory is taken from and given to the tensor's storage, so that all its views stay valid and follow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from gascompile.core.errors import PlanMismatchError
from gascompile.core.plan import Plan
from gascompile.core.steps import Offload, Reload
from gascompile.runtime.memory.spill import Spill
from gascompile.runtime.memory.spill_slots import spill_slots
from gascompile.runtime.protocols import Ticket
from gascompile.runtime.run.meter import LiveBytes


class HeapMoves:
    """The activations of one plan that move."""

    def __init__(self, plan: Plan, folder: Path, buffers: memoryview) -> None:
        """Take the room in the spill file.

        Raises:
            StorageError: the folder cannot be written to, or has too little space.
        """
        self.links = tuple(
            dict.fromkeys(s.link for s in plan.steps if isinstance(s, (Offload, Reload)))
        )
        """Links that activations move over."""
        self._spill = Spill(folder, spill_slots(plan.steps), buffers)
        self._tickets: dict[str, Ticket] = {}
        self._moved: dict[str, tuple[str, int]] = {}
        self._sizes: dict[str, int] = {}

    @property
    def paths(self) -> Mapping[str, str]:
        """The I/O path per link."""
        return dict.fromkeys(self.links, self._spill.path)

    def offload(self, tensor: str, link: str, value: torch.Tensor) -> None:
        """Start copying out."""
        storage = value.untyped_storage()
        self._moved[tensor] = (link, storage.nbytes())
        self._tickets[tensor] = self._spill.write(tensor, storage)

    def reload(self, tensor: str, link: str, value: torch.Tensor, live: LiveBytes) -> None:
        """Take memory and start copying back."""
        if tensor not in self._sizes:
            raise PlanMismatchError(
                f"the plan brings '{tensor}' back, which never left; plan again"
            )
        storage = value.untyped_storage()
        size_bytes = self._sizes.pop(tensor)
        storage.resize_(size_bytes)
        live.adjust(size_bytes)
        self._moved[tensor] = (link, size_bytes)
        self._tickets[tensor] = self._spill.read(tensor, storage)

    def settle(self, tensor: str, wait: Callable[[Ticket], None]) -> tuple[str, int]:
        """Let ``wait`` block until the newest copy is complete; return its link and bytes."""
        wait(self._tickets.pop(tensor))
        return self._moved[tensor]

    def drop(self, tensor: str, value: torch.Tensor, live: LiveBytes) -> None:
        """Give the memory back."""
        storage = value.untyped_storage()
        self._sizes[tensor] = storage.nbytes()
        live.adjust(-storage.nbytes())
        storage.resize_(0)

    def forget(self) -> None:
        """Start afresh after a run that did not end: nothing is out, nothing under way matters."""
        self._tickets.clear()
        self._sizes.clear()

    def close(self) -> None:
        """Give the file's space back; idempotent."""
        self._spill.close()
