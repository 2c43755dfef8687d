"""States of a training run: where torch's formats and the tensors that persist meet.

While a run is open it owns what torch keeps in the model and in ``optimizer.state``: parameters are empty
tensors there and moments have no entry. ``give_back`` returns both.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from gascompile.cost_models.host import memory_limit
from gascompile.errors import CheckpointError
from gascompile.runtime.heap_memory import own_bytes
from gascompile.runtime.pages import Pages
from gascompile.runtime.persistent import Persistent
from gascompile.training.file_values import FileValues
from gascompile.training.optimizers import TOTAL, Rules, Slot, Tile
from gascompile.training.storages import Storages
from gascompile.units import format_size

_BESIDE_BYTES = 128 << 20
"""What copies take while they are made, and what a control group counts beside a process's own memory."""


class States:
    """Parameters, buffers, moments and the number of updates of one run."""

    def __init__(
        self,
        model: nn.Module,
        rules: Rules,
        tensors: Mapping[str, torch.Tensor],
        *,
        storages: Storages,
        tiles: Iterable[Tile],
        folder: Path,
        buffers: memoryview,
        pages: Pages | None,
        values: FileValues | None = None,
    ) -> None:
        """Take over what is in the model and in the optimizer.

        Args:
            rules: of the optimizer; they know its parameters that are trained.
            tensors: the model's own tensors by name, without those that are views of others.
            storages: know the views.
            tiles: all that is kept per parameter.
            folder: where what leaves memory goes.
            buffers: memory for transfers.
            pages: what values lie in; the heap, if ``None``.
            values: of tensors that have theirs in files.

        Raises:
            CheckpointError: the optimizer's parameters were not updated equally often; a file of ``values``
                cannot be read.
            StorageError: the folder cannot be written to, or has too little space.
        """
        self.model, self.rules, self.optimizer = model, rules, rules.optimizer
        self.values = values
        self.tensors = {**(values.tensors if values else {}), **tensors}
        self.storages = storages
        self.generation = 0
        """Goes up when values come from elsewhere."""
        entries = {
            slot.index: self.optimizer.state.get(self.tensor(slot.name), {})
            for slot in rules.slots.values()
        }
        self.counts, self.num_steps = self._counts(entries)
        """Updates of each parameter so far, by name; without planned updates the optimizer has its own."""
        self.num_batches = 0
        self.pending: frozenset[str] = frozenset()
        """Parameters whose totals hold a gradient."""
        own = {name: tensor.detach() for name, tensor in self.tensors.items()}
        self.tiles: dict[tuple[str, str], list[Tile]] = {}
        """In order, by parameter and key."""
        for tile in tiles:
            self.tiles.setdefault((tile.parameter, tile.key), []).append(tile)
        zeros = {t.name: (t.length, t.dtype) for tiles in self.tiles.values() for t in tiles}
        unread = values.sources if values else ()
        self.persistent = Persistent(own, zeros, folder, buffers, pages, unread=unread)
        if values is not None:
            values.fill(self.persistent)
        for slot in rules.slots.values():
            # What no rule knows stays where it is.
            if self._keys(slot) and self.optimizer.state.get(self.tensor(slot.name)):
                self._assign_moments(slot, self.optimizer.state.pop(self.tensor(slot.name)))
        for tensor in (*self.tensors.values(), *(v.tensor for v in storages.views.values())):
            tensor.data = torch.empty(0, dtype=tensor.dtype)

    def stepped(self) -> None:
        """Take note of an update of the parameters that had a gradient."""
        self.num_steps += 1
        for name in self.pending:
            self.counts[name] += 1
        self.pending = frozenset()

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

    def like(self, name: str) -> torch.Tensor:
        """Return a tensor that has a parameter's or buffer's layout alone."""
        view = self.storages.views.get(name)
        if view is None:
            return self.persistent.tensors[name].to("meta")
        layout, dtype = view.layout, view.tensor.dtype
        return torch.empty_strided(layout.size, layout.stride, dtype=dtype, device="meta")

    def value(self, name: str) -> torch.Tensor:
        """Return a copy of a parameter or buffer."""
        view = self.storages.views.get(name)
        if view is None:
            return self.persistent.value(name)
        return view.layout.within(self.persistent.value(view.owner)).clone()

    def assign(self, name: str, value: torch.Tensor) -> None:
        """Give a parameter or buffer a new value."""
        view = self.storages.views.get(name)
        if view is None:
            self.persistent.assign(name, value)
        else:
            layout = view.layout
            self.persistent.fill(view.owner, lambda whole: layout.within(whole).copy_(value))

    def names(self) -> dict[str, str]:
        """Return which tensor each name of ``model.state_dict()`` stands for; untouched ones for none."""
        by_id = {id(tensor): name for name, tensor in self.tensors.items()}
        by_id.update((id(view.tensor), name) for name, view in self.storages.views.items())
        kept = self.model.state_dict(keep_vars=True)
        return {name: by_id.get(id(tensor), "") for name, tensor in kept.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return copies in memory, in torch's own formats."""
        found = {name: self.value(name) for name in (*self.tensors, *self.storages.views)}
        plain_state = self.model.state_dict()
        model = {}
        for name, own in self.names().items():
            value = plain_state[name]
            plain = value.clone() if isinstance(value, torch.Tensor) else value
            model[name] = found[own] if own else plain
        listed: dict[str, Any] = self.optimizer.state_dict()
        kept = copy.deepcopy(listed["state"])
        state = {**kept, **{i: entry for _, i, entry in self._entries()}}
        return {"model": model, "optimizer": {**listed, "state": dict(sorted(state.items()))}}

    def _entries(self) -> Iterable[tuple[Slot, int, dict[str, Any]]]:
        """Yield what torch's optimizer would hold per trained parameter, after the first update."""
        for slot in self.rules.slots.values():
            entry: dict[str, Any] = {}
            count = self.counts[slot.name]
            if count and self.rules.is_adam:
                entry["step"] = torch.tensor(float(count))
            for key in self._keys(slot) if count else ():
                entry[key] = self.kept(slot.name, key)
            if entry:
                yield slot, slot.index, entry

    def _keys(self, slot: Slot) -> tuple[str, ...]:
        return self.rules.keys(self.optimizer.param_groups[slot.group])

    def kept(self, parameter: str, key: str) -> torch.Tensor:
        """Return a copy of what is kept of a parameter, in its shape."""
        like = self.like(parameter)
        flat = torch.empty(like.numel())
        for tile in self.tiles[parameter, key]:
            flat[tile.begin : tile.end] = tile.values(self.persistent.value(tile.name))
        return flat.as_strided(like.shape, like.stride())

    def keep(self, parameter: str, key: str, value: torch.Tensor) -> None:
        """Replace what is kept of a parameter by a tensor of its shape."""
        flat = _in_order_of(self.like(parameter), value)
        for tile in self.tiles[parameter, key]:
            self.persistent.assign(tile.name, tile.kept(flat[tile.begin : tile.end]))

    def load_state_dict(self, found: Mapping[str, Any]) -> None:
        """Replace all values by those of ``model.state_dict()`` and ``optimizer.state_dict()``.

        Raises:
            CheckpointError: they are of another model or optimizer; nothing has changed then.
        """
        if set(found) != {"model", "optimizer"}:
            raise CheckpointError(
                f"a state has the keys 'model' and 'optimizer', this one {sorted(found)}; "
                "pass {'model': model.state_dict(), 'optimizer': optimizer.state_dict()}"
            )
        model, state = found["model"], found["optimizer"]["state"]
        self.check_model({name: tuple(value.shape) for name, value in _tensors(model).items()})
        entries = {slot.index: state.get(slot.index, {}) for slot in self.rules.slots.values()}
        counts, num_steps = self._counts(entries)
        for slot in self.rules.slots.values():
            self._check_moments(slot, entries[slot.index])
        self.check_groups(found["optimizer"]["param_groups"])
        self.generation += 1
        self._load_groups(found["optimizer"])
        kept = self.model.state_dict()
        for name, own in self.names().items():
            if own:
                self.assign(own, model[name])
            elif isinstance(kept[name], torch.Tensor):
                kept[name].copy_(model[name])
        for slot in self.rules.slots.values():
            self._assign_moments(slot, entries[slot.index])
        self.clear(self.pending, TOTAL)
        self.counts, self.num_steps = counts, num_steps
        self.pending, self.num_batches = frozenset(), 0

    def forget(self, counts: Mapping[str, int], pending: frozenset[str]) -> None:
        """Take these numbers over from a checkpoint; what it has no moments or totals of has zeros again."""
        self.clear(self.pending - pending, TOTAL)
        for slot in self.rules.slots.values():
            if self.counts[slot.name] and not counts[slot.name]:
                self.clear([slot.name], *self._keys(slot))
        self.counts, self.pending = dict(counts), pending

    def clear(self, parameters: Iterable[str], *keys: str) -> None:
        """Let what is kept of parameters be zeros again."""
        for parameter in parameters:
            for key in keys:
                self.keep(parameter, key, torch.zeros(self.like(parameter).shape))

    def check_model(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Refuse the state of another model.

        Raises:
            CheckpointError: names the keys.
        """
        own = self.names()
        kept = _tensors(self.model.state_dict())
        wanted = {
            name: tuple((self.like(own[name]) if own[name] else kept[name]).shape) for name in kept
        }
        missing, extra = sorted(set(wanted) - set(shapes)), sorted(set(shapes) - set(wanted))
        other = [n for n in sorted(set(wanted) & set(shapes)) if wanted[n] != shapes[n]]
        said = [f"lacks {_some(missing)}"] if missing else []
        said += [f"has {_some(extra)} that the model does not"] if extra else []
        said += [
            f"has '{name}' as {list(shapes[name])} where the model's is {list(wanted[name])}"
            for name in other[:3]
        ]
        if said:
            raise CheckpointError(
                f"the state is of another model than {type(self.model).__name__}: it {'; it '.join(said)}"
            )

    def check_groups(self, groups: list[dict[str, Any]]) -> None:
        """Refuse ``param_groups`` of another optimizer.

        Raises:
            CheckpointError: names what is different.
        """
        listed = self.optimizer.state_dict()["param_groups"]
        sizes = [len(group["params"]) for group in groups]
        own = [len(group["params"]) for group in listed]
        if sizes != own:
            raise CheckpointError(
                f"the optimizer's state has {sizes} parameters per group, this optimizer {own}; "
                "make it over the same parameters in the same groups"
            )
        for number, (group, mine) in enumerate(zip(groups, listed, strict=True)):
            lacking = sorted(set(mine) - set(group) - {"param_names", "initial_lr"})
            if lacking or self.rules.keys(group) != self.rules.keys(mine):
                raise CheckpointError(
                    f"group {number} of the optimizer's state is of another kind of optimizer than "
                    f"{type(self.optimizer).__name__}: {lacking or 'other moments'}"
                )

    def load_groups(self, groups: list[dict[str, Any]], **state: dict[int, Any]) -> None:
        """Replace the optimizer's hyperparameters by checked ones, and what else is its own by ``state``."""
        self._load_groups({"param_groups": groups, **state})

    def _load_groups(self, found: Mapping[str, Any]) -> None:
        # Moments stay out: torch would keep a copy of each in memory.
        slots = {slot.index for slot in self.rules.slots.values() if self._keys(slot)}
        own: Mapping[Any, Any] = self.optimizer.state_dict()["state"]
        rest = {key: value for key, value in found.get("state", own).items() if key not in slots}
        self.optimizer.load_state_dict({**found, "state": rest})

    def _check_moments(self, slot: Slot, entry: Mapping[str, Any]) -> None:
        shape = tuple(self.like(slot.name).shape)
        for key in self._keys(slot) if entry else ():
            value = entry.get(key)
            if not isinstance(value, torch.Tensor) or tuple(value.shape) != shape:
                raise CheckpointError(
                    f"the optimizer's state has no '{key}' of shape {list(shape)} for '{slot.name}'; "
                    "it is of another model or optimizer"
                )

    def _assign_moments(self, slot: Slot, entry: Mapping[str, Any]) -> None:
        for key in self._keys(slot):
            if entry.get(key) is not None:
                self.keep(slot.name, key, entry[key])
            elif self.counts[slot.name]:
                self.clear([slot.name], key)

    def _counts(self, entries: Mapping[int, Mapping[str, Any]]) -> tuple[dict[str, int], int]:
        """Return how often each parameter was updated, as far as its rule counts, and how often any was."""
        steps = [int(entry["step"]) for entry in entries.values() if "step" in entry]
        counts = {}
        for slot in self.rules.slots.values():
            entry = entries[slot.index]
            if self.rules.is_adam:
                counts[slot.name] = int(entry["step"]) if entry else 0
            else:
                counts[slot.name] = int(entry.get("momentum_buffer") is not None)
        return counts, max(steps, default=0)

    def give_back(self, *, moments: bool) -> None:
        """Fill the model again, and the optimizer where ``moments`` is true and memory allows it.

        Raises:
            StorageError: a value cannot be read.
        """
        if self.values is not None and self.values.stays_out(
            self.tensors, self.persistent, _available_bytes()
        ):
            return
        for name, tensor in self.tensors.items():
            tensor.data = self.persistent.taken(name)
        for view in self.storages.views.values():
            view.tensor.data = view.layout.within(self.tensors[view.owner].detach())
        tiles = (tile for tiles in self.tiles.values() for tile in tiles)
        size_bytes = torch.float32.itemsize * sum(tile.num_elements for tile in tiles)
        available = _available_bytes()
        if moments and size_bytes + size_bytes // 16 + _BESIDE_BYTES > available:
            warnings.warn(
                f"the optimizer's state of {format_size(size_bytes)} does not fit the {format_size(available)} of "
                "memory that is free, and stays out of the optimizer; use save before close to keep it",
                stacklevel=3,
            )
        elif moments:
            for slot, _, entry in list(self._entries()):
                self.optimizer.state[self.tensor(slot.name)] = entry


class Shapes:
    """Gives emptied parameters their shapes back while something looks at them, without memory."""

    def __init__(self, states: States | None, storages: Storages) -> None:
        self._states, self._apart = states, storages.apart()

    def __enter__(self) -> None:
        if self._states is not None:
            for name, tensor in self._states.tensors.items():
                tensor.data = self._states.persistent.tensors[name]
        self._apart.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._apart.__exit__(kind, error, trace)
        if self._states is not None:
            for tensor in self._states.tensors.values():
                tensor.data = torch.empty(0, dtype=tensor.dtype)


def _in_order_of(like: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return the elements of ``value`` in the order in which ``like`` lies in memory."""
    laid = value.detach().to(torch.float32)
    if laid.stride() != like.stride():
        laid = torch.empty_strided(like.shape, like.stride()).copy_(laid)
    return laid.as_strided((like.numel(),), (1,))


def _available_bytes() -> int:
    """Return what this process may still take, control groups included."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    (found,) = (int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    return min(found << 10, memory_limit().size_bytes - own_bytes())


def _tensors(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(f"'{name}'" for name in names[:3]) + more
