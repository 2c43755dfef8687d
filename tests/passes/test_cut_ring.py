"""Rings over unequal ranks: against every placement of small ones, and on cases that can be added in the head."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gascompile.core.errors import InfeasiblePlanError
from gascompile.passes.parallel.cut_ring import cut_ring
from gascompile.passes.parallel.halda import halda
from gascompile.passes.parallel.ring_clock import Ring, Share, ring_seconds
from tests.passes.ring_cases import SIZE, device, every_ring, problem, random_problem


def test_a_token_by_hand() -> None:
    task = problem([device("a", gpu=2, ram=2), device("b", ram=2)], 6)
    ring = Ring((Share(2, 2), Share(0, 2)), 1, (0, False))
    # Head 1, two layers at 1 and four at 4, there and back.
    assert ring_seconds(task, ring) == pytest.approx(1 + 2 + 16 + 1.0)


def test_a_slow_drive_sets_the_pace() -> None:
    task = problem([device("a", ram=2, load_s=10.0)], 3)
    # One stays, two come through one slot: each is asked for when the one before has been computed.
    ring = Ring((Share(0, 3, 2, 1),), 1, (0, False))
    assert ring_seconds(task, ring) == pytest.approx(2 * (10 + 4))
    # Through as many slots as come per round, the drive is always at work.
    ring = Ring((Share(0, 3, 3, 2),), 2, (0, False))
    assert ring_seconds(task, ring) == pytest.approx(30.0)


@pytest.mark.parametrize("seed", range(12))
def test_no_placement_is_faster(seed: int) -> None:
    task = random_problem(seed)
    best = min((ring_seconds(task, ring) for ring in every_ring(task)), default=math.inf)
    if math.isinf(best):
        with pytest.raises(InfeasiblePlanError):
            cut_ring(task)
        return
    found = cut_ring(task)
    assert found.bound_s <= best * (1 + 1e-9), "the bound is one"
    assert found.seconds == pytest.approx(ring_seconds(task, found.ring))
    assert best * (1 - 1e-9) <= found.seconds <= best * 1.02


def test_what_fits_in_one_gpu_stays_in_one() -> None:
    task = problem([device("a", gpu=8), device("b", gpu=8, gpu_s=2.0)], 6)
    found = cut_ring(task)
    assert [share.gpu for share in found.ring.shares] == [6, 0]
    assert found.bound_s == pytest.approx(found.seconds)


def test_halda_is_no_better_and_fills_gpus() -> None:
    devices = [device("a", ram=4), device("b", gpu=4, ram=4), device("c", gpu=3, ram=6)]
    task = problem(devices, 24)
    ring = halda(task, 0)
    assert ring is not None
    assert sum(share.layers for share in ring.shares) == 24
    assert ring.shares[1].gpu == 4
    assert cut_ring(task).seconds <= ring_seconds(task, ring) * (1 + 1e-9)


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 10_000), which=st.integers(0, 2), gpu=st.booleans())
def test_more_memory_or_another_rank_is_never_slower(seed: int, which: int, gpu: bool) -> None:
    task = random_problem(seed)
    devices = list(task.devices)
    grown = devices[which % len(devices)]
    field = "gpu_bytes" if gpu and grown.gpu_bytes else "ram_bytes"
    more = [*devices]
    more[which % len(devices)] = replace(grown, **{field: getattr(grown, field) + SIZE})
    layers, hop_s = task.chain.num_layers, max(max(row) for row in task.hops_s)
    try:
        before = cut_ring(task).seconds
    except InfeasiblePlanError:
        before = math.inf
    if math.isfinite(before):
        assert cut_ring(problem(more, layers, hop_s=hop_s)).seconds <= before * (1 + 1e-9)
        wider = problem([*devices, device("z", gpu=1, load_s=5.0)], layers, hop_s=hop_s)
        assert cut_ring(wider).seconds <= before * (1 + 1e-9)
