"""Holdings: the values that an open step has, and how they go back, whoever closes the step or forgets to."""

from __future__ import annotations

import logging
import traceback
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from torch import nn

from gascompile.core.errors import GASCompileError, StorageError
from gascompile.core.machinery import Machinery
from gascompile.core.own_work import OwnWork
from gascompile.core.waiting import is_own_thread, life, require_life
from gascompile.training.attempt import Attempt, begin
from gascompile.training.state.checkpoints import CheckpointFolder
from gascompile.training.state.giving_back import give_back
from gascompile.training.state.train_state import States
from gascompile.training.unfinished import Unfinished
from gascompile.training.unit import StepUnit
from gascompile.training.unit_table import UnitTable
from gascompile.training.units import OPEN, UnitMaker

_log = logging.getLogger(__name__)
Result = TypeVar("Result")


class Holdings(Machinery):
    """Outlives its step, which must not be reachable from here, until all is given back."""

    def __init__(self, model: nn.Module, maker: UnitMaker, units: UnitTable) -> None:
        """Hold nothing yet."""
        self._model, self._maker, self._units = model, maker, units
        self._life = life()
        self.folders: dict[Path, CheckpointFolder] = {}
        self.failure = ""
        """What ended a step after which values may be half updated."""
        self.unfinished = Unfinished(units)
        self.is_closed = False
        self._attempt = Attempt()
        self._said: list[Callable[[], None]] = []
        self._keeper: OwnWork | None = None
        self._unsaved: StorageError | None = None
        """What a save behind steps has failed with, where nobody has been told."""
        maker.before_access = self.settled
        self.turn = maker.turn
        self.leave: Callable[[], None] = lambda: None
        """Leaves the other ranks, which take no part in what nobody asked for."""

    def outlive(self, step: object) -> None:
        """Close once nobody has the step any more, whatever breaks off the thread that drops it."""
        keeper, of = OwnWork("gascompile-step", step), weakref.ref(step)
        keeper.when_dropped, self._keeper = self._close_left, keeper

        def settle() -> None:
            if is_own_thread() or self._life is not life():
                return
            if of() is None:
                keeper.do(bool)
            self._settle_close()

        self._maker.settle = settle
        # What was made last is called first, and all is back then: this is for whom no interrupt breaks off.
        weakref.finalize(step, self.dropped)

    @property
    def states(self) -> States | None:
        """Return the values, from the first plan until the end."""
        return self._maker.states

    def settle(self, unit: StepUnit) -> None:
        """Let no transfer of a unit be under way.

        Raises:
            StorageError: one failed.
        """
        try:
            unit.executor.settle()
        except StorageError as error:
            self.failure = str(error)
            raise

    def change(self, unit: StepUnit, function: Callable[[], Result]) -> Result:
        """Let ``function`` change values after a run of ``unit``; where it fails, they are half changed."""
        self.settle(unit)
        self.unfinished.changes()
        try:
            return function()
        except BaseException as error:
            self.failed_by(error)
            raise

    def failed_by(self, error: BaseException) -> None:
        """Note what ended a step after which values may be half updated."""
        self.failure = traceback.format_exception_only(error)[-1].strip()

    def settle_all(self) -> None:
        """Let no transfer be under way."""
        for unit in self._units:
            self.settle(unit)

    def require_whole(self) -> None:
        """Refuse values that may be half updated.

        Raises:
            ForkedError: the step is of another process, as are its files.
            StorageError: says what ended the step.
        """
        require_life(self._life, "the training step")
        if self.failure:
            raise StorageError(
                f"a step has failed ({self.failure}), and parameters may be half updated; "
                "restore the last checkpoint with load(folder) or load_state_dict(state)"
            )

    def settled(self) -> None:
        """Let values be whole, wherever they are; called before somebody reads or writes one."""
        self.require_whole()
        self.settle_all()

    def close(self) -> None:
        """Put values back into the model and the optimizer; give memory and files back. Waits for saves. Idempotent.

        An own thread does it, so that no interrupt leaves it half done. The first one that comes is raised when all
        is back; after another, a second call waits for the end.

        Raises:
            StorageError: a value cannot be read; it stays where it is, and another call tries again. Or a file has
                changed of which values were read in place: these are on the meta device, and all others back. Or a
                save behind steps has failed, and all values are back.
        """
        self.is_closed = True
        attempt = self._attempt
        if not attempt.is_over:
            attempt.is_asked = True
            begin(partial(self._finish, attempt))
            try:
                attempt.wait()
            except BaseException:
                attempt.wait()
                raise
        while self._said:
            # By the caller: a handler's lock may be the caller's.
            self._said.pop(0)()
        if attempt.error is not None:
            raise attempt.error
        if self._keeper is not None:
            self._keeper.do(bool, is_last=True)

    def _settle_close(self) -> None:
        """Block until values are back, where who closes the step was interrupted."""
        attempt = self._attempt
        if attempt.is_asked and not attempt.is_over:
            begin(partial(self._finish, attempt))
            attempt.wait()

    def _finish(self, attempt: Attempt) -> None:
        """Give all back, unless another thread does; what has been given back is not touched again."""
        if not attempt.claim():
            return
        try:
            self._give_back()
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            attempt.error = error
            self._attempt = Attempt()
        attempt.end()

    def _give_back(self) -> None:
        for checkpoints in self.folders.values():
            try:
                checkpoints.close()
            except StorageError as error:
                self._unsaved = error
        states, units = self.states, list(self._units)
        if states is None:
            return
        if not self.failure and not self.unfinished.tidied(states.persistent):
            self.failure = "it was interrupted"
        if self.failure:
            text = "a step has failed (%s): what goes back into the model may be half updated"
            self._said.append(partial(_log.warning, text, self.failure))
        if states.pending and not self.failure:
            text = "gradients of %d parameters, added up since the last update, end with the step%s"
            known = ", but for those that a checkpoint has" if self.folders else ""
            self._said.append(partial(_log.warning, text, len(states.pending), known))
        for unit in units:
            unit.executor.settle()
            # What activations took is free again before values come back.
            unit.executor.close()
        if self.failure:
            states.persistent.recover()
        warned, lost = give_back(states, moments=not self.failure)
        self._said += [partial(warnings.warn, text, stacklevel=4) for text in warned]
        # All is in the model again.
        states.persistent.close()
        if self._maker.session is not None:
            # Not by ``close``: who waits for this may have the session's turn.
            self._maker.session.end()
        self._units.clear()
        self._maker.states = self._maker.session = None
        OPEN.pop(self._model, None)
        if lost is not None:
            raise lost
        if self._unsaved is not None:
            raise self._unsaved

    def dropped(self) -> None:
        """Close in the place of a step that nobody has closed, and say so."""
        if (self.is_closed and self.states is None) or self._life is not life():
            return
        if self.states is not None and not self.is_closed:
            _log.warning(
                "a training step of %s was dropped without close(); its values go back into the model now. Use it in a "
                "'with', or call close()",
                type(self._model).__name__,
            )
        self._close_left()

    def _close_left(self) -> None:
        if self.states is None or self._life is not life():
            return
        self.leave()
        try:
            self.close()
        except (GASCompileError, OSError) as error:
            _log.error("values of %s are lost: %s", type(self._model).__name__, error)
