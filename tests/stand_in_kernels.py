"""Kernels that torch's own ops compute, in memory that is not the run's: all that is compiled but the arithmetic."""

from __future__ import annotations

import ctypes
import math
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx

from gascompile.codegen.cpp import known_layout
from gascompile.core.kernels import Kernel, KernelFiles, KernelLibrary, Launch, Layout, Pointer
from gascompile.runtime.kernels.fused import one_by_one

Nodes = Sequence[fx.Node]


class StandIn:
    """A backend without a compiler; ``written`` counts the kernels that were made."""

    compile_base_s = compile_each_s = call_s = 0.0

    def __init__(self) -> None:
        self.processor = f"made up {uuid.uuid4()}"
        self.written: list[list[str]] = []
        """The ops of each."""
        self.interrupts = False
        self._functions: dict[str, Callable[..., None]] = {}
        # Memory is counted by thread.
        self._elsewhere = ThreadPoolExecutor(1)

    def built_for(self) -> dict[str, str]:
        return {"processor": self.processor}

    def unlike(self, there: Mapping[str, str]) -> str:
        return "" if there == self.built_for() else "made for another processor"

    def require_compiler(self) -> None:
        pass

    def writer(self) -> StandIn:
        return self

    def write(self, key: str, nodes: Nodes, inputs: Nodes, outputs: Nodes) -> Kernel:
        read, made = [known_layout(n) for n in inputs], [known_layout(n) for n in outputs]
        compute = one_by_one(nodes, inputs, outputs)

        def function(*addresses: int) -> None:
            with torch.no_grad(), torch.autocast("cpu", enabled=False):
                views = [_at(a, of) for a, of in zip(addresses, (*read, *made), strict=True)]
                for view, value in zip(
                    views[len(read) :], compute(*views[: len(read)]), strict=True
                ):
                    assert value.stride() == view.stride()
                    view.copy_(value)

        self._functions[key] = lambda *addresses: self._elsewhere.submit(
            function, *addresses
        ).result()
        self.written.append([str(node.target) for node in nodes])
        places = tuple(Pointer(place=i) for i in range(len(read) + len(made)))
        return Kernel(
            inputs=tuple(read),
            outputs=tuple(made),
            launches=(Launch(symbol=key, arguments=places),),
        )

    def keep(self) -> None:
        pass

    def build(self) -> tuple[bytes, dict[str, Any]]:
        if self.interrupts:
            raise KeyboardInterrupt
        return b"stand-in", {}

    def load(self, files: KernelFiles, library: KernelLibrary) -> Any:
        del files, library
        return SimpleNamespace(**self._functions)


def _at(address: int, of: Layout) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, of.dtype)
    last = sum((n - 1) * step for n, step in zip(of.shape, of.stride, strict=True))
    memory = (ctypes.c_char * ((last + 1) * dtype.itemsize)).from_address(address)
    flat = torch.frombuffer(memory, dtype=dtype, count=math.prod((last + 1,)))
    return flat.as_strided(of.shape, of.stride)


@contextmanager
def stand_in() -> Iterator[StandIn]:
    """Let kernels be stand-ins."""
    backend = StandIn()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gascompile.codegen.backends.backend_of", lambda _: (backend, ""))
        yield backend
