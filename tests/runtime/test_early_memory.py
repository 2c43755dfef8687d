"""Memory taken ahead is the memory of the arena, exactly as large as asked for, or nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gascompile.runtime.memory.arena import Arena
from gascompile.runtime.memory.early_memory import EarlyMemory
from tests.waiting import eventually

MIB = 1 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_taken_memory_is_cut_to_size_and_works() -> None:
    early = EarlyMemory(64 * MIB)
    arena = Arena(10 * MIB, early.take(10 * MIB))
    view = arena.view(MIB, "float32", (1000,))
    view.copy_(torch.arange(1000.0))
    assert arena.view(MIB, "float32", (1000,))[999] == 999
    assert len(arena.memory) == 10 * MIB
    with pytest.raises(ValueError, match="pass the end"):
        arena.view(10 * MIB, "float32", (1,))


def test_too_little_is_no_memory() -> None:
    assert EarlyMemory(4 * MIB).take(5 * MIB) is None


def test_pages_come_while_nobody_waits_and_go_again() -> None:
    before = resident_bytes()
    early = EarlyMemory(256 * MIB)
    assert eventually(lambda: resident_bytes() - before > 250 * MIB)
    early.discard()
    assert resident_bytes() - before < 20 * MIB
