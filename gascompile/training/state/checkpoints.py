"""Checkpoints of a training run: a folder in which a whole one replaces the last.

A checkpoint is written under another name, on the drive with a manifest of digests before it gets its own,
and only then does the one before go. Whatever ends the process, the folder holds a whole checkpoint.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gascompile.core import serial
from gascompile.core.errors import CheckpointError, FormatError, StorageError
from gascompile.runtime.transfer.copying import write_all
from gascompile.training.optimizers.slots import TOTAL
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
from gascompile.weights.checkpoint import read_safetensors_header

FORMAT = "gascompile.training-checkpoint/2"
_NAME = re.compile(r"checkpoint-(\d{8})")
_LOCK, _MANIFEST, _STATE = "lock", "manifest.json", "state.json"
_TRAINED, _FROZEN = "model-trained.safetensors", "model-frozen.safetensors"
_OPTIMIZER, _INDEX = "optimizer.safetensors", "model.safetensors.index.json"
_RANDOM = "random numbers:cpu"


class CheckpointFolder:
    """A folder of one run's checkpoints. It is this process's own from the first save to ``close``."""

    def __init__(self, folder: Path) -> None:
        """Name the folder; it is made by the first save."""
        self.folder = folder
        self._lock = -1
        self._linkable: tuple[Path, int, frozenset[str]] | None = None
        """A checkpoint with the frozen tensors of now, their generation and names."""

    def save(self, states: States, changing: frozenset[str], extra: Mapping[str, Any]) -> Path:
        """Write a checkpoint, remove the ones before it, and return its folder.

        Args:
            changing: names of persistent tensors that steps change.
            extra: JSON values of the caller's.

        Raises:
            StorageError: another job saves here, or the folder cannot be written; the last
                checkpoint stays valid.
        """
        state = _state_json(states, extra)
        try:
            self._take()
            for leftover in [*self.folder.glob(".writing-*"), *self.folder.glob(".old-*")]:
                shutil.rmtree(leftover)
            before = found_in(self.folder)
            number = int(_NAME.fullmatch(before[-1].name)[1]) + 1 if before else 1  # type: ignore[index]
            temporary = self.folder / f".writing-{number:08d}"
            temporary.mkdir()
            try:
                frozen = self._write(temporary, states, changing, state)
                final = self.folder / f"checkpoint-{number:08d}"
                os.rename(temporary, final)
                _sync_folder(self.folder)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
        except OSError as error:
            raise StorageError(
                f"cannot write a checkpoint in {self.folder}: {error.strerror or error}; free some space or choose "
                "another folder. The last checkpoint there is still valid"
            ) from error
        self._linkable = (final, states.generation, frozen)
        for old in before:
            # Under another name first, so that none is ever half there under its own.
            retired = self.folder / f".old-{old.name}"
            with contextlib.suppress(OSError):  # the next save tries again
                os.rename(old, retired)
                shutil.rmtree(retired)
        return final

    def _write(
        self, folder: Path, states: States, changing: frozenset[str], state: bytes
    ) -> frozenset[str]:
        """Write all files of a checkpoint; return the names of frozen tensors."""
        trained, frozen, optimizer = _entries(states, changing, states.counts, states.pending)
        optimizer.update(kept_tensors(states.optimizer))
        names, digests = frozenset(frozen), {}
        linked = self._linked(folder, states.generation, names)
        if linked:
            digests[_FROZEN] = linked
        elif frozen:
            write_tensors(folder / _FROZEN, frozen, states.persistent)
        write_tensors(folder / _TRAINED, trained, states.persistent)
        write_tensors(folder / _OPTIMIZER, optimizer, states.persistent)
        shards = dict.fromkeys(trained, _TRAINED) | dict.fromkeys(frozen, _FROZEN)
        total = sum(entry.size_bytes for entry in (*trained.values(), *frozen.values()))
        index = {"metadata": {"total_size": total}, "weight_map": shards}
        _write_file(folder / _INDEX, json.dumps(index).encode())
        _write_file(folder / _STATE, state)
        files = {
            file.name: {
                "bytes": file.stat().st_size,
                "sha256": digests.get(file.name) or _digest(file),
            }
            for file in sorted(folder.iterdir())
        }
        manifest = json.dumps({"format": FORMAT, "files": files}, indent=1)
        _write_file(folder / _MANIFEST, manifest.encode())
        _sync_folder(folder)
        return names

    def take_part(self, states: States, changing: frozenset[str]) -> None:
        """Compute what rank 0 needs of this rank while it saves, in its order."""
        *_, optimizer = _entries(states, changing, states.counts, states.pending)
        for entry in optimizer.values():
            if entry.made is not None:
                entry.made()

    def _linked(self, folder: Path, generation: int, names: frozenset[str]) -> str:
        """Link the frozen tensors of the checkpoint before; return their digest, or nothing."""
        if self._linkable is None or not names or self._linkable[1:] != (generation, names):
            return ""
        before = self._linkable[0]
        try:
            listed = serial.read_json(before / _MANIFEST)["files"][_FROZEN]
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
        with self._shared() if takes_lock else contextlib.nullcontext():
            found = found_in(self.folder)
            if not found:
                raise CheckpointError(
                    f"there is no checkpoint in {self.folder}; pass the folder that save was given"
                )
            newest = found[-1]
            _verify(newest)
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
        """Let other jobs save here; idempotent."""
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
            view = states.storages.views.get(own)
            changes = own in changing if view is None else view.owner in changing
            (trained if changes else frozen)[name] = (
                made_of(persistent, own) if view is None else _of_view(states, own)
            )
            seen.add(own)
        elif not own and isinstance(kept[name], torch.Tensor):
            trained[name] = of_tensor(kept[name])
    for name in sorted(set(states.tensors) - seen):
        optimizer[f"other:{name}"] = made_of(persistent, name)
    for (parameter, key), tiles in states.tiles.items():
        if not (parameter in pending if key == TOTAL else counts[parameter]):
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


def _of_view(states: States, name: str) -> Entry:
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


def found_in(folder: Path) -> list[Path]:
    """Return the whole checkpoints, the oldest first."""
    return sorted(path for path in folder.glob("checkpoint-*") if _NAME.fullmatch(path.name))


def _verify(folder: Path) -> None:
    try:
        manifest = serial.read_json(folder / _MANIFEST)
    except FormatError as error:
        raise CheckpointError(
            f"{folder / _MANIFEST} is damaged; take the folder from a backup"
        ) from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{folder} is no checkpoint of the format {FORMAT!r}")
    for name, entry in manifest["files"].items():
        file = folder / name
        size_bytes = file.stat().st_size if file.is_file() else -1
        if size_bytes != entry["bytes"]:
            why = f"it has {max(size_bytes, 0)} bytes, and {entry['bytes']} were saved"
        elif _digest(file) != entry["sha256"]:
            why = "its SHA-256 is not that of what was saved"
        else:
            continue
        raise CheckpointError(f"{file} is damaged: {why}; take the folder from a backup")


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _write_file(path: Path, data: bytes) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        write_all(file, data, 0)
        os.fsync(file)
    finally:
        os.close(file)


def _sync_folder(folder: Path) -> None:
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
