"""CUDA graphs without a GPU: what was called while capturing, called again at the same addresses.

Nothing is done while capturing: what it wrote is spoiled or undone at its end. Memory comes from pools that
hand out what is free again first, so that a tensor which somebody should have kept is written over by a later
one. What was free when a capture ended is spoiled after each replay: nobody may read it.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from gascompile.runtime.memory.arena import POISON

if TYPE_CHECKING:
    from tests.runtime.devices.fake_cuda import FakeRuntime

aten = torch.ops.aten
_WAIT = (aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal)
_ALIGNMENT = 64


def over(address: int, size_bytes: int) -> torch.Tensor:
    """Return the bytes at an address, whoever has them."""
    return torch.frombuffer((ctypes.c_uint8 * size_bytes).from_address(address), dtype=torch.uint8)


def spoil(address: int, size_bytes: int) -> None:
    ctypes.memset(address, POISON, size_bytes)


class FakePool:
    """Memory of the graphs that share it."""

    def __init__(self, runtime: FakeRuntime) -> None:
        self._runtime = runtime
        self._memory: list[torch.Tensor] = []
        self.free: list[tuple[int, int]] = []
        self.taken: dict[int, int] = {}
        self.num_reused = 0

    def like(self, value: torch.Tensor) -> torch.Tensor:
        """Return a copy of ``value`` in the pool, whose memory is free again when it is gone."""
        wanted = -(-max(value.untyped_storage().nbytes(), 1) // _ALIGNMENT) * _ALIGNMENT
        address = self._take(wanted)
        memory = over(address, wanted)
        storage = memory.untyped_storage()
        made = torch.empty(0, dtype=value.dtype)
        made.set_(storage, value.storage_offset(), value.shape, value.stride())
        made.copy_(value)
        # Counted without the rounding, which is large beside tensors of tests.
        counted = value.untyped_storage().nbytes()
        self._runtime.took(counted)
        weakref.finalize(storage, self._give, address, wanted, counted)
        return made

    def owns(self, address: int) -> bool:
        return any(m.data_ptr() <= address < m.data_ptr() + m.nbytes for m in self._memory)

    def _take(self, wanted: int) -> int:
        for i, (address, size_bytes) in enumerate(self.free):
            if size_bytes >= wanted:
                self.free[i] = (address + wanted, size_bytes - wanted)
                self.num_reused += 1
                break
        else:
            self._memory.append(torch.empty(wanted, dtype=torch.uint8))
            address = self._memory[-1].data_ptr()
        self.taken[address] = wanted
        return address

    def _give(self, address: int, size_bytes: int, counted: int) -> None:
        del self.taken[address]
        self.free.insert(0, (address, size_bytes))
        self._runtime.gave(counted)


class FakeGraph:
    """What stands for ``torch.cuda.CUDAGraph``."""

    def __init__(self, runtime: FakeRuntime) -> None:
        self._runtime = runtime
        self._recorder: _Recorder | None = None
        self._calls: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []
        self._external: list[tuple[str, weakref.ref[torch.UntypedStorage]]] = []
        self._never_read: list[tuple[int, int]] = []
        self._pool: FakePool | None = None
        self.num_replays = 0

    def capture_begin(self, *, pool: FakePool, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local", "reading threads go on"
        assert self._runtime.current_stream().name != "compute", "nothing captures there"
        assert not self._runtime.capturing, "one at a time"
        self._runtime.capturing = True
        self._pool = pool
        self._recorder = _Recorder(self._runtime, pool)
        self._recorder.__enter__()  # type: ignore[no-untyped-call]

    def capture_end(self) -> None:
        recorder, pool = self._recorder, self._pool
        assert recorder is not None
        assert pool is not None
        recorder.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._recorder, self._runtime.capturing = None, False
        recorder.undo()
        if recorder.invalid:
            raise RuntimeError("the capture was invalidated")
        self._calls, self._external = recorder.calls, recorder.external
        self._never_read = list(pool.free)
        self._runtime.captured.append(self)

    @property
    def num_calls(self) -> int:
        return len(self._calls)

    def replay(self) -> None:
        assert self in self._runtime.captured, "it was captured and not reset"
        self.num_replays += 1
        self._runtime.current_stream().enqueue(self._run)

    def reset(self) -> None:
        self._runtime.captured.remove(self)
        self._calls = []

    def _run(self) -> None:
        for name, storage in self._external:
            assert storage() is not None, f"{name} reads memory that was given back"
        with _disable_current_modes():
            for function, args, kwargs, results in self._calls:
                found = pytree.tree_leaves(function(*args, **kwargs))
                fresh = [x for x in found if isinstance(x, torch.Tensor)]
                for target, value in zip(results, fresh if results else (), strict=True):
                    target.copy_(value)
        for address, size_bytes in self._never_read:
            spoil(address, size_bytes)


class _Recorder(TorchDispatchMode):
    def __init__(self, runtime: FakeRuntime, pool: FakePool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._runtime = runtime
        self._pool = pool
        self.calls: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []
        self.external: list[tuple[str, weakref.ref[torch.UntypedStorage]]] = []
        self.invalid = False
        self._before: dict[int, torch.Tensor] = {}
        self._made: list[tuple[int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with _disable_current_modes():
            return self._recorded(func, args, kwargs or {})

    def _recorded(self, func: Any, args: Any, kwargs: Any) -> Any:
        given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        masks = func in (aten.index.Tensor, aten.index_put.default) and any(
            x.dtype == torch.bool
            for x in pytree.tree_leaves(args[1])
            if isinstance(x, torch.Tensor)
        )
        if func.overloadpacket in _WAIT or masks:
            self.invalid = True
            raise RuntimeError("operation not permitted when stream is capturing")
        self._note_writes(func, args, kwargs)
        result = func(*args, **kwargs)
        known = {x.untyped_storage().data_ptr() for x in given}
        fresh: list[torch.Tensor] = []

        def placed(value: torch.Tensor) -> torch.Tensor:
            if value.untyped_storage().data_ptr() in known and value.numel():
                return value
            made = self._pool.like(value)
            self._made.append((made.untyped_storage().data_ptr(), made.untyped_storage().nbytes()))
            fresh.append(_alias(made))
            return made

        returned = pytree.tree_map_only(torch.Tensor, placed, result)
        if fresh or func._schema.is_mutable:
            assert not fresh or len(fresh) == len(
                [x for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]
            ), f"{func} returns new memory beside its arguments'"
            for x in given:
                self._note_external(str(func), x)
            aliases = pytree.tree_map_only(torch.Tensor, self._argument, (args, kwargs))
            self.calls.append((func, *aliases, fresh))
        return returned

    def undo(self) -> None:
        """Nothing was done while capturing."""
        for address, size_bytes in self._made:
            spoil(address, size_bytes)
        with _disable_current_modes():
            for address, before in self._before.items():
                over(address, before.nbytes).copy_(before)

    def _note_writes(self, func: Any, args: Any, kwargs: Any) -> None:
        silent = "batch_norm" in str(func)  # writes to its statistics and does not say so
        for i, argument in enumerate(func._schema.arguments):
            is_write = argument.alias_info is not None and argument.alias_info.is_write
            if not is_write and not silent:
                continue
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            for x in pytree.tree_leaves(value):
                storage = x.untyped_storage() if isinstance(x, torch.Tensor) else None
                if storage is None or not storage.nbytes() or storage.data_ptr() in self._before:
                    continue
                if not self._pool.owns(storage.data_ptr()):
                    raw = over(storage.data_ptr(), storage.nbytes())
                    self._before[storage.data_ptr()] = raw.clone()

    def _note_external(self, name: str, x: torch.Tensor) -> None:
        storage = x.untyped_storage()
        if x.dim() and storage.nbytes() and not self._pool.owns(storage.data_ptr()):
            self.external.append((name, weakref.ref(storage)))

    def _argument(self, x: torch.Tensor) -> torch.Tensor:
        # A number that torch wrapped is a part of the launch.
        is_number = not x.dim() and not self._pool.owns(x.untyped_storage().data_ptr())
        return x if is_number else _alias(x)


class Counted(TorchDispatchMode):
    """Counts what ops return as memory of the device while it is there, as torch's allocator does."""

    def __init__(self, runtime: FakeRuntime) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._runtime = runtime

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = pytree.tree_leaves((args, kwargs))
        known = {x.untyped_storage().data_ptr() for x in given if isinstance(x, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for x in pytree.tree_leaves(result):
            storage = x.untyped_storage() if isinstance(x, torch.Tensor) else None
            if storage is not None and storage.nbytes() and storage.data_ptr() not in known:
                self._runtime.took(storage.nbytes())
                weakref.finalize(storage, self._runtime.gave, storage.nbytes())
        return result


def _alias(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor at the same address that keeps nothing alive."""
    storage = x.untyped_storage()
    if not storage.nbytes():
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
    made = torch.empty(0, dtype=x.dtype)
    memory = over(storage.data_ptr(), storage.nbytes()).untyped_storage()
    return made.set_(memory, x.storage_offset(), x.shape, x.stride())
