"""What a capture is compared by."""

from __future__ import annotations

import linecache

from torch import nn

from gascompile.capture.record.record import _EVERYTHING
from gascompile.capture.record.watches import watch


def test_lines_that_messages_quote_are_no_part_of_a_capture() -> None:
    code = (linecache.getlines.__code__, vars(linecache))
    assert linecache.getlines(__file__), "or there would be no lines"
    found = watch(nn.Linear(2, 2), (), [code], _EVERYTHING, versions=True)
    names = [name for *_, name in found.places()]
    assert "linecache.cache" in names
    assert not [name for name in names if name.startswith("linecache.cache[")]
    linecache.getlines(nn.__file__)
    assert found.changed() is None
