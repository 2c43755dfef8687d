"""States of a training run: where torch's formats and the tensors that persist meet.

While a run is open it owns what torch keeps in the model and in ``optimizer.state``: parameters are empty
tensors there and moments have no entry. ``giving_back`` returns both.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from gascompile.core.errors import CheckpointError, OpenStepError
from gascompile.core.waiting import Turn, in_turn
from gascompile.runtime.memory.persistent import Persistent
from gascompile.runtime.memory.source_slots import SourceSlots
from gascompile.training.optimizers.optimizers import Rules
from gascompile.training.optimizers.slots import TOTAL, Slot, StateTile
from gascompile.training.state.aliasing import Storages
from gascompile.training.state.covers import Covers
from gascompile.training.state.extra_states import is_of_tensors
from gascompile.training.state.file_values import FileValues
from gascompile.training.state.named_values import NamedValues, Total
from gascompile.training.state.open_optimizer import OpenOptimizer, listed, restore
from gascompile.training.state.same_model import (
    require_begun,
    require_moments,
    require_same,
    shapes_of,
)
from gascompile.training.state.written_values import WrittenValues

Keep = Callable[
    [
        Mapping[str, torch.Tensor],
        Mapping[str, tuple[int, torch.dtype]],
        Collection[str],
        SourceSlots | None,
    ],
    Persistent,
]
"""Makes what keeps the tensors of a run."""


class States(NamedValues):
    """Parameters, buffers, moments and the number of updates of one run."""

    is_half_new = False
    """A step has failed, which may have written moments and totals that are not counted."""

    def __init__(
        self,
        model: nn.Module,
        rules: Rules,
        tensors: Mapping[str, torch.Tensor],
        *,
        storages: Storages,
        tiles: Iterable[StateTile],
        keep: Keep,
        values: FileValues | None = None,
        changing: Collection[str] = (),
        before_access: Callable[[], None] = lambda: None,
        settle: Callable[[], object] = bool,
        turn: Turn | None = None,
        total: Total | None = None,
    ) -> None:
        """Take over what is in the model and in the optimizer.

        Args:
            rules: of the optimizer; they know its parameters that are trained.
            tensors: the model's own tensors by name, without those that are views of others.
            storages: know the views.
            tiles: all that is kept per parameter.
            keep: takes tensors over, vectors that begin as zeros, names without values yet, where some of these lie.
            values: of tensors that have theirs in files.
            changing: names of tensors that steps change; values of others stay in their files.
            before_access: called before somebody who holds a tensor of the model reads or writes it.
            settle: blocks while values go back into the model, whose asker was interrupted.
            turn: of the step, which its readers on other threads take, too.
            total: adds a tensor up over the ranks among which moments are divided.

        Raises:
            CheckpointError: a file of ``values`` cannot be read.
            StorageError: the folder cannot be written to, or has too little space.
        """
        every = {**(values.tensors if values else {}), **tensors}
        packed = values.packed if values else {}
        super().__init__(model, rules, every, storages, total, packed)
        self.optimizer, self.values = rules.optimizer, values
        self.generation = self.num_batches = 0  # the first goes up when values come from elsewhere
        self.written = WrittenValues()
        entries = {
            slot.index: self.optimizer.state.get(self.tensor(slot.name), {})
            for slot in rules.slots.values()
        }
        self.counts, self.num_steps = self.rules.counts(entries)
        """Updates of each parameter so far, by name; without planned updates the optimizer has its own."""
        self.pending: frozenset[str] = frozenset()
        """Parameters whose totals hold a gradient."""
        own = {n: tensor.detach() for n, tensor in self.tensors.items() if n not in self.divided}
        own |= {name: value.outline() for name, value in packed.items()}
        self.tiles = {(slot.name, key): [] for slot in self.spread.values() for key in slot.keys}
        for tile in tiles:
            self.tiles.setdefault((tile.parameter, tile.key), []).append(tile)
        zeros = {t.name: (t.length, t.dtype) for tiles in self.tiles.values() for t in tiles}
        unread = values.sources.keys() - self.divided.keys() if values else ()
        sources = values.in_place(own, changing) if values else None
        self.persistent = keep(own, zeros, unread, sources)
        if values is not None:
            elsewhere = self.divided.keys() & self.spread.keys()
            values.fill(self.persistent, self.assign, elsewhere)
        for name in self.divided if values is None else self.divided.keys() - values.sources.keys():
            self.assign(name, self.tensors[name])
        self._take_moments()
        views = {name: view.tensor for name, view in storages.views.items()}
        for tensor in (*self.tensors.values(), *views.values()):
            tensor.data = torch.empty(0, dtype=tensor.dtype)
        self._before_access, self._turn = before_access, turn or Turn()
        self.covers = Covers(
            model,
            {**self.tensors, **views},
            like=self.like,
            value=self._read,
            assign=self._written,
            settle=settle,
            shared={*views, *(view.owner for view in storages.views.values())},
        )
        self._open = OpenOptimizer(
            self.optimizer,
            whole=self._saved,
            take=self._loaded,
            moments=self._moments,
            settle=settle,
        )

    def _take_moments(self) -> None:
        """Take moments out of the optimizer; what no rule knows stays where it is."""
        state, taken = self.optimizer.state, set()
        try:
            for slot in self.rules.slots.values():
                parameter = self.tensor(slot.name)
                if self._keys(slot) and state.get(parameter):
                    require_begun(slot.name, state[parameter], self._first(slot))
                    self._assign_moments(slot, state[parameter])
                    del state[parameter]
                    taken.add(slot.name)
        except BaseException:
            for slot, _, entry in self.entries():
                if slot.name in taken:
                    state[self.tensor(slot.name)] = entry
            self.persistent.close()
            raise

    @in_turn
    def _read(self, name: str) -> torch.Tensor:
        if name in self.divided or name in self.spread:
            raise OpenStepError(
                f"'{name}' is divided among the ranks, or one stage's of a pipeline; let all ranks call "
                "state_dict(), load_state_dict() or save() of the step, or close it first"
            )
        self._before_access()
        return self.value(name)

    @in_turn
    def _written(self, name: str, value: torch.Tensor) -> None:
        self._before_access()
        self.generation += 1
        self.written.note(name, value)
        self.assign(name, value)
        # Others may be views of it.
        self.covers.changed()

    def stepped(self) -> None:
        """Take note of an update of the parameters that had a gradient."""
        self.num_steps += 1
        for name in self.pending:
            self.counts[name] += 1
        self.pending = frozenset()

    def state_dict(self) -> dict[str, Any]:
        """Return copies in memory, in torch's own formats."""
        values = {name: self.value(name) for name in (*self.tensors, *self.storages.views)}
        plain_state = self.model.state_dict(keep_vars=True)
        model = {}
        for name, own in self.names().items():
            value = plain_state[name]
            plain = value.detach().clone() if isinstance(value, torch.Tensor) and not own else value
            model[name] = values[own] if own else plain
        return {"model": model, "optimizer": self._with_moments(listed(self.optimizer))}

    def _with_moments(self, optimizer_state: dict[str, Any]) -> dict[str, Any]:
        """Return an optimizer's state with copies of what is kept here."""
        kept = copy.deepcopy(optimizer_state["state"])
        state = {**kept, **{i: entry for _, i, entry in self.entries()}}
        numbers = sorted(key for key in state if isinstance(key, int))
        # Others are keys of the optimizer's own, of no parameter.
        ordered = {**{number: state[number] for number in numbers}, **state}
        return {**optimizer_state, "state": ordered}

    @in_turn
    def _saved(self, optimizer_state: dict[str, Any]) -> dict[str, Any]:
        self._before_access()
        return self._with_moments(optimizer_state)

    @in_turn
    def _moments(self) -> dict[torch.Tensor, dict[str, Any]]:
        self._before_access()
        return {self.tensor(slot.name): entry for slot, _, entry in self.entries()}

    @in_turn
    def _loaded(self, optimizer_state: dict[str, Any]) -> dict[str, Any]:
        """Take the moments of an optimizer's state over, and return the rest."""
        self._before_access()
        checked = self._checked(optimizer_state)
        self.written.note("the optimizer's state", checked[0])
        self._take_over(*checked)
        return self._rest(optimizer_state)

    def entries(self, *, own: bool = False) -> Iterable[tuple[Slot, int, dict[str, Any]]]:
        """Yield what torch's optimizer would hold per trained parameter, after the first update.

        Args:
            own: of a pipeline, of the parameters that this rank updates alone, which takes no other rank.
        """
        for slot in self.rules.slots.values():
            if own and slot.owner is not None and not slot.ranges:
                continue
            entry: dict[str, Any] = {}
            count = self.counts[slot.name]
            first = self._first(slot)
            if (count or first) and self.rules.counts_steps:
                entry["step"] = torch.tensor(float(count))
            for key in self._keys(slot) if count else ():
                entry[key] = self.kept(slot.name, key, own=own)
            for key, value in first.items() if not count else ():
                like = self.like_kept(slot.name, key)
                entry[key] = torch.empty_like(like, device="cpu").fill_(value)
            if entry:
                yield slot, slot.index, entry

    def _keys(self, slot: Slot) -> tuple[str, ...]:
        return slot.keys

    def _first(self, slot: Slot) -> Mapping[str, float]:
        return self.rules.first(self.optimizer.param_groups[slot.group])

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Replace all values by those of ``model.state_dict()`` and ``optimizer.state_dict()``.

        Raises:
            CheckpointError: they are of another model or optimizer; nothing has changed then.
        """
        if set(states) != {"model", "optimizer"}:
            raise CheckpointError(
                f"a state has the keys 'model' and 'optimizer', this one {sorted(states)}; "
                "pass {'model': model.state_dict(), 'optimizer': optimizer.state_dict()}"
            )
        model = states["model"]
        kept = self.model.state_dict(keep_vars=True)
        require_same(type(self.model).__name__, shapes_of(model), self._wanted(kept))
        checked = self._checked(states["optimizer"])
        self.generation += 1
        restore(self.optimizer, self._rest(states["optimizer"]))
        if is_of_tensors(self.model, kept):
            for name, own in self.names().items():
                if own:
                    self.assign(own, model[name])
                else:
                    kept[name].detach().copy_(model[name])
        else:
            # By the model's own hooks and methods, which write to what is open.
            self.model.load_state_dict(model)
        self._take_over(*checked)
        self.written.clear()

    def _wanted(self, kept: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        own = self.names()
        like = {name: self.like(own[name]) if own[name] else kept[name] for name in shapes_of(kept)}
        return shapes_of(like)

    def _checked(
        self, optimizer_state: Mapping[str, Any]
    ) -> tuple[dict[int, Mapping[str, Any]], dict[str, int], int]:
        """Return an optimizer's moments by number of the parameter, counts of updates, and of steps.

        Raises:
            CheckpointError: they are of another optimizer.
        """
        state = optimizer_state["state"]
        entries = {slot.index: state.get(slot.index, {}) for slot in self.rules.slots.values()}
        counts, num_steps = self.rules.counts(entries)
        for slot in self.rules.slots.values():
            self._check_moments(slot, entries[slot.index])
        self.rules.check_groups(optimizer_state["param_groups"])
        return entries, counts, num_steps

    def _take_over(
        self, entries: Mapping[int, Mapping[str, Any]], counts: dict[str, int], num_steps: int
    ) -> None:
        for slot in self.rules.slots.values():
            self._assign_moments(slot, entries[slot.index])
        self.clear(self._with_totals(), TOTAL)
        self.counts, self.num_steps = counts, num_steps
        self.pending, self.num_batches = frozenset(), 0

    def forget(self, counts: Mapping[str, int], pending: frozenset[str]) -> None:
        """Take these numbers over from a checkpoint; what it has no moments or totals of has zeros again."""
        self.clear(self._with_totals() - pending, TOTAL)
        for slot in self.rules.slots.values():
            if self._has_moments(slot) and not counts[slot.name]:
                self.clear([slot.name], *self._keys(slot))
        self.counts, self.pending = dict(counts), pending

    def _has_moments(self, slot: Slot) -> bool:
        """Return whether what is kept of a parameter may be other than zeros."""
        return self.is_half_new or bool(self.counts[slot.name])

    def _with_totals(self) -> frozenset[str]:
        """Return the parameters of which gradients may have been added up."""
        return frozenset(self.rules.slots) if self.is_half_new else self.pending

    def clear(self, parameters: Iterable[str], *keys: str) -> None:
        """Let what is kept of parameters be zeros again; without accumulation no totals are."""
        for parameter in parameters:
            for key in keys:
                if (parameter, key) in self.tiles:
                    self.keep(parameter, key, torch.zeros(self.like_kept(parameter, key).shape))

    def load_groups(self, groups: list[dict[str, Any]], **state: Mapping[int | str, Any]) -> None:
        """Replace the optimizer's hyperparameters by checked ones, and what else is its own by ``state``."""
        restore(self.optimizer, self._rest({"param_groups": groups, **state}))

    def _rest(self, optimizer_state: Mapping[str, Any]) -> dict[str, Any]:
        # Moments stay out: torch would keep a copy of each in memory.
        slots = {slot.index for slot in self.rules.slots.values() if self._keys(slot)}
        own: Mapping[Any, Any] = (
            optimizer_state["state"]
            if "state" in optimizer_state
            else listed(self.optimizer)["state"]
        )
        rest = {key: value for key, value in own.items() if key not in slots}
        return {**optimizer_state, "state": rest}

    def _check_moments(self, slot: Slot, entry: Mapping[str, Any]) -> None:
        if entry:
            shapes = {key: self.like_kept(slot.name, key).shape for key in self._keys(slot)}
            require_moments(slot.name, entry, shapes)
            require_begun(slot.name, entry, self._first(slot))

    def _assign_moments(self, slot: Slot, entry: Mapping[str, Any]) -> None:
        if self._first(slot) and not int(entry.get("step", 0)):
            return  # the first update makes them
        for key in self._keys(slot):
            if entry.get(key) is not None:
                self.keep(slot.name, key, entry[key])
            elif self._has_moments(slot):
                self.clear([slot.name], key)

    def shut(self) -> None:
        """Let nobody read or write values through the model and the optimizer any more; idempotent."""
        self.covers.close()
        self._open.close()
