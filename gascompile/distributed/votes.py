"""Votes: what ranks tell each other in words, through the job's store and from any thread.

Exchanges of a group are one after the other, those of steps among them. Votes are not: a save that goes on behind
steps has its own.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from gascompile.core.errors import RankError
from gascompile.core.ranks import RankLayout
from gascompile.distributed.answering_store import AnsweringStore

_SOON_S, _LATER_S = 5e-4, 2e-2
"""Between two looks at the store: at first, and after some."""
_LOOK_S = 1.0
"""Between two looks whether the other ranks are still there."""


class Votes:
    """One rank's end of the votes of a job."""

    def __init__(
        self,
        store: AnsweringStore,
        layout: RankLayout,
        limit_s: float,
        why: Callable[[BaseException | None], RankError | None],
    ) -> None:
        """Use ``store``; ``why`` says whether a rank is gone or has failed, or what broke a look at the store."""
        self._store, self._layout, self._limit_s, self._why = store, layout, limit_s, why
        self._num_calls = 0

    def call(self) -> int:
        """Return a number of what all ranks begin now, for its topics: they do the same in the same order."""
        self._num_calls += 1
        return self._num_calls

    def say(self, topic: str) -> None:
        """Let the other ranks know of ``topic``, whether anybody listens or not."""
        with contextlib.suppress(RuntimeError):
            self._store.set(f"said/{topic}", "")

    def is_said(self, topic: str) -> bool:
        """Return whether a rank has said ``topic``, or nobody can tell any more."""
        try:
            return self._store.check([f"said/{topic}"])
        except RuntimeError:
            return True

    def gather(self, topic: str, said: str) -> list[str]:
        """Return what each rank says of ``topic``, of which each speaks once.

        Raises:
            RankError: a rank is gone, has failed, or says nothing for too long.
        """
        ranks = range(self._layout.size)
        keys = [f"vote/{topic}/{rank}" for rank in ranks]
        read = [f"read/{topic}/{rank}" for rank in ranks]
        try:
            self._store.set(keys[self._layout.rank], said)
            self._wait(keys)
            votes = [self._store.get(key).decode() for key in keys]
            self._store.set(read[self._layout.rank], "")
            if self._layout.rank == 0:
                # The store may be this rank's, and end with it.
                self._wait(read)
                for key in (*keys, *read):
                    self._store.delete_key(key)
        except RuntimeError as error:
            why = self._why(error)
            raise why or RankError(f"a vote of the ranks broke: {error}") from error
        return votes

    def _wait(self, keys: list[str]) -> None:
        begin_s = looked_s = time.monotonic()
        pause_s = _SOON_S
        while not self._store.check(keys):
            now_s = time.monotonic()
            if now_s - looked_s > _LOOK_S:
                looked_s = now_s
                if (why := self._why(None)) is not None:
                    raise why
            if now_s - begin_s > self._limit_s:
                raise RankError(f"a rank says nothing of '{keys[0]}'")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LATER_S)
