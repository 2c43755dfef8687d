"""What a captured group needs in every run: its inputs where it reads them, its results where others look."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from gascompile.core.errors import PlanMismatchError
from gascompile.runtime.devices.graph_groups import Group
from gascompile.runtime.devices.graph_rules import tensors_in
from gascompile.runtime.protocols import Graph, Graphs, Memory

Value = Any


class Replay:
    """One group of steps, captured."""

    def __init__(self, name: str, graphs: Graphs) -> None:
        self._name = name
        self._load = graphs.load
        self._loads: list[tuple[int, int | None, torch.Tensor]] = []
        self._fixed: list[tuple[int, Value]] = []
        self._kept: list[tuple[int, Value]] = []
        self.graph: Graph | None = None
        """``None`` where there is nothing to give to the device."""

    def load(self, slot: int, element: int | None, static: torch.Tensor) -> None:
        """Copy the value in a slot, or one of those in it, to ``static`` in every run."""
        self._loads.append((slot, element, static))

    def expect(self, slot: int, value: Value) -> None:
        """Find the same value in a slot in every run."""
        self._fixed.append((slot, value))

    def keep(self, values: Mapping[int, Value]) -> None:
        """Put the values that the group makes into their slots in every run."""
        self._kept = list(values.items())

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What the group makes and others read."""
        return tensors_in([value for _, value in self._kept])

    def run(self) -> None:
        """Give the group to the device."""
        if self.graph is not None:
            self.graph.replay()

    def __call__(self, values: list[Value]) -> None:
        """Run the group on the slots of a run.

        Raises:
            PlanMismatchError: a value is not what it was when the group was captured.
        """
        for slot, element, static in self._loads:
            value = values[slot] if element is None else values[slot][element]
            if value.shape != static.shape or value.dtype != static.dtype:
                raise self._changed(f"{static.dtype} {list(static.shape)}", value)
            self._load(static, value)
        for slot, known in self._fixed:
            value = values[slot]
            if value is not known and (isinstance(known, torch.Tensor) or value != known):
                raise self._changed(f"{known!r:.60}", value)
        self.run()
        for slot, value in self._kept:
            values[slot] = value

    def _changed(self, known: str, value: Value) -> PlanMismatchError:
        given = (
            f"{value.dtype} {list(value.shape)}"
            if isinstance(value, torch.Tensor)
            else f"{value!r:.60}"
        )
        return PlanMismatchError(
            f"the graph of the ops {self._name} was captured for {known} and is given {given}; "
            'compile with graphs="off"'
        )


class Entries:
    """Memory that graphs read and that steps between them, or the caller, write to."""

    def __init__(self, graphs: Graphs, arena: Memory) -> None:
        self._graphs = graphs
        self._arena = arena
        self._inputs: dict[int, torch.Tensor] = {}
        self._statics: list[tuple[torch.Tensor, int]] = []
        self._owned: set[int] = set()

    def input(self, slot: int, value: torch.Tensor) -> torch.Tensor:
        """Return the memory of an input, with ``value`` in it."""
        if slot not in self._inputs:
            self._inputs[slot] = self._static(value)
        else:
            self._graphs.load(self._inputs[slot], value)
        return self._inputs[slot]

    def take(self, group: Group, values: list[Value]) -> Replay:
        """Put what ``group`` reads where its graph will find it in every run."""
        replay = Replay(group.name, self._graphs)
        for slot in group.entries:
            value = values[slot]
            if isinstance(value, torch.Tensor) and not self._arena.contains(value):
                values[slot] = self._static(value)
                replay.load(slot, None, values[slot])
            elif isinstance(value, list | tuple):
                parts = [self._static(x) if isinstance(x, torch.Tensor) else x for x in value]
                for i, part in enumerate(parts):
                    if isinstance(part, torch.Tensor):
                        replay.load(slot, i, part)
                values[slot] = type(value)(parts)
            else:
                replay.expect(slot, value)
        return replay

    def keep(self, replay: Replay) -> None:
        """Take note of what a group makes and others read."""
        self._owned.update(t.untyped_storage().data_ptr() for t in replay.tensors if t.numel())

    def owns(self, tensor: torch.Tensor) -> bool:
        """Return whether later runs write to the memory of ``tensor``."""
        return tensor.untyped_storage().data_ptr() in self._owned

    @property
    def size_bytes(self) -> int:
        """Of what lies here."""
        return sum(tensor.nbytes for tensor, _ in self._statics)

    def require_unwritten(self) -> None:
        """Return if no op has written to what is copied here: whoever gave it would not see that.

        Raises:
            RuntimeError: one has.
        """
        if any(tensor._version != version for tensor, version in self._statics):
            raise RuntimeError("an op writes to a value that is made outside of graphs")

    def _static(self, value: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode(False), torch.no_grad():
            static = self._graphs.room(value)
            self._graphs.load(static, value)
        if static.numel():
            self._owned.add(static.untyped_storage().data_ptr())
        self._statics.append((static, static._version))
        return static
