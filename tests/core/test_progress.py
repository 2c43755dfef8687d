"""Bars inside bars: rich refuses two at once, so the outer one silences the inner ones."""

from __future__ import annotations

import sys

import pytest

from gascompile.core.progress import stages, task


def _do_three() -> None:
    with stages("Work", 3) as begin:
        for name in ("first", "second", "third"):
            begin(name)
            with task(f"inside {name}", 10) as advance:
                advance(10)


def test_a_terminal_sees_the_outer_bar_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    _do_three()
    with task("afterwards"):
        pass
    shown = capsys.readouterr().err
    assert "Work: third" in shown
    assert "inside" not in shown
    assert "afterwards" in shown


def test_elsewhere_nothing_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    _do_three()
    assert capsys.readouterr().err == ""
