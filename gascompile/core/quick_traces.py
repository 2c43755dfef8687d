"""Quick traces: torch notes for each op of an exported graph where it comes from, and writes graphs as Python text.

A note is made of the whole stack, of which the functions called ``forward`` are kept; here those alone are looked for.
Text is written whenever a pass of torch's is done with a graph, and nobody reads it; here when somebody does.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
import types
from collections.abc import Iterator

from torch.fx import proxy
from torch.fx._lazy_graph_module import _use_lazy_graph_module

from gascompile.core.shared_context import SharedContext


class _ForwardFrames:
    """Stands in for ``torch.utils._traceback.CapturedTraceback``."""

    @staticmethod
    def extract() -> _ForwardFrames:
        return _ForwardFrames()

    def summary(self) -> traceback.StackSummary:
        """Return the functions called ``forward`` that are running, the outermost first."""
        found: list[traceback.FrameSummary] = []
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            if code.co_name == "forward":
                found.append(traceback.FrameSummary(code.co_filename, frame.f_lineno, code.co_name))
            frame = frame.f_back
        return traceback.StackSummary.from_list(found[::-1])


@contextlib.contextmanager
def _replaced() -> Iterator[None]:
    before = vars(proxy)["CapturedTraceback"]
    vars(proxy)["CapturedTraceback"] = _ForwardFrames
    try:
        with _use_lazy_graph_module(should_use=True):
            yield
    finally:
        vars(proxy)["CapturedTraceback"] = before


quick_traces = SharedContext(_replaced)
"""Encloses a trace. Its ops have the notes that torch makes, and its modules the text that torch writes."""
