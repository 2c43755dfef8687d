"""A store whose keeper does not answer, and what ranks tell each other through one that does."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any, cast

import pytest
from torch._C._distributed_c10d import HashStore

from gascompile.core.errors import RankError
from gascompile.distributed.answering_store import AnsweringStore
from gascompile.distributed.reasons import heard, is_of_others, told


class _Silent:
    """Answers nothing until it is let go."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()
        self.asked = 0

    def check(self, keys: list[str]) -> bool:
        self.asked += 1
        self.goes_on.wait()
        return bool(keys)

    set = get = check


def _made(store: object, **how: Any) -> AnsweringStore:
    return AnsweringStore(cast(Any, store), **how)


def test_a_store_that_does_not_answer_is_gone() -> None:
    silent = _Silent()
    store = _made(silent, answer_s=0.05)
    try:
        with pytest.raises(RuntimeError, match="has not answered"):
            store.check(["a"])
        # Whoever asks next does not wait for it.
        for ask in (
            lambda: store.check(["a"]),
            lambda: store.set("a", "b"),
            lambda: store.get("a"),
        ):
            with pytest.raises(RuntimeError, match="does not answer"):
                ask()
        assert silent.asked == 1
    finally:
        silent.goes_on.set()


def test_answers_and_errors_are_those_of_the_store() -> None:
    store = _made(HashStore())
    store.set("a", "1")
    assert store.get("a") == b"1"
    assert store.check(["a"]) and not store.check(["b"])
    store.delete_key("a")
    assert not store.check(["a"])

    class Refusing:
        def check(self, _: list[str]) -> bool:
            raise RuntimeError("the keeper has left")

    with pytest.raises(RuntimeError, match="the keeper has left"):
        _made(Refusing()).check(["a"])


def test_its_thread_ends_with_it() -> None:
    before = set(threading.enumerate())
    store = _made(HashStore())
    store.set("a", "1")
    (thread,) = set(threading.enumerate()) - before
    del store
    until_s = time.monotonic() + 20
    while thread.is_alive() and time.monotonic() < until_s:
        gc.collect()
        time.sleep(0.01)
    assert not thread.is_alive()


def test_ranks_hear_of_a_failure_and_of_what_another_has_found() -> None:
    own = told(ValueError("no: rows"))
    assert not is_of_others(own)
    error = heard(2, own)
    assert error.rank == 2
    assert str(error).startswith("rank 2 has failed: ValueError: no: rows. All ranks")
    for gone in (-1, 4):
        said = told(RankError("a rank is gone: x y", rank=gone))
        assert is_of_others(said)
        error = heard(0, said)
        assert error.rank == gone
        assert str(error) == "rank 0 has found: a rank is gone: x y"
