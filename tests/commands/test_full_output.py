"""Standard output that takes no more: an error like others, with its exit code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("args", [["doctor"], ["doctor", "--json"], ["plan", "nothing", "--json"]])
def test_an_output_that_is_full_is_an_error(args: list[str]) -> None:
    code = "from gascompile.cli import main; main()"
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-c", code, *args],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert ended.returncode == 1
    assert ended.stderr.startswith("error: ")
    assert "Traceback" not in ended.stderr
