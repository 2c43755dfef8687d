"""CUDA graphs of one executor: they share a memory pool, and what they hold of it is counted.

Torch counts memory of a pool only while a tensor lies in it. A graph writes to the pool's memory for as long
as it is replayed, so the most that was ever taken there counts all the time.
"""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch

from gascompile.core.collection import no_collection

if TYPE_CHECKING:
    from gascompile.runtime.devices.cuda import CudaApi

_TURN = threading.Lock()
"""Torch captures one graph at a time in a process."""


class Pools:
    """What graphs of one device hold, and the most that was allocated beside it."""

    def __init__(self, cuda: Any, device: torch.device) -> None:
        self._cuda = cuda
        self._device = device
        self._graphs: weakref.WeakSet[CudaGraphs] = weakref.WeakSet()
        self._beside_bytes = 0

    def add(self, graphs: CudaGraphs) -> None:
        self._graphs.add(graphs)

    def begin(self) -> None:
        """Count from now on."""
        self._beside_bytes = 0
        self._cuda.reset_peak_memory_stats(self._device)

    def mark(self) -> None:
        """Note what was allocated beside the graphs so far, as they are about to hold more or less."""
        self._beside_bytes = self._most_beside()
        self._cuda.reset_peak_memory_stats(self._device)

    def peak_bytes(self) -> int:
        """Return the most that was allocated since ``begin``, all memory of the graphs counted throughout."""
        return self._most_beside() + sum(graphs.most_bytes for graphs in self._graphs)

    def close(self) -> None:
        """Close all graphs."""
        for graphs in list(self._graphs):
            graphs.close()

    def _most_beside(self) -> int:
        live_bytes = sum(graphs.live_bytes for graphs in self._graphs)
        most = int(self._cuda.max_memory_allocated(self._device))
        return max(self._beside_bytes, most - live_bytes)


class CudaGraph:
    """One graph."""

    def __init__(self, graph: Any) -> None:
        self._graph = graph

    def begin(self, pool: Any) -> None:
        self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")

    def end(self) -> None:
        with warnings.catch_warnings():
            # Ops on tensors without elements give the device nothing to do.
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
            self._graph.capture_end()

    def replay(self) -> None:
        self._graph.replay()

    def reset(self) -> None:
        self._graph.reset()


class CudaGraphs:
    """Graphs that are replayed in the order of their capture, never at once: one pool serves all."""

    def __init__(self, api: CudaApi, device: torch.device, pools: Pools) -> None:
        self._api = api
        self._cuda = api.runtime
        self._device = device
        self._pools = pools
        self._pool: Any = None
        self._stream: Any = None
        self._graphs: list[CudaGraph] = []
        self._before_bytes = 0
        self.live_bytes = 0
        """Of the pool: in tensors that are kept, which torch counts."""
        self.most_bytes = 0
        """Of the pool: the most that was in tensors at once."""

    def begin(self) -> None:
        """See ``protocols.Graphs``. Memory that torch keeps for ops would be taken twice."""
        self._pools.add(self)
        self._pool = self._cuda.graph_pool_handle()
        # Nothing can be captured on the default stream. One stream for all: memory that is freed in a pool
        # serves the stream again that it was taken for.
        self._stream = self._cuda.Stream(device=self._device)
        self._cuda.synchronize(self._device)
        gc.collect()
        # Runs op by op have left their workspace, which would count beside that of the graphs.
        self._api.drop_workspaces()
        self._cuda.empty_cache()

    @contextmanager
    def capture(self) -> Iterator[CudaGraph]:
        """See ``protocols.Graphs``.

        Other threads go on to read and copy meanwhile: only this one is held to what can be captured.
        """
        made = CudaGraph(self._cuda.CUDAGraph())
        with _TURN, no_collection():
            # A product takes its workspace from the pool, and so as long as the graph lives; dropped at the
            # end, it serves later graphs, and is not counted twice.
            self._api.drop_workspaces()
            self._pools.mark()
            before_bytes = self._allocated_bytes()
            with self._cuda.stream(self._stream):
                made.begin(self._pool)
                try:
                    yield made
                except BaseException:
                    # What was raised says more than that the capture is no good.
                    with suppress(RuntimeError):
                        made.end()
                        made.reset()
                    raise
                made.end()
            self._api.drop_workspaces()
            most = int(self._cuda.max_memory_allocated(self._device)) - before_bytes
            self.most_bytes = max(self.most_bytes, self.live_bytes + most)
            self._before_bytes = before_bytes
        self._graphs.append(made)

    def settle(self) -> None:
        self.live_bytes += self._allocated_bytes() - self._before_bytes
        self._cuda.reset_peak_memory_stats(self._device)

    def room(self, value: torch.Tensor) -> torch.Tensor:
        return self._api.room(value, self._device)

    def load(self, target: torch.Tensor, value: torch.Tensor) -> None:
        self._api.load(target, value)

    def close(self) -> None:
        graphs, self._graphs = self._graphs, []
        if graphs:
            # Graphs are not taken from under work that is under way.
            self._cuda.synchronize(self._device)
        for graph in graphs:
            graph.reset()
        self.live_bytes = self.most_bytes = 0

    def _allocated_bytes(self) -> int:
        return int(self._cuda.memory_allocated(self._device))
