"""Rank checkpoints: each rank writes what it keeps from its own drive, and all come to the same end.

What fails on one rank is voted on, so that all raise it, and none goes on with a checkpoint that another has not. Votes
go through the job's store: those of a save behind steps do not meet with the exchanges of steps.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from gascompile.core import serial
from gascompile.core.errors import CheckpointError, StorageError
from gascompile.distributed.ranks import Ranks
from gascompile.training.state.checkpoint_entries import entries_of, random_numbers
from gascompile.training.state.checkpoints import (
    FROZEN,
    INDEX,
    RANDOM,
    CheckpointFolder,
    Loading,
    index_of,
    state_json,
)
from gascompile.training.state.completing import Here, completed, look, verified
from gascompile.training.state.extra_values import encoded
from gascompile.training.state.pieces import Files, Stored, stored_in
from gascompile.training.state.rank_sharing import (
    Agree,
    Probe,
    Sharing,
    owners,
    parts_of,
    sharing_seen,
)
from gascompile.training.state.replicas import replicate, require_folders
from gascompile.training.state.run_state import STATE
from gascompile.training.state.tensor_files import Entry, whole_part, write_tensors
from gascompile.training.state.train_state import States
from gascompile.training.state.whole_checkpoints import (
    RANKS_FORMAT,
    Listed,
    Saving,
    clear,
    files_of,
    next_number,
)

Result = TypeVar("Result")
_log = logging.getLogger("gascompile")


class RankSaving(Saving):
    """A checkpoint that ranks write together; the first one of each folder makes it whole."""

    def __init__(
        self, folder: Path, number: int, mark: str, *, sharing: Sharing, agree: Agree
    ) -> None:
        """Name it; see ``make``."""
        self._sharing, self._agree = sharing, agree
        self._folder = folder
        self.temporary = folder / f".writing-{number:08d}{mark}"
        self.final = folder / f"checkpoint-{number:08d}"
        self.files, self.digests = {}, {}

    def finish(self, keep: int) -> None:
        """Have all on the drives of all ranks, then rename, and only then remove older ones.

        Raises:
            RankError: a rank is gone.
            StorageError: it is not whole, on all ranks; the checkpoints before it are still there.
        """
        try:
            listed = self._agree("whole", self.settled)
            self._agree("named", partial(self._name, listed))
        finally:
            self.abandon()
        if self._sharing.is_first:
            self.retire(keep)

    def _name(self, listed: list[Listed]) -> None:
        files: Listed = {}
        for name, entry in ((n, e) for own in listed for n, e in own.items()):
            if files.setdefault(name, entry) != entry:
                raise StorageError(f"ranks have written different files '{name}'")
        if self._sharing.is_first:
            here = {name for rank in self._sharing.own for name in listed[rank]}
            self.complete(files, RANKS_FORMAT, here)

    def abandon(self) -> None:
        """Let go of the files; the first rank removes what has not become whole."""
        if self._sharing.is_first:
            super().abandon()
        else:
            self.close_files()


class RankCheckpoints(CheckpointFolder):
    """A folder of checkpoints of several ranks, which all call the same at the same time."""

    def __init__(self, folder: Path, ranks: Ranks) -> None:
        """Name this rank's folder: the same as others', or one of its own."""
        super().__init__(folder)
        self._ranks = ranks
        self._sharing: Sharing | None = None
        self._here: Here | None = None

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
        """Write a checkpoint; see ``CheckpointFolder.save``.

        With two ``replicas``, what a rank writes is in another rank's folder, too.

        Raises:
            RankError: a rank is gone or does something else.
            RankMismatchError: the ``extra`` of another rank is none.
            StorageError: the folder cannot be written on a rank, now or by the save before, as all are told; the last
                checkpoint stays valid.
            UnsupportedOpError: two replicas, and all ranks share one folder.
        """
        self.finish()
        entries = entries_of(states, changing, states.counts, states.pending)
        kinds = [
            [n, str(e.dtype), e.shape, bool(e.own), repr(e.owner)]
            for each in entries
            for n, e in each.items()
        ]
        facts = [sorted(kinds, key=str), states.num_steps, states.num_batches, states.generation]
        facts += [keep, blocking, replicas, states.written.number]
        state, said = self._state(states, extra)
        digests = self._ranks.compare("saving a checkpoint", serial.digest(facts).encode(), [said])
        if digests[0] != [said]:
            _log.warning(
                "what rank %d passes as extra is another than rank 0's, which is what checkpoints of ranks hold: load "
                "returns that on all ranks; keep what is a rank's own in a file of its own",
                self._ranks.layout.rank,
            )
        agree = self._agrees("save")
        sharing = self._sharing = self._sharing or self._shared_with(agree)
        if replicas > 1:
            require_folders(sharing, self.folder, self._ranks)
        saving, state = self._opened(sharing, agree, state)
        try:
            agree("written", partial(self._lay, saving, states, entries, state))
            if replicas > 1:
                replicate(saving.temporary, saving.files, sharing, self._ranks, agree)
            linkable = (saving.final, states.generation, frozenset(entries[1]))
            self._end(saving, keep, linkable, blocking=blocking)
        except BaseException:
            if self._behind is None:
                saving.abandon()
            raise
        return saving.final

    def _state(self, states: States, extra: Mapping[str, Any]) -> tuple[bytes, int]:
        """Return what of a run is no tensor, and what tells one ``extra`` from another; nothing has been written yet.

        Raises:
            ValueError: ``extra`` holds what no checkpoint can, as the other ranks are told.
        """
        try:
            state = state_json(states, extra)
            said = json.dumps(encoded(extra)[0], sort_keys=True)
        except ValueError as error:
            self._ranks.refuse(error)
            raise
        return state, int.from_bytes(hashlib.sha256(said.encode()).digest()[:7], "little")

    def finish(self, *, waits: bool = True) -> None:
        """Block until a save that goes on behind steps is over on all ranks; see ``CheckpointFolder.finish``.

        Who only looks is told nothing, as ranks would be told at different steps.
        """
        if not waits:
            return
        try:
            super().finish()
        except StorageError as error:
            self._ranks.known(error)
            raise

    def _agrees(self, what: str) -> Agree:
        """Return what votes on the parts of one call."""
        call = f"{what}/{self._ranks.votes.call()}"

        def agree(topic: str, work: Callable[[], Result]) -> list[Result]:
            error: StorageError | CheckpointError | None = None
            result: Result | None = None
            try:
                result = work()
            except OSError as caught:
                error = self._not_written(caught) if what == "save" else _not_read(caught)
            except (StorageError, CheckpointError) as caught:
                error = caught
            said = [type(error).__name__, str(error)] if error else None
            told = self._ranks.votes.gather(f"{call}/{topic}", json.dumps([said, result]))
            votes = [json.loads(text) for text in told]
            for rank, (failed, _) in enumerate(votes):
                if failed is not None and error is None:
                    kind = (
                        CheckpointError if failed[0] == CheckpointError.__name__ else StorageError
                    )
                    error = kind(f"rank {rank} says: {failed[1]}")
            if error is not None:
                raise self._ranks.known(error)
            return [result for _, result in votes]

        return agree

    def _opened(self, sharing: Sharing, agree: Agree, state: bytes) -> tuple[RankSaving, bytes]:
        """Return an empty checkpoint in each folder under the same number, and what rank 0 says of the run."""
        told = agree("who may write", partial(self._next, sharing, state))
        number = max(free for free, _, _ in told)
        mark = f"-{told[0][1]}"
        saving = RankSaving(self.folder, number, mark, sharing=sharing, agree=agree)
        agree("a folder for it", saving.make if sharing.is_first else bool)
        return saving, told[0][2].encode()

    def _shared_with(self, agree: Agree) -> Sharing:
        """Return which ranks have this rank's folder."""
        probe = Probe(self.folder)
        try:
            names = agree("whose folders", probe.put)
            seen = agree("who shares them", lambda: probe.seen(names))
        finally:
            probe.remove()
        return sharing_seen(seen, self._ranks.layout.rank, self._ranks)

    def _next(self, sharing: Sharing, state: bytes) -> tuple[int, str, str]:
        """Return the number of the next checkpoint, a mark that nobody has used, and rank 0's words."""
        is_first_of_all = self._ranks.layout.rank == 0
        if sharing.is_first:
            self._take()
            clear(self.folder)
        number = next_number(self.folder) if sharing.is_first else 0
        return number, uuid.uuid4().hex[:8], state.decode() if is_first_of_all else ""

    def _lay(
        self,
        saving: RankSaving,
        states: States,
        entries: tuple[dict[str, Entry], dict[str, Entry], dict[str, Entry]],
        state: bytes,
    ) -> None:
        """Write what this rank keeps into files, and what is nobody's if it is the first of its folder."""
        trained, frozen, optimizer = entries
        sharing, layout = self._sharing, self._ranks.layout
        assert sharing is not None, "it was found before"
        if not saving.temporary.is_dir():
            raise StorageError(f"rank {layout.rank} does not see {saving.temporary}")
        owner = owners({**trained, **optimizer}, sharing.own)
        of = f"{layout.rank + 1:05d}-of-{layout.size:05d}.safetensors"
        for kind, tensors in (("model", trained), ("optimizer", optimizer)):
            parts = parts_of(tensors, owner, layout.rank, states.persistent)
            if kind == "optimizer":
                parts.append(whole_part(random_name(layout.rank), random_numbers()))
            if parts:
                path = saving.temporary / f"{kind}-{of}"
                write_tensors(path, parts, states.persistent, saving.files)
        if not sharing.is_first:
            return
        self._write_frozen(saving, states, frozen)
        if sharing.is_one and not any(entry.own for entry in trained.values()):
            # As transformers reads it; of pieces it has no notion.
            shards = {
                name: f"model-{owner[name] + 1:05d}-of-{layout.size:05d}.safetensors"
                for name in trained
            }
            shards |= dict.fromkeys(frozen, FROZEN)
            saving.add(INDEX, index_of(shards, {**trained, **frozen}))
        saving.add(STATE, state)

    def load(self, states: States, changing: frozenset[str]) -> dict[str, Any]:
        """Restore the newest checkpoint that all ranks have; see ``CheckpointFolder.load``.

        Raises:
            CheckpointError: there is none, it is damaged, or of another run, on a rank; nothing has changed on any.
            RankError: a rank is gone or does something else.
            StorageError: another job saves here, or a rank cannot read or keep a value: on all, some have changed.
        """
        self.finish()
        self._ranks.compare("loading a checkpoint", b"")
        agree = self._agrees("load")
        agree("the folder", self._require_folder)
        with ExitStack() as held:
            here = look(self.folder, self._ranks.layout.rank, self._sharing, agree)
            takes = partial(held.enter_context, self._shared()) if here.sharing.is_first else bool
            agree("who may read", takes)
            self._here = verified(here, agree)
            loading = self._agreed_on(states, changing, agree)
            agree("restoring it", partial(self._restore, states, loading))
        return loading.extra

    def _agreed_on(self, states: States, changing: frozenset[str], agree: Agree) -> Loading:
        """Return what may be taken over, once files have come that are in folders of other ranks alone."""
        loading: list[Loading] = []

        def looked_at() -> bool:
            here = self._here
            assert here is not None, "it was verified"
            if here.is_absent:
                return False
            try:
                loading[:] = [self._looked_at(here.folder, states, changing)]
            except CheckpointError:
                if not here.lacking:
                    raise
                return False
            return not here.lacking or _suffices(loading[0], self._ranks.layout.size)

        if not all(agree("what it has", looked_at)):
            assert self._here is not None, "it was verified"
            self._here = completed(self._here, self._ranks, agree)
            agree("what it has now", looked_at)
        return loading[0]

    def _stored(self, newest: Path) -> dict[str, Stored]:
        here = self._here
        assert here is not None, "it was looked at"
        files = [file for file in files_of(newest) if file.name not in here.lacking]
        return stored_in(files, whole=not here.lacking)

    def _random(self, stored: Mapping[str, Stored]) -> dict[str, Entry]:
        """Return whose random numbers this rank takes over.

        As many ranks as there were go on with their own. Where their number has changed, and all had the same, so have
        all; else ranks that were not there before begin with others, which follow from rank 0's.
        """
        layout, own = self._ranks.layout, random_name(self._ranks.layout.rank)
        if len(stored) == layout.size and own in stored:
            return {own: random_numbers()}
        values = {}
        with Files() as files:
            for name, each in stored.items():
                values[name] = torch.empty(each.shape, dtype=torch.uint8)
                files.whole(each, values[name])
        first = values.get(RANDOM)
        if first is None:
            raise CheckpointError("the checkpoint has no random numbers of rank 0")
        if all(torch.equal(value, first) for value in values.values()) or layout.rank == 0:
            return {RANDOM: random_numbers()}
        if own in stored:
            return {own: random_numbers()}
        text = first.numpy().tobytes() + str(layout.rank).encode()
        seed = int.from_bytes(hashlib.sha256(text).digest()[:8], "little", signed=True)
        return {RANDOM: replace(random_numbers(), assign=lambda _: torch.manual_seed(seed))}


def own_bytes(states: States, changing: frozenset[str], rank: int) -> int:
    """Return what a rank writes of a checkpoint into a folder of its own."""
    trained, _, optimizer = entries_of(states, changing, states.counts, states.pending)
    every = {**trained, **optimizer}
    parts = parts_of(every, owners(every, [rank]), rank, states.persistent)
    return sum(part.value.size_bytes for part in parts)


def random_name(rank: int) -> str:
    """Return the name of a rank's random numbers."""
    return f"{RANDOM}:{rank}" if rank else RANDOM


def _suffices(loading: Loading, size: int) -> bool:
    """Return whether files that are here have all that this rank takes over."""
    for name, entry in loading.entries.items():
        stored = loading.stored[name]
        spans = [(own.begin, own.end) for own in entry.own] if entry.own and not entry.order else []
        spans = spans or [(0, math.prod(entry.shape))]
        if entry.is_kept and not all(stored.has(begin, end) for begin, end in spans):
            return False
    numbers = [name for name in loading.stored if name.startswith(RANDOM)]
    return len(numbers) == size or random_name(0) in numbers


def _not_read(error: OSError) -> StorageError:
    return StorageError(f"cannot read the checkpoint: {error.strerror or error}")
