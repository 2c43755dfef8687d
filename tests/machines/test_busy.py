"""Measurements on a busy machine are remembered, so whoever has them made is told."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from gascompile.cost_models.measure.host import OtherWork
from gascompile.machines import busy
from gascompile.machines import resolve as machine
from gascompile.machines.busy import warned_if_busy
from gascompile.machines.resolve import op_times_path, preset, remember_machine, step_times_path


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(("processors", "told"), [(0.1, 0), (1.6, 1)])
def test_who_measures_on_a_busy_machine_is_told(
    processors: float, told: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OtherWork, "num_processors", lambda self: processors)
    monkeypatch.setattr(busy, "_LEAST_S", 0.0)
    with caplog.at_level(logging.WARNING, logger="gascompile"), warned_if_busy("this model"):
        pass
    assert len(messages(caplog)) == told
    for message in messages(caplog):
        assert "kept 1.6 of " in message
        assert "while this model was measured" in message
        assert "`gascompile calibrate`" in message


def test_a_moment_says_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OtherWork, "num_processors", lambda self: 2.0)
    with caplog.at_level(logging.WARNING, logger="gascompile"), warned_if_busy("this model"):
        pass
    assert messages(caplog) == []


def test_an_error_while_measuring_is_itself(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(OSError, match="gone"), warned_if_busy("this model"):
        raise OSError("gone")
    assert messages(caplog) == []


def test_a_new_measurement_forgets_the_times_of_ops_and_of_steps(tmp_path: Path) -> None:
    remember_machine(preset("cpu-nvme"), tmp_path)
    paths = [op_times_path(tmp_path), step_times_path(tmp_path)]
    for path in paths:
        path.write_text("{}")
    remember_machine(preset("cpu-nvme"), tmp_path)
    assert [path.exists() for path in paths] == [False, False]
    assert machine.remembered_machine(tmp_path) is not None
