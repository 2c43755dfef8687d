"""A process that ends while a transfer is under way: torch's wait for it must not outlast Python."""

from __future__ import annotations

import subprocess
import sys

import pytest

_ENDS = """
import os, sys, time
from gascompile.runtime.collectives import waiting

class Work:
    def wait(self):
        time.sleep({seconds})

class Late:  # goes when Python has begun to end
    def __del__(self, say=os.write):
        say(1, b"over" if self.waiting.over.is_set() else b"under way")

thread, late = waiting.WaitingThread(), Late()
late.waiting = waiting.Waiting([Work()])
thread.put(late.waiting)
sys.late = late
{end}
"""


@pytest.mark.parametrize("end", ["", "thread.end()"])
def test_the_wait_for_a_letter_ends_before_python_does(end: str) -> None:
    code = _ENDS.format(seconds=0.3, end=end)
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert found.stdout == "over"
