"""Drives that read and write at once: what clocks say of a mix is what was measured of it."""

from __future__ import annotations

import pytest

from gascompile.core.machine import Link, Machine, Pipe, Place
from gascompile.cost_models.measure.in_turns import DriveRates, in_turns
from gascompile.cost_models.simulate.clock import Clock, pipe_times


def _machine(alone: DriveRates, at_once: DriveRates) -> Machine:
    """Return a machine whose drive was measured to have these rates."""
    rates = in_turns(alone, at_once)
    most = max(rates.read_bytes_per_s, rates.write_bytes_per_s)
    ends = (
        ("nvme", "cpu", alone.read_bytes_per_s, rates.read_bytes_per_s),
        ("cpu", "nvme", alone.write_bytes_per_s, rates.write_bytes_per_s),
    )
    links = tuple(
        Link(
            source_tier=source,
            target_tier=target,
            bandwidth_bytes_per_s=own,
            shared=("drive",),
            pipe_bytes_per_byte=most / passing,
        )
        for source, target, own, passing in ends
    )
    places = (Place.named("cpu", 64), Place.named("nvme", 64))
    pipe = Pipe(name="drive", bandwidth_bytes_per_s=most)
    return Machine(name="a drive", places=places, links=links, pipes=(pipe,))


def _seconds(machine: Machine, sizes: list[tuple[int, int]]) -> float:
    """Return when transfers of ``(link, bytes)``, all asked for at once, have ended."""
    clock, ended_s = Clock.of(2, 1), 0.0
    for number, size_bytes in sizes:
        link = machine.links[number]
        seconds = link.transfer_time_s(size_bytes)
        begun_s = clock.issue(number, seconds, pipe_times(machine, link, size_bytes), 0.0)
        ended_s = max(ended_s, begun_s + seconds)
    return ended_s


@pytest.mark.parametrize(
    ("alone", "at_once"),
    [
        ((2500, 1600), (1400, 470)),
        ((2000, 2000), (1400, 1400)),
        ((1000, 3000), (700, 1200)),
        ((1000, 3000), (400, 1000)),
        ((3000, 500), (100, 480)),
    ],
    ids=[
        "slower at once",
        "faster at once",
        "quick writes",
        "slower, quick writes",
        "starved reads",
    ],
)
def test_a_mix_takes_what_it_was_measured_to(
    alone: tuple[int, int], at_once: tuple[int, int]
) -> None:
    read, write = alone
    both_read, both_write = at_once
    machine = _machine(
        DriveRates(read_bytes_per_s=read, write_bytes_per_s=write),
        DriveRates(read_bytes_per_s=both_read, write_bytes_per_s=both_write),
    )
    rounds = 400
    # For as many seconds as there are rounds, each direction as fast as it was measured beside the other.
    mix = [(0, both_read), (1, both_write)] * rounds
    assert _seconds(machine, mix) == pytest.approx(rounds, rel=0.01)
    assert _seconds(machine, [(0, read)] * rounds) == pytest.approx(rounds)
    written_s = _seconds(machine, [(1, write)] * rounds)
    if both_read / read + both_write / write >= 1:
        assert written_s == pytest.approx(rounds)
    else:
        assert written_s > rounds
