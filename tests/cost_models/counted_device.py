"""A device without a GPU whose allocator counts: ops compute on the host, and take scratch memory by a table."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping
from typing import Any, TypeGuard

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from gascompile.cost_models.measure.ops_on_device import OpsOnDevice
from tests.runtime.devices.fake_cuda import FakeRuntime, fake_cuda

_BLOCK_BYTES = 512
"""Allocations are rounded up to it."""


class CountedDevice(TorchDispatchMode):
    """Stands in for ``torch.cuda`` and its kernels while it is active."""

    def __init__(
        self,
        scratch: Mapping[Any, int] | None = None,
        kept: Mapping[Any, int] | None = None,
        errors: Mapping[Any, type[Exception]] | None = None,
        total_bytes: int = 1 << 30,
    ) -> None:
        """Let ops take ``scratch`` bytes in each call, ``kept`` ones at the first alone, or raise ``errors``."""
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.scratch, self.errors = scratch or {}, errors or {}
        self._kept = dict(kept or {})
        self.calls: Counter[Any] = Counter()
        self.runtime: FakeRuntime
        _, self.runtime = fake_cuda(total_bytes=total_bytes)

    def ops(self) -> OpsOnDevice:
        """Return what measures on it."""
        return OpsOnDevice(self.runtime, device="cpu")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(_is_fake(value) for value in pytree.tree_leaves((args, kwargs))):
            return func(*args, **(kwargs or {}))
        if func in self.errors:
            raise self.errors[func]("no kernel, or no room")
        self.calls[func] += 1
        self.runtime.took(self._kept.pop(func, 0))
        result = func(*args, **(kwargs or {}))
        given = {_address(v) for v in pytree.tree_leaves((args, kwargs)) if _is_tensor(v)}
        for value in pytree.tree_leaves(result):
            if _is_tensor(value) and not _is_fake(value) and _address(value) not in given:
                self._count(value.untyped_storage())
        self.runtime.took(self.scratch.get(func, 0))
        self.runtime.gave(self.scratch.get(func, 0))
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        size_bytes = -(-storage.nbytes() // _BLOCK_BYTES) * _BLOCK_BYTES
        if self.runtime.allocated_bytes + size_bytes > self.runtime.total_bytes:
            raise torch.OutOfMemoryError("the device is full")
        self.runtime.took(size_bytes)
        weakref.finalize(storage, self.runtime.gave, size_bytes)


def _is_tensor(value: object) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor)


def _address(value: torch.Tensor) -> int:
    return int(value.untyped_storage()._cdata)


def _is_fake(value: object) -> bool:
    return isinstance(value, FakeTensor) or (_is_tensor(value) and value.device.type == "meta")
