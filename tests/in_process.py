"""Workers of benchmarks in the process of the tests: another one would load the same libraries first."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest


def run_here(monkeypatch: pytest.MonkeyPatch, module: str, main: Callable[[], object]) -> None:
    """Have ``subprocess.run`` call ``main`` for ``python -m module``, with its arguments and its output."""
    run: Callable[..., Any] = subprocess.run

    def found(command: list[str], **options: Any) -> Any:
        if command[1:3] != ["-m", module]:
            return run(command, **options)
        output = io.StringIO()
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(output):
            patch.setattr(sys, "argv", command[2:])
            main()
        return subprocess.CompletedProcess(command, 0, output.getvalue(), "")

    monkeypatch.setattr(subprocess, "run", found)
