"""Measures what an op takes on the GPU that will run it: scratch memory and seconds, called on made-up values.

Torch's allocator counts, in blocks that it rounds up to 512 bytes. It sees what libraries ask it for, such as
the workspace that cublasLt takes and gives back at each call. What they keep is no part of an op: the first call,
which is not measured, takes it, and the machine's ``library_bytes`` has it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from torch.utils import _pytree as pytree

from gascompile.cost_models.measure.op_memory import OpCall, given_bytes
from gascompile.cost_models.measure.rehearse import made_up

_MOST_BYTES = 4 << 30
"""Of an op's inputs and results; one with more is not called, nor one with more than half of what is free."""
_NAMESPACES = {
    "aten", "prims", "gascompile", "gascompile_dropout", "gascompile_norms", "gascompile_updates",
}  # fmt: skip
"""Of ops that do nothing but compute: others may wait for other ranks, or be a user's own."""
_ASSERTS = "assert"
"""In the names of ops that end the process's use of the GPU where a made-up value is not what they want."""
_CACHES_BYTES = 128 << 20
"""Inputs of so much memory, one after the other, leave nothing of the first in the caches of any device."""
_MOST_COPIES = 16
"""Of an op's inputs."""
_NUM_ROUNDS = 3
"""Whose median counts: what else happens on the machine disturbs one of them."""
_ROUND_S = 0.005
"""Of calls between two synchronisations, which are lost in it."""
_LONG_S = 0.05
"""Of a call that is not repeated."""
_MOST_CALLS = 50
"""Of a round: more say nothing new."""
_REFUSALS = (RuntimeError, IndexError, ValueError, TypeError)
"""Ops without a kernel for the device, and those that look at values: made-up ones are not theirs."""


Figure = TypeVar("Figure", int, float)


class OpsOnDevice:
    """Ops on the current CUDA device."""

    def __init__(self, cuda: Any = torch.cuda, *, device: str = "cuda") -> None:
        """Use ``cuda``, which is ``torch.cuda`` or what stands in for it, with ``device`` as its device."""
        self._cuda = cuda
        number = cuda.current_device()
        is_host = device == "cpu"
        self.device = torch.device(device) if is_host else torch.device(device, number)
        self._generators = [] if is_host else [number]
        # Whoever limits the time of measurements does not count that of the first use of the device.
        cuda.synchronize(self.device)

    def close(self) -> None:
        """Give the memory back that the ops were given: other allocators of the device may want it."""
        self._cuda.synchronize(self.device)
        self._cuda.empty_cache()

    def workspace_bytes(self, call: OpCall) -> int | None:
        """Return what a call takes beside its results; ``None`` where it cannot be made, or is too large to be.

        Devices among the arguments are those of the GPU; tensors are fake, and made up there.
        """
        return self._tried(call, self._workspace_bytes)

    def time_s(self, call: OpCall) -> float | None:
        """Return the seconds of a call, between calls of the same op; ``None`` as in ``workspace_bytes``.

        Those of an op that takes the device less time than the host are the host's.
        """
        return self._tried(call, self._time_s)

    def _tried(self, call: OpCall, measure: Callable[[OpCall], Figure]) -> Figure | None:
        if not _may_be_called(call) or given_bytes(call) + call.result_bytes > self._room_bytes():
            return None
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=self._generators):
                return measure(call)
        except torch.OutOfMemoryError:
            is_full = True
        except torch.AcceleratorError:
            # The device gives up: whatever is asked of it next fails, too.
            raise
        except _REFUSALS:
            is_full = False
        if is_full:
            # Only now, after the error, nothing holds the inputs.
            self._cuda.empty_cache()
        return None

    def _room_bytes(self) -> int:
        free_bytes, _ = self._cuda.mem_get_info()
        cached_bytes = self._cuda.memory_reserved() - self._cuda.memory_allocated(self.device)
        return min((int(free_bytes) + max(int(cached_bytes), 0)) // 2, _MOST_BYTES)

    def _made_up(self, call: OpCall) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        make = partial(made_up, device=self.device)
        args, kwargs = pytree.tree_map_only(
            torch.Tensor, make, (tuple(call.args), dict(call.kwargs))
        )
        return args, kwargs

    def _workspace_bytes(self, call: OpCall) -> int:
        args, kwargs = self._made_up(call)
        # Takes what libraries keep.
        call.function(*args, **kwargs)
        self._cuda.synchronize(self.device)
        before_bytes = int(self._cuda.memory_allocated(self.device))
        self._cuda.reset_peak_memory_stats(self.device)
        value = call.function(*args, **kwargs)
        self._cuda.synchronize(self.device)
        peak_bytes = int(self._cuda.max_memory_allocated(self.device))
        # Blocks of results are longer than these.
        made_bytes = int(self._cuda.memory_allocated(self.device)) - before_bytes
        given = {storage for storage, _ in _storages((args, kwargs))}
        results = {at: size for at, size in _storages(value) if at not in given}
        # A kernel may return more than its fake does.
        unplanned_bytes = max(sum(results.values()) - call.result_bytes, 0)
        return max(peak_bytes - before_bytes - made_bytes, 0) + unplanned_bytes

    def _time_s(self, call: OpCall) -> float:
        size_bytes = max(given_bytes(call), 1)
        num_copies = min(_CACHES_BYTES // size_bytes + 1, _MOST_COPIES)
        inputs = [self._made_up(call) for _ in range(num_copies)]
        self._cuda.synchronize(self.device)
        self._round_s(call, inputs, 1)
        once_s = self._round_s(call, inputs, 1)
        if once_s > _LONG_S:
            return once_s
        num_calls = min(max(int(_ROUND_S / max(once_s, 1e-9)), 1), _MOST_CALLS)
        rounds_s = [self._round_s(call, inputs, num_calls) for _ in range(_NUM_ROUNDS)]
        return sorted(rounds_s)[_NUM_ROUNDS // 2]

    def _round_s(self, call: OpCall, inputs: list[Any], num_calls: int) -> float:
        """Return the mean seconds of a call."""
        start_s = time.perf_counter()
        for i in range(num_calls):
            args, kwargs = inputs[i % len(inputs)]
            call.function(*args, **kwargs)
        self._cuda.synchronize(self.device)
        return (time.perf_counter() - start_s) / num_calls


def _may_be_called(call: OpCall) -> bool:
    function = call.function
    if not isinstance(function, torch._ops.OpOverload) or _ASSERTS in str(function):
        return False
    return function.namespace in _NAMESPACES


def _storages(value: Any) -> Iterator[tuple[int, int]]:
    """Yield the addresses and the bytes of the storages of the tensors in ``value``."""
    for tensor in pytree.tree_leaves(value):
        if isinstance(tensor, torch.Tensor):
            storage = tensor.untyped_storage()
            yield storage.data_ptr(), storage.nbytes()
