"""Checkpoints of a training run: a folder in which whole ones follow each other.

The values of now are written to files before ``save`` returns; that these are on the drive, with a manifest of
digests, may go on behind the next steps. Only then does an older one go. Whatever ends the process, the folder holds a
whole one.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gascompile.core import serial
from gascompile.core.errors import CheckpointError, FormatError, StorageError
from gascompile.core.waiting import life
from gascompile.runtime.transfer.copying import write_all
from gascompile.training.optimizers.slots import PART, TOTAL
from gascompile.training.optimizers.unplanned import KeptState, kept_tensors, kept_values
from gascompile.training.state.open_optimizer import listed, plain_group
from gascompile.training.state.tensor_files import (
    Entry,
    check_tensors,
    joined,
    made_of,
    of_tensor,
    read_tensors,
    write_tensors,
)
from gascompile.training.state.train_state import States
from gascompile.training.state.whole_checkpoints import (
    MANIFEST,
    Behind,
    Linkable,
    Saving,
    found_in,
    verify,
)
from gascompile.weights.checkpoint import read_safetensors_header

_LOCK, _STATE = "lock", "state.json"
_TRAINED, _FROZEN = "model-trained.safetensors", "model-frozen.safetensors"
_OPTIMIZER, _INDEX = "optimizer.safetensors", "model.safetensors.index.json"
_RANDOM = "random numbers:cpu"


class CheckpointFolder:
    """A folder of one run's checkpoints. It is this process's own from the first save to ``close``."""

    def __init__(self, folder: Path) -> None:
        """Name the folder; it is made by the first save."""
        self.folder = folder
        self._lock = -1
        self._linkable: Linkable | None = None
        """A checkpoint with the frozen tensors of now, their generation and names."""
        self._behind: Behind | None = None
        self._life = life()

    def save(
        self,
        states: States,
        changing: frozenset[str],
        extra: Mapping[str, Any],
        *,
        keep: int = 1,
        blocking: bool = True,
    ) -> Path:
        """Write a checkpoint, remove the ones before the newest ``keep``, and return its folder.

        Args:
            changing: names of persistent tensors that steps change.
            extra: JSON values of the caller's.
            keep: how many there are at most afterwards, this one included.
            blocking: False: return once all values of now are in files. An own thread has these on the drive, makes
                their digests and renames the folder; ``finish`` waits for it.

        Raises:
            StorageError: another job saves here, or the folder cannot be written, now or by the save before; the
                last checkpoint stays valid.
        """
        state = _state_json(states, extra)
        self.finish()
        try:
            self._take()
            saving = Saving(self.folder)
            try:
                frozen = self._write(saving, states, changing, state)
                linkable = (saving.final, states.generation, frozen)
                if blocking:
                    saving.finish(keep)
                    self._linkable = linkable
                else:
                    self._behind = Behind(saving, keep, linkable)
                    self._behind.begin()
            except BaseException:
                if self._behind is None:
                    saving.abandon()
                raise
        except OSError as error:
            raise self._not_written(error) from error
        return saving.final

    def _not_written(self, error: OSError) -> StorageError:
        return StorageError(
            f"cannot write a checkpoint in {self.folder}: {error.strerror or error}; free some space or choose "
            "another folder. The last checkpoint there is still valid"
        )

    def finish(self, *, waits: bool = True) -> None:
        """Block until a save that goes on behind steps is over.

        Args:
            waits: False: only look whether it is.

        Raises:
            StorageError: it has failed, which is said once; the last checkpoint stays valid.
        """
        behind = self._behind
        # The thread of a save is not in a child of its process.
        if behind is None or self._life is not life() or not (waits or behind.is_over):
            return
        error = behind.wait()
        self._behind = None
        if error is None:
            self._linkable = behind.linkable
        elif isinstance(error, OSError):
            raise self._not_written(error) from error
        else:
            raise error

    def _write(
        self, saving: Saving, states: States, changing: frozenset[str], state: bytes
    ) -> frozenset[str]:
        """Write all files of a checkpoint but its manifest; return the names of frozen tensors."""
        trained, frozen, optimizer = _entries(states, changing, states.counts, states.pending)
        optimizer.update(kept_tensors(states.optimizer))
        names = frozenset(frozen)
        linked = self._linked(saving.temporary, states.generation, names)
        if linked:
            saving.digests[_FROZEN] = linked
        files = {_TRAINED: trained, _OPTIMIZER: optimizer}
        for name, entries in (
            files if linked or not frozen else {_FROZEN: frozen, **files}
        ).items():
            write_tensors(saving.temporary / name, entries, states.persistent, saving.files)
        shards = dict.fromkeys(trained, _TRAINED) | dict.fromkeys(frozen, _FROZEN)
        total = sum(entry.size_bytes for entry in (*trained.values(), *frozen.values()))
        index = {"metadata": {"total_size": total}, "weight_map": shards}
        saving.add(_INDEX, json.dumps(index).encode())
        saving.add(_STATE, state)
        return names

    def take_part(self, states: States, changing: frozenset[str]) -> None:
        """Compute what rank 0 needs of this rank while it saves, in its order."""
        trained, _, optimizer = _entries(states, changing, states.counts, states.pending)
        for entry in (*trained.values(), *optimizer.values()):
            if entry.made is not None:
                entry.made()

    def _linked(self, folder: Path, generation: int, names: frozenset[str]) -> str:
        """Link the frozen tensors of the checkpoint before; return their digest, or nothing."""
        if self._linkable is None or not names or self._linkable[1:] != (generation, names):
            return ""
        before = self._linkable[0]
        try:
            listed = serial.read_json(before / MANIFEST)["files"][_FROZEN]
            os.link(before / _FROZEN, folder / _FROZEN)
        except (OSError, StorageError, FormatError):
            return ""  # gone, or a file system without links: it is written again
        digest: str = listed["sha256"]
        return digest

    def load(
        self, states: States, changing: frozenset[str], *, takes_lock: bool = True
    ) -> dict[str, Any]:
        """Restore the newest checkpoint and return what the caller had added to it.

        Args:
            changing: names of persistent tensors that steps change.
            takes_lock: False where another rank of the job has it.

        Raises:
            CheckpointError: there is none, it is damaged, or of another run; nothing has changed then.
            StorageError: another job saves here, or a value cannot be kept.
        """
        self.finish()
        if (self.folder / MANIFEST).is_file():
            raise CheckpointError(
                f"{self.folder} is one checkpoint; load takes the folder that save was given, of which it restores the "
                "newest. To go back to this one, copy it under its own name into an empty folder, and pass that"
            )
        with self._shared() if takes_lock else contextlib.nullcontext():
            found = found_in(self.folder)
            if not found:
                raise CheckpointError(
                    f"there is no checkpoint in {self.folder}; pass the folder that save was given"
                )
            newest = found[-1]
            verify(newest)
            state = serial.read_json(newest / _STATE)
            if (form := state.get("states", "fp32")) != states.rules.states:
                raise CheckpointError(
                    f"{newest} keeps moments as {form!r}, this step as {states.rules.states!r}; compile with "
                    f"states={form!r}, or take it over through state_dict() and load_state_dict()"
                )
            counts = {name: state["updates"].get(name, 0) for name in states.counts}
            pending = frozenset(state["pending"])
            shapes = _entries(states, changing, counts, pending)
            own = KeptState(newest / _OPTIMIZER, state.get("optimizer_state", []))
            shapes[2].update(own.entries)
            whole = shapes[0] | shapes[1]
            split = _split(newest, whole, shapes[2])
            states.rules.check_groups(state["param_groups"])
            if state["optimizer"] != type(states.optimizer).__name__:
                raise CheckpointError(
                    f"{newest} is of {state['optimizer']}, the optimizer is {type(states.optimizer).__name__}"
                )
            states.generation += 1
            for file, entries in split.items():
                read_tensors(newest / file, entries, states.persistent)
            groups = [plain_group(group) for group in state["param_groups"]]
            kept = {"state": own.state} if "optimizer_state" in state else {}
            states.load_groups(groups, **kept)
            states.forget(counts, pending)
            states.num_steps, states.num_batches = state["step"], state["num_batches"]
            frozen = frozenset(split.get(_FROZEN, {}))
            self._linkable = (newest, states.generation, frozen)
        extra: dict[str, Any] = state["extra"]
        return extra

    def close(self) -> None:
        """Wait for the end of a save and let other jobs save here; idempotent.

        Raises:
            StorageError: the save has failed.
        """
        try:
            self.finish()
        finally:
            if self._lock >= 0:
                os.close(self._lock)
                self._lock = -1

    def _take(self) -> None:
        if self._lock >= 0:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        file = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._hold(file, fcntl.LOCK_EX)
        self._lock = file
        os.ftruncate(file, 0)
        write_all(file, f"{os.getpid()}\n".encode(), 0)

    @contextlib.contextmanager
    def _shared(self) -> Iterator[None]:
        """Keep other jobs from replacing what is read."""
        if self._lock >= 0 or not (self.folder / _LOCK).is_file():
            yield
            return
        file = os.open(self.folder / _LOCK, os.O_RDONLY | os.O_CLOEXEC)
        self._hold(file, fcntl.LOCK_SH)
        try:
            yield
        finally:
            os.close(file)

    def _hold(self, file: int, kind: int) -> None:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.pread(file, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(file)
            raise StorageError(
                f"another job (process {owner}) keeps its checkpoints in {self.folder}; "
                "choose another folder, or end that job"
            ) from error


def _entries(
    states: States, changing: frozenset[str], counts: Mapping[str, int], pending: frozenset[str]
) -> tuple[dict[str, Entry], dict[str, Entry], dict[str, Entry]]:
    """Return the tensors of the files: of the model those that change and the others, and all else.

    Args:
        counts: updates of each parameter; what was never updated has zeros, which are not written.
        pending: parameters whose totals hold a gradient.
    """
    persistent = states.persistent
    trained: dict[str, Entry] = {}
    frozen: dict[str, Entry] = {}
    optimizer: dict[str, Entry] = {}
    kept, seen = states.model.state_dict(keep_vars=True), set()
    for name, own in states.names().items():
        if own and own not in seen:
            changes = own in states.divided or states.owner(own) in changing
            (trained if changes else frozen)[name] = _of_model(states, own)
            seen.add(own)
        elif not own and isinstance(kept[name], torch.Tensor):
            trained[name] = of_tensor(kept[name])
    for name in sorted(set(states.tensors) - seen):
        optimizer[f"other:{name}"] = _of_model(states, name)
    for (parameter, key), tiles in states.tiles.items():
        if key == PART or not (parameter in pending if key == TOTAL else counts[parameter]):
            continue
        like = states.like(parameter)
        if tiles[0].code is not None:
            # As they are: only the same tiles of a parameter laid out the same way can take them.
            order = "" if like.is_contiguous() else f" of strides {like.stride()}"
            for tile in tiles:
                optimizer[f"{tile.name}{order}"] = made_of(persistent, tile.name)
            continue
        lies = states.like_kept(parameter, key)
        entry = joined(lies.shape, [tile.name for tile in tiles])
        is_divided = bool(states.rules.slots[parameter].bounds)
        if is_divided or states.rules.is_scalar(key) or not lies.is_contiguous():
            entry = replace(
                entry,
                parts=(),
                made=partial(states.kept, parameter, key),
                assign=partial(states.keep, parameter, key),
            )
        optimizer[f"{parameter}:{key}"] = entry
    random = torch.get_rng_state()
    optimizer[_RANDOM] = Entry(
        dtype=torch.uint8,
        shape=tuple(random.shape),
        made=lambda: random,
        assign=torch.set_rng_state,
    )
    return trained, frozen, optimizer


def _of_model(states: States, name: str) -> Entry:
    made = states.storages.views.keys() | states.divided.keys() | states.packed.keys()
    if name not in made:
        return made_of(states.persistent, name)
    like = states.like(name)
    return Entry(
        dtype=like.dtype,
        shape=tuple(like.shape),
        made=partial(states.value, name),
        assign=partial(states.assign, name),
    )


def _split(
    folder: Path, model: Mapping[str, Entry], optimizer: Mapping[str, Entry]
) -> dict[str, dict[str, Entry]]:
    """Return the tensors by the file that holds them, after checking that they are the right ones."""
    listed = {
        file: read_safetensors_header(folder / file)[0]
        for file in (_TRAINED, _FROZEN, _OPTIMIZER)
        if (folder / file).is_file()
    }
    both = {**listed.get(_FROZEN, {}), **listed[_TRAINED]}
    check_tensors(folder, both, model)
    check_tensors(folder / _OPTIMIZER, listed[_OPTIMIZER], optimizer)
    every = {**model, **optimizer}
    return {file: {name: every[name] for name in names} for file, names in listed.items()}


def _state_json(states: States, extra: Mapping[str, Any]) -> bytes:
    groups = listed(states.optimizer)["param_groups"]
    plain = [
        {k: v.item() if isinstance(v, torch.Tensor) else v for k, v in group.items()}
        for group in groups
    ]
    state = {
        "step": states.num_steps,
        "num_batches": states.num_batches,
        "updates": {name: count for name, count in states.counts.items() if count},
        "pending": sorted(states.pending),
        "optimizer": type(states.optimizer).__name__,
        "states": states.rules.states,
        "param_groups": plain,
        "optimizer_state": kept_values(states.optimizer),
        "extra": dict(extra),
    }
    try:
        raw = json.dumps(state, allow_nan=False, indent=1)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"extra and the optimizer's groups have to be JSON values without NaN: {error}"
        ) from error
    return raw.encode()
