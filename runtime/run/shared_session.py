"""A session of one of several ranks of a host, which share an arena and read into it together."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from gascompile.core import serial
from gascompile.core.errors import UnsupportedOpError
from gascompile.core.plan import Plan
from gascompile.core.steps import Offload
from gascompile.runtime.collectives.local_ranks import LocalRanks
from gascompile.runtime.memory.shared_arena import SharedCpu
from gascompile.runtime.run.session import Session
from gascompile.runtime.transfer.heap_moves import HeapMoves
from gascompile.runtime.transfer.shared_engine import SharedEngine

Result = TypeVar("Result")
_COLD, _NEW, _WARM = range(3)


class SharedSession(Session):
    """A ``Session`` whose runs go on from the last one, or start afresh, on all ranks alike."""

    _described = (-1, "")

    @property
    def ranks(self) -> LocalRanks:
        """The ranks of this host."""
        assert isinstance(self.device, SharedCpu), "it was opened for several ranks"
        return self.device.ranks

    def heap_moves(self, plan: Plan) -> HeapMoves | None:
        """Refuse plans that move activations: their buffers are a part of the arena."""
        if any(isinstance(step, Offload) for step in plan.steps):
            raise UnsupportedOpError(
                "the plan moves activations out of memory, which ranks that share an arena do not; give a larger "
                "budget, or pass mesh=False"
            )
        return None

    def _run(self, user: object, body: Callable[[bool], Result]) -> Result:
        if isinstance(self.engine, SharedEngine):
            try:
                self._agree(user, self.engine)
            except BaseException:
                self._cool()
                raise
        return super()._run(user, body)

    def _agree(self, user: object, engine: SharedEngine) -> None:
        """Go on where all ranks can, else let all start afresh."""
        stands = _WARM if self._user is user else _NEW if self._is_drained else _COLD
        told = self.ranks.meet("how weights lie in their files", self._lie(), (stands,))
        if {state for (state,) in told} not in ({_WARM}, {_NEW}):
            self._cool()
            counts = self.ranks.meet("where reads begin anew", numbers=(engine.num_submitted,))
            engine.go_on_from(max(count for (count,) in counts))

    def _lie(self) -> str:
        """Return a digest of where in its reservation each weight begins: by the files, and by how they are read."""
        if self._described[0] != len(self._landings):
            places = sorted((n, of.shift_bytes, of.size_bytes) for n, of in self._landings.items())
            self._described = (len(places), serial.digest(places))
        return self._described[1]

    def _cool(self) -> None:
        """End what is under way: the next run starts afresh."""
        self._drain()
        self._user, self._is_drained = None, False
