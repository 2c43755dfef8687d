"""Exporting: model code sees that it is being exported, as ``torch.compiler.is_exporting`` tells it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def exporting() -> Iterator[None]:
    """Let model code see that it is being exported, where ``torch.export`` itself has no part."""
    before = torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag
    torch.compiler._is_compiling_flag = torch.compiler._is_exporting_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag, torch.compiler._is_exporting_flag = before
