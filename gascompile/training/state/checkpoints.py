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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gascompile.core import serial
from gascompile.core.errors import CheckpointError, FormatError, StorageError, UnsupportedOpError
from gascompile.core.files import open_lock, open_regular
from gascompile.core.waiting import life
from gascompile.runtime.transfer.copying import write_all
from gascompile.training.optimizers.kept_state import KeptState, kept_tensors, kept_values
from gascompile.training.state.checkpoint_entries import entries_of, random_numbers
from gascompile.training.state.extra_values import TAGGED, encoded
from gascompile.training.state.open_optimizer import group_of_file, listed, plain_group
from gascompile.training.state.pieces import Stored, stored_in
from gascompile.training.state.run_state import STATE, read_state
from gascompile.training.state.tensor_files import (
    Entry,
    check_tensors,
    read_tensors,
    whole_part,
    write_tensors,
)
from gascompile.training.state.train_state import States
from gascompile.training.state.whole_checkpoints import (
    MANIFEST,
    Behind,
    Linkable,
    Saving,
    files_of,
    found_in,
    verify,
)

_LOCK = "lock"
_TRAINED, FROZEN = "model-trained.safetensors", "model-frozen.safetensors"
_OPTIMIZER, INDEX = "optimizer.safetensors", "model.safetensors.index.json"
RANDOM = "random numbers:cpu"
"""Of one process, or of rank 0; others' have their numbers behind it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """A checkpoint that was looked at and may be taken over."""

    folder: Path
    state: dict[str, Any]
    stored: dict[str, Stored]
    entries: dict[str, Entry]
    kept: KeptState
    groups: list[dict[str, Any]]
    """Of the optimizer."""

    @property
    def extra(self) -> dict[str, Any]:
        """Return what the caller of the save had added."""
        extra: dict[str, Any] = self.state["extra"]
        return extra


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
        replicas: int = 1,
    ) -> Path:
        """Write a checkpoint, remove the ones before the newest ``keep``, and return its folder.

        Args:
            changing: names of persistent tensors that steps change.
            extra: values of the caller's, see ``extra_values``.
            keep: how many there are at most afterwards, this one included.
            blocking: False: return once all values of now are in files. An own thread has these on the drive, makes
                their digests and renames the folder; ``finish`` waits for it.

        Raises:
            StorageError: another job saves here, or the folder cannot be written, now or by the save before; the
                last checkpoint stays valid.
            UnsupportedOpError: more than one replica.
        """
        if replicas > 1:
            raise UnsupportedOpError(
                "replicas=2 is for several ranks, and this process trains alone; leave it out"
            )
        state = state_json(states, extra)
        self.finish()
        try:
            self._take()
            saving = Saving(self.folder)
            try:
                frozen = self._write(saving, states, changing, state)
                linkable = (saving.final, states.generation, frozen)
                self._end(saving, keep, linkable, blocking=blocking)
            except BaseException:
                if self._behind is None:
                    saving.abandon()
                raise
        except OSError as error:
            raise self._not_written(error) from error
        return saving.final

    def _end(self, saving: Saving, keep: int, linkable: Linkable, *, blocking: bool) -> None:
        """Make a checkpoint whole, now or behind steps."""
        if blocking:
            saving.finish(keep)
            self._linkable = linkable
        else:
            self._behind = Behind(saving, keep, linkable)
            self._behind.begin()

    def _not_written(self, error: OSError) -> StorageError:
        """Return why there is no new checkpoint."""
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
        trained, frozen, optimizer = entries_of(states, changing, states.counts, states.pending)
        optimizer.update(kept_tensors(states.optimizer))
        optimizer[RANDOM] = random_numbers()
        self._write_frozen(saving, states, frozen)
        for name, entries in ((_TRAINED, trained), (_OPTIMIZER, optimizer)):
            parts = [whole_part(name, entry) for name, entry in entries.items()]
            write_tensors(saving.temporary / name, parts, states.persistent, saving.files)
        shards = dict.fromkeys(trained, _TRAINED) | dict.fromkeys(frozen, FROZEN)
        saving.add(INDEX, index_of(shards, {**trained, **frozen}))
        saving.add(STATE, state)
        return frozenset(frozen)

    def _write_frozen(self, saving: Saving, states: States, frozen: Mapping[str, Entry]) -> None:
        """Write what no step changes, or link it from the checkpoint before."""
        linked = self._linked(saving.temporary, states.generation, frozenset(frozen))
        if linked:
            saving.digests[FROZEN] = linked
        elif frozen:
            parts = [whole_part(name, entry) for name, entry in frozen.items()]
            write_tensors(saving.temporary / FROZEN, parts, states.persistent, saving.files)

    def _linked(self, folder: Path, generation: int, names: frozenset[str]) -> str:
        """Link the frozen tensors of the checkpoint before; return their digest, or nothing."""
        if self._linkable is None or not names or self._linkable[1:] != (generation, names):
            return ""
        before = self._linkable[0]
        try:
            listed = serial.read_json(before / MANIFEST)["files"][FROZEN]
            os.link(before / FROZEN, folder / FROZEN)
        except (OSError, StorageError, FormatError):
            return ""  # gone, or a file system without links: it is written again
        digest: str = listed["sha256"]
        return digest

    def load(self, states: States, changing: frozenset[str]) -> dict[str, Any]:
        """Restore the newest checkpoint and return what the caller had added to it.

        Args:
            changing: names of persistent tensors that steps change.

        Raises:
            CheckpointError: there is none, it is damaged, or of another run; nothing has changed then.
            StorageError: another job saves here, or a value cannot be read or kept.
        """
        self.finish()
        self._require_folder()
        with self._shared():
            saved = found_in(self.folder)
            if not saved:
                raise CheckpointError(
                    f"there is no checkpoint in {self.folder}; pass the folder that save was given"
                )
            newest = saved[-1]
            verify(newest)
            loading = self._looked_at(newest, states, changing)
            self._restore(states, loading)
        return loading.extra

    def _require_folder(self) -> None:
        if (self.folder / MANIFEST).is_file():
            raise CheckpointError(
                f"{self.folder} is one checkpoint; load takes the folder that save was given, of which it restores the "
                "newest. To go back to this one, copy it under its own name into an empty folder, and pass that"
            )

    def _looked_at(self, newest: Path, states: States, changing: frozenset[str]) -> Loading:
        """Return what may be taken over; raises ``CheckpointError``."""
        state = read_state(newest)
        if (form := state.get("states", "fp32")) != states.rules.states:
            raise CheckpointError(
                f"{newest} keeps moments as {form!r}, this step as {states.rules.states!r}; compile with "
                f"states={form!r}, or take it over through state_dict() and load_state_dict()"
            )
        counts = {name: state["updates"].get(name, 0) for name in states.counts}
        stored = self._stored(newest)
        trained, frozen, optimizer = entries_of(
            states, changing, counts, frozenset(state["pending"])
        )
        kept = KeptState(stored, state.get("optimizer_state", []))
        entries = {**trained, **frozen, **optimizer, **kept.entries}
        random = {name: s for name, s in stored.items() if name.startswith(RANDOM)}
        numbers = self._random(random)
        others = {name: s for name, s in stored.items() if name not in random}
        check_tensors(newest, others, entries)
        check_tensors(newest, {name: stored[name] for name in numbers if name in stored}, numbers)
        entries.update(numbers)
        states.rules.check_groups(state["param_groups"])
        if state["optimizer"] != type(states.optimizer).__name__:
            raise CheckpointError(
                f"{newest} is of {state['optimizer']}, the optimizer is {type(states.optimizer).__name__}"
            )
        own = listed(states.optimizer)["param_groups"]
        groups = [group_of_file(*pair) for pair in zip(state["param_groups"], own, strict=True)]
        return Loading(
            folder=newest, state=state, stored=stored, entries=entries, kept=kept, groups=groups
        )

    def _stored(self, newest: Path) -> dict[str, Stored]:
        """Return the tensors of a checkpoint; raises ``CheckpointError``."""
        return stored_in(files_of(newest))

    def _random(self, stored: Mapping[str, Stored]) -> dict[str, Entry]:  # noqa: ARG002
        """Return the random numbers, among those of all ranks, that this process takes over: rank 0's."""
        return {RANDOM: random_numbers()}

    def _restore(self, states: States, loading: Loading) -> None:
        """Take a checkpoint over; raises ``StorageError``, after which values are half those of before."""
        state = loading.state
        states.generation += 1
        states.written.clear()
        read_tensors(loading.stored, loading.entries, states.persistent)
        kept = {"state": loading.kept.state} if "optimizer_state" in state else {}
        states.load_groups(loading.groups, **kept)
        counts = {name: state["updates"].get(name, 0) for name in states.counts}
        states.forget(counts, frozenset(state["pending"]))
        states.num_steps, states.num_batches = state["step"], state["num_batches"]
        frozen = [
            name
            for name, s in loading.stored.items()
            if s.pieces and s.pieces[0].file.name == FROZEN
        ]
        self._linkable = (loading.folder, states.generation, frozenset(frozen))

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
        file = open_lock(self.folder / _LOCK)
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
        file = open_regular(self.folder / _LOCK)
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


def index_of(shards: Mapping[str, str], entries: Mapping[str, Entry]) -> bytes:
    """Return the index of a model's tensors, by the files that they are in."""
    total = sum(entries[name].size_bytes for name in shards)
    return json.dumps({"metadata": {"total_size": total}, "weight_map": dict(shards)}).encode()


def state_json(states: States, extra: Mapping[str, Any]) -> bytes:
    """Return what of a run is no tensor.

    Raises:
        ValueError: ``extra`` holds what no checkpoint can.
    """
    written, is_tagged = encoded(extra)
    plain = [plain_group(group) for group in listed(states.optimizer)["param_groups"]]
    state = {
        "step": states.num_steps,
        "num_batches": states.num_batches,
        "updates": {name: count for name, count in states.counts.items() if count},
        "pending": sorted(states.pending),
        "optimizer": type(states.optimizer).__name__,
        "states": states.rules.states,
        "param_groups": plain,
        "optimizer_state": kept_values(states.optimizer),
        "extra": written,
        **({TAGGED: True} if is_tagged else {}),
    }
    try:
        raw = json.dumps(state, allow_nan=False, indent=1)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"the optimizer's groups have to be JSON values without NaN: {error}"
        ) from error
    return raw.encode()
