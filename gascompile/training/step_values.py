"""Step values: what an open step has, as it is read, saved and restored from outside."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from gascompile.core.errors import (
    CheckpointError,
    ClosedStepError,
    StorageError,
)
from gascompile.core.machinery import Machinery
from gascompile.core.waiting import in_turn
from gascompile.distributed.rows import RowSampler
from gascompile.training.optimizers.unplanned import changed_by
from gascompile.training.rank_step import RankStep
from gascompile.training.state.checkpoints import CheckpointFolder
from gascompile.training.state.extra_states import require_no_extra_states
from gascompile.training.state.file_values import FileValues
from gascompile.training.state.holdings import Holdings
from gascompile.training.state.replicas import ReplicaCost
from gascompile.training.state.train_state import States
from gascompile.training.unit_table import UnitTable


class StepValues(Machinery):
    """Parameters, moments and buffers of one model and optimizer, which a step has while it is open."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        values: FileValues | None,
        units: UnitTable,
        holdings: Holdings,
        ranks: RankStep | None,
    ) -> None:
        """Know where values are: ``values`` before the first plan, ``holdings`` after it."""
        self.ranks = ranks
        """What this process does with other ranks; ``None`` where it is alone."""
        self._model, self.optimizer = model, optimizer
        self._values, self._units, self._holdings = values, units, holdings
        self._write_bytes_per_s = math.inf
        """Of the drive, as the machine has it."""
        self._turn = holdings.turn

    @property
    def _states(self) -> States | None:
        return self._holdings.states

    @property
    def num_steps(self) -> int:
        """Updates made so far, with those that were taken over from the optimizer or a checkpoint."""
        return self._states.num_steps if self._states else 0

    @property
    def num_own_moments(self) -> int:
        """Elements of the moments that this process keeps: of several ranks each has a part."""
        tiles = (tile for tiles in self._open_states().tiles.values() for tile in tiles)
        return sum(tile.num_elements for tile in tiles if not tile.is_part)

    @property
    def rows(self) -> int:
        """Rows that this rank is to have in its next batch, so that all ranks are done at once.

        Raises:
            ValueError: there are no other ranks, or no batch has come yet.
        """
        return self._joined().rows()[self._joined().rank]

    def sampler(self, length: int, *, shuffle: bool = True, seed: int = 0) -> RowSampler:
        """Return a batch sampler for ``DataLoader(data, batch_sampler=...)`` that gives each rank its ``rows``.

        Args:
            length: of the data set.
            shuffle: in an order that is the same on all ranks, another one after ``set_epoch``.
            seed: of the order.

        Raises:
            ValueError: there are no other ranks.
        """
        return self._joined().sampler(length, shuffle=shuffle, seed=seed)

    def _joined(self) -> RankStep:
        if self.ranks is None:
            raise ValueError("this process trains alone; torchrun starts several ranks")
        return self.ranks

    def _require_open(self) -> None:
        if self._holdings.is_closed:
            raise ClosedStepError(
                "the step is closed and has given its values back; compile a new step with compile_step"
            )
        for checkpoints in self._holdings.folders.values():
            checkpoints.finish(waits=False)

    def _open_states(self, *, whole: bool = True) -> States:
        self._require_open()
        if self._states is None:
            raise ValueError("nothing is planned yet; pass example_batch, or call prepare(batch)")
        held = self._holdings
        if not held.failure and not held.unfinished.tidied(self._states.persistent):
            held.failure = "it was interrupted"
        if whole:
            held.require_whole()
        return self._states

    @in_turn
    def settle(self) -> None:
        """Let no transfer be under way; the next step takes longer, as it begins with none.

        Raises:
            StorageError: a transfer failed.
        """
        self._open_states()
        self._holdings.settle_all()

    @in_turn
    def state_places(self) -> dict[str, tuple[int, int]]:
        """Return the file and offset of each value's copy, which may be old; for measurements after ``settle``."""
        return self._open_states().persistent.places()

    @in_turn
    def state_dict(self) -> dict[str, Any]:
        """Return copies in memory of ``model.state_dict()`` and ``optimizer.state_dict()``, by these words.

        Of several ranks all call it where values are divided among them.

        Raises:
            RankMismatchError: another rank's model has other tensors than the step was made for.
            StorageError: a value cannot be read.
            UnsupportedOpError: the model has other tensors than the step was made for.
        """
        self._require_open()
        if self._states is None and self._values is None:
            return {"model": self._model.state_dict(), "optimizer": self.optimizer.state_dict()}
        states = self._open_states()
        with self._agreed() if states.reads_together else contextlib.nullcontext():
            states.covers.require_own()
        self._holdings.settle_all()
        return states.state_dict()

    @in_turn
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over ``{"model": model.state_dict(), "optimizer": optimizer.state_dict()}``.

        Raises:
            CheckpointError: the state is of another model or optimizer; names the keys. Nothing has changed then.
            StorageError: a value cannot be kept.
            UnsupportedOpError: the model has other tensors than the step was made for.
        """
        self._require_open()
        if self._states is None and self._values is None:
            self._model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            return
        with self._agreed():
            self._open_states(whole=False).covers.require_own()
        if self.ranks is not None:
            leaves = pytree.tree_leaves([dict(state["model"]), state["optimizer"]])
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            self.ranks.alike("the state that is loaded", [tensor.cpu() for tensor in tensors])
        with self._restoring() as states:
            states.load_state_dict(state)

    @in_turn
    def save(
        self,
        folder: str | os.PathLike[str],
        extra: Mapping[str, Any] | None = None,
        *,
        keep: int = 1,
        blocking: bool = True,
        replicas: int = 1,
    ) -> Path:
        """Write a checkpoint in ``folder``, remove the ones before the newest ``keep``, and return where it lies.

        Of several ranks all call it, and each writes what it keeps; any number of ranks can load it.

        Args:
            folder: this run's own until ``close``.
            extra: a dict that ``load`` returns, such as ``{"scheduler": scheduler.state_dict()}``: of JSON values
                without NaN, infinite numbers, tuples, counters and dicts with such keys.
            keep: how many checkpoints stay, this one included. Links, and folders with files that no save has
                written, are never removed.
            blocking: False: return once the values of now are in files. Writing these to the drive, digests and
                removing go on beside the next steps, and the folder has its name at the end; the next ``save`` or
                ``load`` of this folder and ``close`` wait for it, and the next call raises what it failed with. Ranks
                are told by these alone, all at once.
            replicas: 2: what each rank writes is in the folder of another, too, on another host where there is one, so
                that a drive may be lost; ranks have folders of their own then. See ``replica_cost``.

        Raises:
            StorageError: another job saves there, or it cannot be written; the checkpoint before stays valid.
            UnsupportedOpError: two replicas of one process, or in a folder that all ranks share; a module has a state
                beside its tensors (``get_extra_state``), or other tensors than the step was made for.
            ValueError: nothing has been planned yet, ``extra`` is none, ``keep`` is not positive, or ``replicas``
                neither 1 nor 2.
        """
        if replicas not in (1, 2):
            raise ValueError(
                f"replicas={replicas}: 1 is what a rank writes, 2 a copy of it as well"
            )
        if keep < 1:
            raise ValueError(f"keep={keep}: the checkpoint that is written stays; give 1 or more")
        require_no_extra_states(self._model)
        states = self._open_states()
        self._holdings.settle_all()
        checkpoints, changing = self._checkpoints(folder), self._changing(states)
        with self._agreed():
            # What a model has been given since is in no file.
            states.covers.require_own()
        with self.ranks.together() if self.ranks else contextlib.nullcontext():
            extra = {} if extra is None else extra
            return checkpoints.save(
                states, changing, extra, keep=keep, blocking=blocking, replicas=replicas
            )

    @property
    def replica_cost(self) -> ReplicaCost:
        """What ``save(folder, replicas=2)`` takes on this rank beyond a save without: bytes, and predicted seconds.

        Raises:
            ValueError: there are no other ranks, or nothing has been planned yet.
        """
        ranks, states = self._joined(), self._open_states()
        return ranks.replica_cost(states, self._changing(states), self._write_bytes_per_s)

    @in_turn
    def load(self, folder: str | os.PathLike[str]) -> dict[str, Any]:
        """Restore all of the newest checkpoint, torch's random numbers included; return its ``extra``.

        Raises:
            CheckpointError: there is none, it is damaged, or it is of another run. Nothing has changed then.
            StorageError: another job saves there, or a value cannot be kept.
            UnsupportedOpError: the model has other tensors than the step was made for.
            ValueError: nothing has been planned yet.
        """
        checkpoints = self._checkpoints(folder)
        with self._agreed():
            self._open_states(whole=False).covers.require_own()
        with self.ranks.together() if self.ranks else contextlib.nullcontext():
            if self.ranks is not None:
                # Where one refuses, no other has begun to restore.
                self.ranks.alike("loading")
            with self._restoring() as states:
                return checkpoints.load(states, self._changing(states))

    @contextlib.contextmanager
    def _agreed(self) -> Iterator[None]:
        """Tell other ranks of what is refused within, before they pair what this rank does next with it."""
        if self.ranks is None:
            yield
            return
        with self.ranks.together(), self.ranks.planning():
            yield

    @contextlib.contextmanager
    def _restoring(self) -> Iterator[States]:
        """Make values whole again that a failed step has left half updated."""
        states = self._open_states(whole=False)
        failure = self._holdings.failure
        states.is_half_new = bool(failure)
        # Until all is done, as an interrupt may come between any two lines.
        self._holdings.unfinished.changes()
        self._holdings.failure = ""
        try:
            with contextlib.suppress(*([StorageError] if failure else [])):
                self._holdings.settle_all()
            if failure:
                self._holdings.failure = failure
                states.persistent.recover()
            try:
                yield states
            finally:
                states.covers.changed()
        except CheckpointError:
            # Found before anything was changed.
            self._holdings.failure = failure
            self._holdings.unfinished.end()
            raise
        except BaseException as error:
            self._holdings.failed_by(error)
            raise
        self._holdings.unfinished.end()
        self._holdings.failure = ""

    def _checkpoints(self, folder: str | os.PathLike[str]) -> CheckpointFolder:
        path = Path(folder).resolve()
        if path not in self._holdings.folders:
            ranks = self.ranks
            made = CheckpointFolder(path) if ranks is None else ranks.checkpoints(path)
            self._holdings.folders[path] = made
        return self._holdings.folders[path]

    def _changing(self, states: States) -> frozenset[str]:
        return changed_by(states).union(*(unit.program.program.states for unit in self._units))
