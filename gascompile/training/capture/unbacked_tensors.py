"""Outlines: tensors of a model that traces see on the CPU, whose memory nobody touches and so nobody takes.

A trace of a model on the meta device would mix devices. Memory that the kernel has only promised costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


class Outlines:
    """Tensors that are in turn on the meta device and, without values, on the CPU."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take note of the tensors, by name; nothing happens to them yet."""
        self.tensors = dict(tensors)
        self._entered = False

    def enter(self) -> None:
        """Let the tensors be on the CPU, for all who hold them; idempotent."""
        if self._entered:
            return
        self._entered = True
        with untouched():
            for tensor in self.tensors.values():
                become(tensor, torch.empty_like(tensor, device="cpu"))

    def leave(self, layouts: Mapping[str, torch.Tensor] | None = None) -> None:
        """Let them be on the meta device; idempotent.

        Args:
            layouts: tensors that have their shapes and strides, by name; they themselves, if ``None``.
        """
        if not self._entered:
            return
        self._entered = False
        for name, tensor in self.tensors.items():
            like = tensor if layouts is None else layouts[name]
            become(tensor, torch.empty_like(like, device="meta"))

    def __enter__(self) -> None:
        self.enter()

    def __exit__(self, *_: object) -> None:
        self.leave()


def become(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Let ``tensor`` have the device and the values of ``other``, for all who hold it."""
    if isinstance(tensor, nn.Parameter):
        other = nn.Parameter(other, requires_grad=tensor.requires_grad)
    # As torch.utils.swap_tensors does, which refuses where a trace still remembers the tensor.
    torch._C._swap_tensor_impl(tensor, other)


@contextmanager
def untouched() -> Iterator[None]:
    """Let new tensors be as the kernel gives them; deterministic programs fill them."""
    settings: Any = torch.utils.deterministic
    before = settings.fill_uninitialized_memory
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        settings.fill_uninitialized_memory = before
