"""The physical limit, against a search for the least time in which the links can bring the bytes."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gascompile.core.machine import Link, Machine, Pipe, Place
from gascompile.passes.bounds.certify import physical_limit


def machine(rates: dict[str, float], pipe: float | None = None) -> Machine:
    shared = ("way-in",) if pipe else ()
    links = tuple(
        Link(source_tier=tier, target_tier="gpu", bandwidth_bytes_per_s=rate, shared=shared)
        for tier, rate in rates.items()
    )
    return Machine(
        name="toy",
        places=tuple(Place.named(name, 1) for name in ("gpu", *rates)),
        links=links,
        pipes=(Pipe(name="way-in", bandwidth_bytes_per_s=pipe),) if pipe else (),
    )


TWO = {"cpu": 4.0, "nvme": 1.0}


def test_what_the_arena_holds_need_not_move() -> None:
    assert physical_limit(3.0, 100, 100, machine(TWO)) == (3.0, "compute")
    assert physical_limit(3.0, 100, 50, machine(TWO)) == (10.0, "cpu->gpu")
    assert physical_limit(30.0, 100, 50, machine(TWO)) == (30.0, "compute")


def test_what_a_small_tier_cannot_hold_comes_over_the_other_link() -> None:
    # 50 bytes have to come, 10 of them at most from RAM: 40 at one a second.
    assert physical_limit(3.0, 100, 50, machine(TWO), {"cpu": 10}) == (40.0, "nvme->gpu")
    assert physical_limit(3.0, 100, 50, machine(TWO), {"cpu": 40}) == (10.0, "cpu->gpu")
    limit_s, _ = physical_limit(3.0, 100, 50, machine(TWO), {"cpu": 10, "nvme": 10})
    assert limit_s == math.inf


def test_a_pipe_carries_the_bytes_of_all_its_links() -> None:
    limit_s, _ = physical_limit(3.0, 100, 50, machine({"cpu": 2.0, "nvme": 1.0}, pipe=2.0))
    assert limit_s == 25.0


def test_a_pipe_slower_than_its_link_does_not_hold_up_the_last_transfer() -> None:
    """The link delivers at its own speed, and only the next transfer waits for the pipe."""
    limit_s, _ = physical_limit(3.0, 100, 50, machine(TWO, pipe=2.0))
    assert limit_s == 12.5


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 100)), min_size=1, max_size=3),
    st.integers(1, 100),
)
def test_the_least_time_is_exact(links: list[tuple[int, int]], size_bytes: int) -> None:
    names = ["cpu", "nvme", "nvme1"][: len(links)]
    rates = {name: float(rate) for name, (rate, _) in zip(names, links, strict=True)}
    room = {name: most for name, (_, most) in zip(names, links, strict=True)}
    found_s, _ = physical_limit(0.0, size_bytes, 0, machine(rates), room)
    if sum(room.values()) < size_bytes:
        assert found_s == math.inf
        return

    def brought(time_s: float) -> float:
        return sum(min(room[name], rates[name] * time_s) for name in names)

    assert brought(found_s) == pytest.approx(size_bytes)
    assert brought(found_s * 0.999) < size_bytes
