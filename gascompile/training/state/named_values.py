"""Named values: parameters, buffers and moments of a run by their names, wherever they are.

Of a divided parameter this rank keeps a part alone: reading it takes all ranks at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from gascompile.core.errors import RankError
from gascompile.core.machinery import Machinery
from gascompile.runtime.memory.persistent import Persistent
from gascompile.training.optimizers.optimizers import Rules
from gascompile.training.optimizers.slots import PART, StateTile
from gascompile.training.state.aliasing import Storages, in_order_of, named_tensors
from gascompile.training.state.open_tensors import behind
from gascompile.training.state.packed_values import PackedValue

Total = Callable[[torch.Tensor, str], torch.Tensor]
"""Returns the sum of a tensor over the ranks, for what it is said to be; all ranks call it."""


class NamedValues(Machinery):
    """What of a run is asked for and set by name."""

    persistent: Persistent
    tiles: dict[tuple[str, str], list[StateTile]]
    """In order, by parameter and key."""

    def __init__(
        self,
        model: nn.Module,
        rules: Rules,
        tensors: Mapping[str, torch.Tensor],
        storages: Storages,
        total: Total | None,
        packed: Mapping[str, PackedValue] | None = None,
    ) -> None:
        """Know the names; see ``States``."""
        self.packed = packed or {}
        """Frozen parameters that are kept as their files have them."""
        self.model, self.rules, self.storages = model, rules, storages
        self.tensors, self._total = tensors, total
        self.given: set[str] = set()
        """What is back in the model."""
        self.divided: dict[str, torch.Tensor] = {}
        """Layouts of parameters of which this rank has a part alone, or nothing; they have no memory."""
        self.spread = {n: s for n, s in rules.slots.items() if s.owner is not None}
        """Parameters of a pipeline, each of which one rank updates."""
        placed = rules.placed
        known = named_tensors(model)[1] if placed is not None else {}
        elsewhere = sorted(placed.elsewhere - tensors.keys()) if placed is not None else ()
        self.unheld = {name: known[name] for name in elsewhere}
        """Of a pipeline, tensors that other stages read and none updates: the model has them still."""
        for slot in rules.slots.values():
            if slot.stage is not None:
                outline = torch.empty_like(tensors[slot.name], memory_format=torch.preserve_format)
                outline.untyped_storage().resize_(0)
                self.divided[slot.name] = outline.detach()

    @property
    def reads_together(self) -> bool:
        """Whether values are divided among ranks, which all read at once; one alone may read what each has whole."""
        return any(slot.is_spread for slot in self.rules.slots.values())

    def tensor(self, name: str) -> torch.Tensor:
        """Return the model's own parameter or buffer, which is empty."""
        view = self.storages.views.get(name)
        return self.tensors[name] if view is None else view.tensor

    def owner(self, name: str) -> str:
        """Return the persistent tensor that has a parameter's or buffer's memory."""
        view = self.storages.views.get(name)
        return name if view is None else view.owner

    def in_memory(self, name: str) -> torch.Tensor:
        """Return a parameter or buffer that is in memory, as it is kept."""
        whole = self.persistent.tensors[self.owner(name)]
        view = self.storages.views.get(name)
        return whole if view is None else view.layout.within(whole)

    def outline(self, name: str) -> torch.Tensor:
        """Return a tensor of the host with the layout of one, whose memory may be away."""
        if name in self.packed:
            return self.packed[name].without_memory()
        return self.divided[name] if name in self.divided else self.persistent.outline(name)

    def like(self, name: str) -> torch.Tensor:
        """Return a tensor that has a parameter's or buffer's layout alone."""
        view = self.storages.views.get(name)
        if view is None:
            return self.outline(name).to("meta")
        layout, dtype = view.layout, view.tensor.dtype
        return torch.empty_strided(layout.size, layout.stride, dtype=dtype, device="meta")

    def value(self, name: str) -> torch.Tensor:
        """Return a copy of a parameter or buffer; of a divided one on all ranks at once.

        Raises:
            RankError: other ranks have parts of it, and one is gone or does something else.
        """
        if name in self.divided:
            return self.kept(name, PART)
        if name in self.packed:
            return self.packed[name].values(self.persistent.value(name))
        view = self.storages.views.get(name)
        if name in self.spread:
            return self._updated(name)
        if view is None:
            return self.persistent.value(name)
        return view.layout.within(self.persistent.value(view.owner)).clone()

    def _updated(self, name: str) -> torch.Tensor:
        """Return a copy of a parameter, which the rank that updates it gives to all."""
        assert self._total is not None, "only ranks make a pipeline"
        values = self.persistent.value(name)
        placed = self.rules.placed
        if not self.spread[name].ranges or (placed is not None and placed.replica):
            values.zero_()
        return self._total(values, f"reading '{PART}' of '{name}'")

    def assign(self, name: str, value: torch.Tensor) -> None:
        """Give a parameter or buffer a new value, a divided one its part of it.

        Raises:
            UnsupportedOpError: it lies packed in a file that has another value.
        """
        if name in self.packed:
            self.packed[name].require_same(self.persistent.value(name), value)
            return
        if name in self.divided:
            self.keep(name, PART, value)
            return
        view = self.storages.views.get(name)
        if view is not None:
            # The rest of its owner keeps the value that it has, wherever that is.
            whole = self.persistent.value(view.owner)
            view.layout.within(whole).copy_(value)
            name, value = view.owner, whole
        self.persistent.assign(name, value)

    def names(self) -> dict[str, str]:
        """Return which tensor each name of ``model.state_dict()`` stands for; untouched ones for none."""
        by_id = {id(tensor): name for name, tensor in self.tensors.items()}
        by_id.update((id(view.tensor), name) for name, view in self.storages.views.items())
        kept = self.model.state_dict(keep_vars=True)
        return {name: by_id.get(id(tensor), "") for name, tensor in kept.items()}

    def like_kept(self, parameter: str, key: str) -> torch.Tensor:
        """Return a tensor without memory that lies as what is kept of a parameter does in torch."""
        return self.rules.like(key, self.like(parameter))

    def kept(self, parameter: str, key: str, *, own: bool = False) -> torch.Tensor:
        """Return a copy of what is kept of a parameter, in torch's shape; of a divided one on all ranks at once.

        Args:
            parameter: its name.
            key: of what is kept.
            own: of a pipeline, this rank's alone.

        Raises:
            RankError: other ranks have parts of it, and one is gone or does something else.
        """
        like = self.like_kept(parameter, key)
        if self.rules.is_scalar(key) and parameter not in self.spread:
            tile = self.tiles[parameter, key][0]
            return tile.values(self.persistent.value(tile.name)).reshape(())
        slot = self.rules.slots[parameter]
        is_divided = slot.is_spread and not (own and slot.owner is not None)
        flat = torch.zeros(like.numel()) if is_divided else torch.empty(like.numel())
        placed = self.rules.placed
        # Pipelines beside each other have the same.
        is_told = not is_divided or placed is None or not placed.replica
        for tile in self.tiles.get((parameter, key), ()) if is_told else ():
            # Of one number each range has a copy.
            begin, end = (0, 1) if self.rules.is_scalar(key) else (tile.begin, tile.end)
            flat[begin:end] = tile.values(self.persistent.value(tile.name))
        if is_divided:
            assert self._total is not None, "only ranks divide"
            # Zeros where others have the values.
            flat = self._total(flat, f"reading '{key}' of '{parameter}'")
        return flat.as_strided(like.shape, like.stride())

    def keep(self, parameter: str, key: str, value: torch.Tensor) -> None:
        """Replace what is kept of a parameter by a tensor of torch's shape."""
        if self.rules.is_scalar(key):
            for tile in self.tiles[parameter, key]:
                self.persistent.assign(tile.name, value.detach().float().reshape(1))
            return
        flat = in_order_of(self.like_kept(parameter, key), value)
        for tile in self.tiles.get((parameter, key), ()):
            self.persistent.assign(tile.name, tile.kept(flat[tile.begin : tile.end]))

    def agreed(self, is_so: bool, what: str) -> bool:
        """Return whether something is so on one rank at least, where parameters are divided among them."""
        if not self.divided or self.spread:
            # Of a pipeline each rank takes back what is its own, when it likes.
            return is_so
        assert self._total is not None, "only ranks divide"
        try:
            return bool(self._total(torch.tensor([float(is_so)]), what).item())
        except RankError:
            return is_so

    def give(self, name: str) -> None:
        """Let the model have a value from ``shut`` on.

        Raises:
            RankError: other ranks have parts of it; see ``value``.
            StorageError: it cannot be read.
        """
        if name not in self.given:
            is_made = name in self.divided or name in self.packed
            taken = self.value if is_made else self.persistent.taken
            behind(self.tensors[name]).data = taken(name)
            self.given.add(name)
