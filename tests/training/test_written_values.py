"""What others than a step write to its states: told from what only reads, and compared between ranks by a number."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import gascompile
from gascompile.training.state import written_values
from gascompile.training.state.written_values import WrittenValues

_WRITES = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3)), max_size=6)


def _number(writes: list[tuple[str, int]], *, others: bool = True) -> int:
    written = WrittenValues()
    with mock.patch.object(written_values, "_has_others", return_value=others):
        for name, value in writes:
            written.note(name, torch.full((2,), float(value)))
    return written.number


def _by_name(writes: list[tuple[str, int]]) -> dict[str, list[int]]:
    return {name: [value for other, value in writes if other == name] for name, _ in writes}


@given(_WRITES, _WRITES)
def test_the_number_tells_values_and_not_in_which_order_names_came(
    one: list[tuple[str, int]], other: list[tuple[str, int]]
) -> None:
    assert (_number(one) == _number(other)) is (_by_name(one) == _by_name(other))


def test_containers_count_and_a_process_that_is_alone_does_not() -> None:
    written, same, other = WrittenValues(), WrittenValues(), WrittenValues()
    with mock.patch.object(written_values, "_has_others", return_value=True):
        written.note("state", {0: {"exp_avg": torch.ones(2), "step": 1}})
        same.note("state", {0: {"exp_avg": torch.ones(2), "step": 1}})
        other.note("state", {0: {"exp_avg": torch.ones(2), "step": 2}})
    assert written.number == same.number != other.number
    written.clear()
    assert written.number == _number([("a", 1)], others=False) == 0


@pytest.mark.parametrize("trains", [False, True])
def test_a_norm_writes_to_its_statistics_in_training_alone(trains: bool) -> None:
    """Who calls the model of an open step in evaluation has changed nothing."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    batch = torch.randn(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gascompile.compile_step(
        model, lambda m, b: m(b).square().mean(), optimizer, "64MiB", batch
    ) as step:
        states = step._open_states()
        before = states.generation
        model.train(trains)
        with torch.no_grad():
            model(batch)
        assert (states.generation > before) is trains
