"""Ops of torch's own op database, each as a module that is compiled for the smallest budget that a plan fits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

import gascompile
from gascompile.core.errors import (
    BudgetExceededError,
    CaptureError,
    GASCompileError,
    InfeasiblePlanError,
    UnsupportedOpError,
)
from tests.allocator import peak_growth_bytes

_MOST_BYTES = 4 << 20
"""Of the inputs of an op whose samples are made larger."""
_MOST_RETURNED_BYTES = 1 << 30
"""By such an op: a Kronecker product of two tensors of that size would be of many GB."""
_SLACK_BYTES = 64
_SEED = 42
"""As random ops of the database set it."""
_DTYPES = (torch.float32, torch.float64, torch.int64, torch.bool, torch.complex64)
"""The first of these that an op takes."""


class OpModule(nn.Module):
    """One call of an op: tensors are inputs, all else is fixed."""

    def __init__(self, function: Any, call: Any) -> None:
        """Take the call, ``(args, kwargs)``, apart."""
        super().__init__()
        self.function = function
        leaves, self.spec = pytree.tree_flatten(call)
        self.inputs = tuple(x for x in leaves if isinstance(x, torch.Tensor))
        self.leaves = [None if isinstance(x, torch.Tensor) else x for x in leaves]
        self.places = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)]

    def forward(self, *tensors: torch.Tensor) -> Any:
        """Call the op."""
        leaves = list(self.leaves)
        for i, tensor in zip(self.places, tensors, strict=True):
            leaves[i] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return self.function(*args, **kwargs)


@dataclass(frozen=True, kw_only=True)
class Found:
    """How one op ended."""

    op: str
    outcome: str
    """``kept``, or the name of a typed error; everything else is in ``wrong``."""
    wrong: str = ""


def modules(limit: int = 1, scale: int = 1, every: int = 1) -> Iterator[tuple[str, OpModule]]:
    """Yield the ops of the database, or each ``every``-th, with up to ``limit`` of its samples.

    With a ``scale`` the tensors are repeated so often along each of their dimensions, where that is not too much.
    """
    for info in op_db[::every]:
        dtypes = info.supported_dtypes("cpu")
        dtype = next((dtype for dtype in _DTYPES if dtype in dtypes), None)
        if dtype is None or info.name.startswith("jiterator"):
            continue
        name = f"{info.name}.{info.variant_test_name}".rstrip(".")
        torch.manual_seed(0)
        samples = info.sample_inputs("cpu", dtype)
        taken = list(itertools.islice(samples, limit))
        if isinstance(samples, Generator):
            # It stands in no_grad, and would leave that in the middle of a trace.
            samples.close()
        for i, sample in enumerate(taken):
            call = ((sample.input, *sample.args), sample.kwargs)
            yield f"{name}[{i}]", _enlarged(info.op, call, scale)


def _enlarged(function: Any, call: Any, scale: int) -> OpModule:
    """Return a call on tensors made larger, as far as what it returns can be held some times."""
    while scale > 1:
        larger = pytree.tree_map_only(torch.Tensor, partial(_larger, scale=scale), call)
        if _returned_bytes(OpModule(function, larger)) <= _MOST_RETURNED_BYTES:
            return OpModule(function, larger)
        scale //= 2
    return OpModule(function, call)


def _returned_bytes(module: OpModule) -> int:
    """Return what a call returns without making it; 0 where that cannot be told."""
    inputs = [x.detach() for x in module.inputs]
    try:
        with FakeTensorMode() as mode, torch.no_grad():
            found = pytree.tree_leaves(module(*map(mode.from_tensor, inputs)))
            return sum(x.nbytes for x in found if isinstance(x, torch.Tensor))
    except Exception:  # noqa: BLE001 - whatever does not run on fake tensors is small enough
        return 0


def _larger(value: torch.Tensor, scale: int) -> torch.Tensor:
    if value.layout is not torch.strided:
        return value
    times = [scale if size > 1 else 1 for size in value.shape]
    while math.prod(times) * value.nbytes > _MOST_BYTES:
        times = [max(n // 2, 1) for n in times]
    return value.detach().repeat(times)


def tried(name: str, module: OpModule, cache_dir: Path) -> Found:
    """Compile an op for its smallest budget and run it."""
    inputs = tuple(x.detach() for x in module.inputs)
    try:
        torch.manual_seed(_SEED)
        with torch.no_grad():
            wanted = module(*(x.clone() for x in inputs))
            torch.manual_seed(_SEED)
            # Made larger, some calls mean nothing any more, such as bags that end before they begin.
            again = module(*(x.clone() for x in inputs))
            is_repeatable = "empty" not in name and not _difference(again, wanted)
    except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError, AssertionError):
        return Found(op=name, outcome="eager refuses")
    try:
        budget = _smallest_budget(module, inputs, cache_dir)
        compiled = gascompile.compile(module, budget, inputs, cache_dir=cache_dir)
        return _compared(name, compiled, inputs, wanted if is_repeatable else None, budget)
    except (BudgetExceededError, CaptureError, UnsupportedOpError, InfeasiblePlanError) as error:
        return Found(op=name, outcome=type(error).__name__, wrong="")
    except GASCompileError as error:
        return Found(op=name, outcome=type(error).__name__, wrong=str(error)[:200])
    except Exception as error:  # noqa: BLE001 - what else there is, is what is looked for
        return Found(op=name, outcome="untyped", wrong=f"{type(error).__name__}: {error}"[:300])


def _smallest_budget(module: nn.Module, inputs: tuple[torch.Tensor, ...], cache_dir: Path) -> int:
    try:
        gascompile.compile(module, 1, inputs, cache_dir=cache_dir).close()
    except InfeasiblePlanError as error:
        return error.required_bytes
    return 1


def _compared(
    name: str, compiled: Any, inputs: tuple[torch.Tensor, ...], wanted: Any, budget: int
) -> Found:
    with compiled:
        found: list[Any] = []
        given = tuple(x.clone() for x in inputs)
        torch.manual_seed(_SEED)
        taken_bytes = peak_growth_bytes(lambda: found.append(compiled(*given)))
        run = compiled.last_run
        assert run is not None
        tier = compiled.plan.machine.compute_tier
        real_bytes = taken_bytes + compiled.plan.arena_bytes.get(tier, 0)
        counted_bytes = run.peak_bytes[tier]
    wrong = ""
    if real_bytes > budget:
        wrong = f"took {real_bytes} bytes of a budget of {budget}"
    elif abs(counted_bytes - real_bytes) > max(real_bytes // 100, _SLACK_BYTES):
        wrong = f"reports {counted_bytes} bytes, took {real_bytes}"
    elif run.peak_source != "allocator":
        wrong = f"was counted by {run.peak_source}"
    elif wanted is not None and (reason := _difference(found[0], wanted)):
        wrong = reason
    return Found(op=name, outcome="kept", wrong=wrong)


def _difference(found: Any, wanted: Any) -> str:
    try:
        torch.testing.assert_close(found, wanted, equal_nan=True)
    except (AssertionError, TypeError, ValueError) as error:
        return str(error).splitlines()[0]
    return ""
