"""Vector clocks by hand: what events order is no race, what nothing orders is one, whoever was faster."""

from __future__ import annotations

import threading

import pytest
import torch

from gascompile.core.errors import RaceError
from gascompile.runtime.debug.races import COMPUTE, Races, host_thread, tensors_in

UP, DRIVE = "cpu->gpu", "nvme->gpu"


@pytest.fixture
def memory() -> torch.Tensor:
    return torch.zeros(64, dtype=torch.uint8)


@pytest.fixture
def races(memory: torch.Tensor) -> Races:
    found = Races()
    found.place("arena", memory)
    return found


def write(races: Races, stream: str, tensor: torch.Tensor, name: str = "w") -> None:
    races.access(stream, tensor, writes=True, name=name, what=f"a copy on {stream}")


def read(races: Races, stream: str, tensor: torch.Tensor, name: str = "w") -> None:
    races.access(stream, tensor, writes=False, name=name, what=f"op on {stream}")


def test_an_event_orders_a_copy_and_its_reader(races: Races, memory: torch.Tensor) -> None:
    write(races, UP, memory)
    races.join(COMPUTE, races.mark(UP))
    read(races, COMPUTE, memory)


def test_a_reader_without_the_event_races(races: Races, memory: torch.Tensor) -> None:
    write(races, UP, memory[16:32], "fc.weight")
    with pytest.raises(
        RaceError, match=r"op on compute reads 'other' at address 16 of the arena.*'fc"
    ):
        read(races, COMPUTE, memory[8:], "other")


def test_an_event_before_the_copy_orders_nothing(races: Races, memory: torch.Tensor) -> None:
    early = races.mark(UP)
    write(races, UP, memory)
    races.join(COMPUTE, early)
    with pytest.raises(RaceError):
        read(races, COMPUTE, memory)


def test_a_copy_must_wait_for_readers_of_the_bytes(races: Races, memory: torch.Tensor) -> None:
    read(races, COMPUTE, memory[:32])
    write(races, UP, memory[32:])
    with pytest.raises(RaceError, match="at address 31 of the arena"):
        write(races, UP, memory[31:])


def test_a_copy_after_the_readers_event_is_ordered(races: Races, memory: torch.Tensor) -> None:
    read(races, COMPUTE, memory)
    races.join(UP, races.mark(COMPUTE))
    write(races, UP, memory)


def test_two_readers_never_race_but_both_count(races: Races, memory: torch.Tensor) -> None:
    read(races, COMPUTE, memory)
    read(races, UP, memory)
    races.join(DRIVE, races.mark(COMPUTE))
    with pytest.raises(RaceError, match="cpu->gpu"):
        write(races, DRIVE, memory)


def test_copies_of_one_stream_are_ordered_those_of_two_are_not(
    races: Races, memory: torch.Tensor
) -> None:
    write(races, UP, memory)
    write(races, UP, memory)
    with pytest.raises(RaceError):
        write(races, DRIVE, memory)


def test_order_is_handed_on_from_stream_to_stream(races: Races, memory: torch.Tensor) -> None:
    write(races, UP, memory)
    races.join(DRIVE, races.mark(UP))
    races.join(COMPUTE, races.mark(DRIVE))
    read(races, COMPUTE, memory)


def test_a_later_copy_of_the_stream_carries_the_earlier_one(
    races: Races, memory: torch.Tensor
) -> None:
    write(races, UP, memory[:8])
    write(races, UP, memory[8:])
    races.join(COMPUTE, races.mark(UP))
    read(races, COMPUTE, memory[:8])


def test_a_write_forgets_nothing_that_it_does_not_cover(races: Races, memory: torch.Tensor) -> None:
    write(races, UP, memory)
    races.join(DRIVE, races.mark(UP))
    write(races, DRIVE, memory[:8])
    races.join(COMPUTE, races.mark(DRIVE))
    read(races, COMPUTE, memory)
    write(races, UP, torch.zeros(8, dtype=torch.uint8))
    with pytest.raises(RaceError, match="at address 8 of"):
        write(races, UP, memory[8:])


def test_what_a_thread_waited_for_its_streams_know(races: Races, memory: torch.Tensor) -> None:
    write(races, UP, memory)
    races.join(host_thread(), races.mark(UP))
    write(races, DRIVE, memory)

    def other_thread() -> None:
        try:
            write(races, COMPUTE, memory)
        except RaceError as error:
            caught.append(error)

    caught: list[RaceError] = []
    thread = threading.Thread(target=other_thread)
    thread.start()
    thread.join()
    (error,) = caught
    assert (error.tensor, error.address) == ("w", 0)


def test_synchronising_orders_everything(races: Races, memory: torch.Tensor) -> None:
    write(races, UP, memory[:32])
    write(races, DRIVE, memory[32:])
    races.join_all(host_thread())
    write(races, COMPUTE, memory)


def test_strided_views_reach_to_their_last_element(races: Races) -> None:
    memory = torch.zeros(8, 8)
    races.place("arena", memory)
    write(races, UP, memory[4:5])
    read(races, COMPUTE, memory[:4].t())
    with pytest.raises(RaceError, match=f"at address {4 * 8 * 4} of"):
        read(races, COMPUTE, memory[:, 0])
    read(races, COMPUTE, memory[4:4])


def test_tensors_are_found_in_nested_arguments() -> None:
    a, b, c = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    assert list(tensors_in([a, (1, b), {"x": [c], "y": "s"}])) == [a, b, c]
