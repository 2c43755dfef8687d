"""What the ops of an ONNX graph compute with: torch, or outlines, which have sizes and no values.

The table of ops is written once. ``torch`` and ``functional`` are here the names of torch's functions, which are looked
up when an op is called: so a graph can be captured with torch, and costed in a process that has none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_outlines: ContextVar[Any] = ContextVar("onnx_outlines", default=None)


class _Names:
    """Attributes of torch, of one of its modules, or of what stands in for both."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        outlined = _outlines.get()
        if outlined is not None:
            return getattr(outlined, name)
        import torch.nn.functional

        return getattr(torch.nn.functional if self._module == "functional" else torch, name)


torch = _Names("torch")
functional = _Names("functional")


@contextmanager
def computing_with(outlines: Any) -> Iterator[None]:
    """Let ops compute with ``outlines``, a module with the functions of torch that the table calls."""
    before = _outlines.set(outlines)
    try:
        yield
    finally:
        _outlines.reset(before)
