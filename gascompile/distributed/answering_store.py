"""Answering store: the job's store, for as long as who keeps it answers.

A look at a store whose keeper's host is gone from the network comes back after many minutes, if at all, and whoever has
begun another one waits for it. Here a look that is not answered soon ends in the error of a store that is gone.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch._C._distributed_c10d import Store

_ANSWER_S = 10.0
"""Of a store between hosts that are busy; ranks that are silent are given up after twice as long."""


@dataclass(slots=True)
class _Question:
    """A call of the store, and what comes of it."""

    ask: Callable[..., Any]
    args: tuple[Any, ...]
    over: threading.Event = field(default_factory=threading.Event)
    answer: Any = None
    error: BaseException | None = None


_Asked: TypeAlias = "queue.SimpleQueue[_Question | None]"


class AnsweringStore:
    """What ranks use of a store, from any thread. Each method raises ``RuntimeError`` where nothing is answered."""

    def __init__(self, store: Store, answer_s: float = _ANSWER_S) -> None:
        """Use ``store``, which answers within ``answer_s`` or not at all."""
        self._store, self._answer_s = store, answer_s
        self._asked: _Asked = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_lost = False
        self._starting = threading.Lock()
        weakref.finalize(self, self._asked.put, None)

    def set(self, key: str, value: str) -> None:
        """Let all ranks find a value."""
        self._answer(self._store.set, key, value)

    def get(self, key: str) -> bytes:
        """Return a value that is there."""
        found: bytes = self._answer(self._store.get, key)
        return found

    def check(self, keys: list[str]) -> bool:
        """Return whether there is a value of each key."""
        return bool(self._answer(self._store.check, keys))

    def delete_key(self, key: str) -> None:
        """Forget a value."""
        self._answer(self._store.delete_key, key)

    def _answer(self, ask: Callable[..., Any], *args: Any) -> Any:
        """Return what is answered.

        Raises:
            RuntimeError: the store is gone, or does not answer.
        """
        if self._is_lost:
            raise RuntimeError("the job's store does not answer any more")
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=_serve, args=(self._asked,), daemon=True)
                self._thread.start()
        asked = _Question(ask, args)
        self._asked.put(asked)
        if not asked.over.wait(self._answer_s):
            self._is_lost = True
            raise RuntimeError(f"the job's store has not answered for {self._answer_s:.0f} s")
        if asked.error is not None:
            raise asked.error
        return asked.answer


def _serve(asked: _Asked) -> None:
    while (question := asked.get()) is not None:
        try:
            question.answer = question.ask(*question.args)
        except BaseException as error:  # noqa: BLE001 - who asks raises it
            question.error = error
        question.over.set()
        del question  # with the store that it holds
