"""Tests of the garbage collector at rest."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from gascompile.core import collection
from gascompile.core.collection import no_collection

_MANY = 200_000
"""Objects that would bring several collections on."""


@pytest.fixture
def collections(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Which generations are collected from now on."""
    monkeypatch.setattr(collection, "_has_frozen", False)
    # All of a run of tests is frozen, which leaves nothing of it to be collected.
    was_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    old = [[number] for number in range(_MANY)]
    gc.collect()
    found: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            found.append(info["generation"])

    thresholds = gc.get_threshold()
    # The oldest are collected as soon as a quarter of them is new.
    gc.set_threshold(700, 1, 1)
    gc.callbacks.append(note)
    yield found
    assert len(old) == _MANY
    gc.callbacks.remove(note)
    gc.set_threshold(*thresholds)
    if was_frozen:
        gc.freeze()


def test_nothing_is_collected_within_and_what_was_made_brings_no_collection_on(
    collections: list[int],
) -> None:
    with no_collection():
        kept = [[number] for number in range(_MANY)]
    few = [[number] for number in range(10_000)]
    assert 1 in collections and 2 not in collections
    assert len(kept) + len(few) == _MANY + 10_000
    assert gc.isenabled()


def test_garbage_of_within_is_collected_later() -> None:
    with no_collection():
        cycle: list[object] = []
        cycle.append(cycle)
        del cycle
    assert gc.collect() >= 1


def test_what_a_program_froze_stays_frozen() -> None:
    was_frozen = gc.get_freeze_count() > 0
    gc.freeze()
    frozen = gc.get_freeze_count()
    with no_collection():
        kept = [[number] for number in range(100)]
    # Some of it may go meanwhile, as nobody needs it any more.
    assert gc.get_freeze_count() > frozen // 2 and len(kept) == 100
    if not was_frozen:
        gc.unfreeze()


def test_a_collector_at_rest_stays_at_rest_after_an_error_too() -> None:
    gc.disable()
    try:
        with pytest.raises(KeyError), no_collection():
            raise KeyError
        assert not gc.isenabled()
    finally:
        gc.enable()
