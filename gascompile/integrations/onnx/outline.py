"""Outlines: tensors with sizes, strides, a dtype and a storage, and no values; what makes them is recorded.

They stand in for torch's tensors where a graph is costed in a process without torch. What the kernels of an op allocate
and touch is what torch's processor kernels do; ``outline_ops`` says so for each op.
"""

from __future__ import annotations

import builtins
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, TypeVar

from gascompile.core.errors import UnsupportedOpError
from gascompile.core.strides import contiguous_strides, span_elements
from gascompile.cost_models.formulas.kernel_workspace import HostKernel, workspace_bytes
from gascompile.passes.graph.facts import SCALAR_BYTES, LeafOp, OpFacts

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class DType:
    """A dtype, by torch's name."""

    name: str
    itemsize: int

    @property
    def is_floating_point(self) -> bool:
        """Whether values are floats."""
        return "float" in self.name

    def __str__(self) -> str:
        return f"torch.{self.name}"


DTYPES = {
    name: DType(name, size)
    for name, size in (
        ("float64", 8), ("float32", 4), ("float16", 2), ("bfloat16", 2), ("int64", 8), ("int32", 4),
        ("int16", 2), ("int8", 1), ("uint8", 1), ("bool", 1),
    )
}  # fmt: skip
_ORDER = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")  # fmt: skip


def promoted(values: Iterable[Any]) -> DType:
    """Return the dtype in which torch computes with tensors and Python's numbers together."""
    kinds: list[list[DType]] = [[], [], []]
    for value in values:
        if isinstance(value, Outline):
            kinds[0 if value.shape else 1].append(value.dtype)
        elif value is not None:
            name = "bool" if isinstance(value, bool) else "int64" if isinstance(value, int) else "float32"  # fmt: skip
            kinds[2].append(DTYPES[name])
    dtype = _common(kinds[0])
    for others in kinds[1:]:
        other = _common(others)
        if dtype is None or (other is not None and _category(other) > _category(dtype)):
            dtype = other if other is not None else dtype
    assert dtype is not None, "an op of nothing"
    return dtype


def _category(dtype: DType) -> int:
    return 2 if dtype.is_floating_point else 0 if dtype.name == "bool" else 1


def _common(dtypes: Sequence[DType]) -> DType | None:
    names = {dtype.name for dtype in dtypes}
    if names == {"float16", "bfloat16"}:
        return DTYPES["float32"]
    if names == {"uint8", "int8"}:
        return DTYPES["int16"]
    return DTYPES[max(names, key=_ORDER.index)] if names else None


class Storage:
    """Memory that tensors lie in."""

    __slots__ = ("__weakref__", "name", "size_bytes")

    def __init__(self, name: str, size_bytes: int) -> None:
        self.name = name
        self.size_bytes = size_bytes


class Outline:
    """A tensor without values."""

    def __init__(
        self,
        shape: Sequence[int],
        dtype: DType,
        *,
        stride: Sequence[int] | None = None,
        storage: Storage | None = None,
        weight: str = "",
    ) -> None:
        self.shape = tuple(shape)
        self.dtype = dtype
        self._stride = tuple(stride) if stride is not None else contiguous_strides(self.shape)
        self.weight = weight
        """Name of the weight that this is, as it lies in its file; empty for what ops make, and views."""
        self.op = -1
        """Number of the op that made it, views included."""
        self.made_by = ""
        self.source: Outline | None = None
        """What the op that made it was given first."""
        self.storage = storage if storage is not None else _new_storage(self)

    def dim(self) -> int:
        """Return the number of dimensions."""
        return len(self.shape)

    def numel(self) -> int:
        """Return the number of values."""
        return math.prod(self.shape)

    def element_size(self) -> int:
        """Return the bytes of a value."""
        return self.dtype.itemsize

    def stride(self) -> tuple[int, ...]:
        """Return the strides, in values."""
        return self._stride

    def is_floating_point(self) -> bool:
        """Return whether values are floats."""
        return self.dtype.is_floating_point

    def is_contiguous(self) -> bool:
        """Return whether values lie in the order of dimensions."""
        dense = contiguous_strides(self.shape)
        pairs = zip(self.shape, self._stride, dense, strict=True)
        return 0 in self.shape or all(a == b for size, a, b in pairs if size != 1)

    def view(self, shape: Sequence[int], stride: Sequence[int]) -> Outline:
        """Return another tensor of the same memory."""
        return Outline(shape, self.dtype, stride=stride, storage=self.storage)

    def __getattr__(self, name: str) -> Any:
        from gascompile.integrations.onnx import outline_ops

        if name.startswith("_") or not hasattr(outline_ops, name):
            raise AttributeError(name)
        return lambda *args, **kwargs: getattr(outline_ops, name)(self, *args, **kwargs)

    def __add__(self, other: Any) -> Any:
        return self.add(other)

    def __mul__(self, other: Any) -> Any:
        return self.mul(other)

    def __truediv__(self, other: Any) -> Any:
        return self.div(other)

    def __neg__(self) -> Any:
        return self.neg()

    def __lt__(self, other: Any) -> Any:
        return self.lt(other)

    def __getitem__(self, indices: Any) -> Any:
        return self.index(indices)


def _new_storage(value: Outline) -> Storage:
    size_bytes = span_elements(value.shape, value.stride()) * value.element_size()
    log = _log.get()
    storage = Storage("", size_bytes)
    if log is not None:
        log.made(storage)
    return storage


@dataclass(slots=True, kw_only=True)
class Recorded:
    """An op, and which ops made what it was given."""

    name: str
    """Of the kind of op."""
    facts: OpFacts
    of: frozenset[int]
    splits: dict[str, int] = field(default_factory=dict)
    gathers: dict[str, int] = field(default_factory=dict)


class Log:
    """What a run of a graph on outlines has recorded."""

    def __init__(self, *, groups_attention: bool) -> None:
        self.groups_attention = groups_attention
        """Whether attention reads keys and values where they are that are repeated for groups of queries."""
        self.ops: list[Recorded] = []
        self.constants: list[Outline] = []
        self.copies: dict[str, int] = {}
        """Number of the op after which a constant has its copy, by the constant's name."""
        self.made_bytes: dict[str, int] = {}
        """Of what ops have made, by name."""
        self._facts: OpFacts | None = None
        self._counts: dict[str, int] = {}
        self._taken: set[str] = set()
        self._live_bytes = self._peak_bytes = self._kernel_bytes = 0

    def made(self, storage: Storage) -> None:
        """Count memory that a running op takes for as long as a tensor lies in it."""
        if self._facts is None:
            return
        self._live_bytes += storage.size_bytes
        self._peak_bytes = max(self._peak_bytes, self._live_bytes)
        weakref.finalize(storage, self._drop, len(self.ops), storage.size_bytes)

    def _drop(self, op: int, size_bytes: int) -> None:
        if self._facts is not None and op == len(self.ops):
            self._live_bytes -= size_bytes

    def rewrites(self, value: Outline) -> None:
        """Note that the op that runs counts as one that writes to what it is given."""
        if self._facts is not None:
            self._facts.writes.append(value.storage.name)

    def skip(self, name: str) -> None:
        """Count an op that a capture has and drops, whose name is taken."""
        if self._facts is None:
            self.unused(name)

    def unused(self, name: str) -> str:
        """Return a name, with a number where it is taken, and take it; Python's own names are taken in a graph."""
        number = self._counts.get(name, int(hasattr(builtins, name)))
        while (free := f"{name}_{number}" if number else name) in self._taken:
            number += 1
        self._counts[name] = number + 1
        self._taken.add(free)
        return free

    def constant(self, shape: Sequence[int], dtype: DType) -> Outline:
        """Return a tensor that the graph keeps."""
        running, self._facts = self._facts, None
        made = Outline(shape, dtype)
        self._facts = running
        made.storage.name = f"lifted_tensor_{len(self.constants)}"
        self.constants.append(made)
        return made

    def run(self, name: str, compute: Callable[[], Result], given: Sequence[Any]) -> Result:
        """Run what an op does and record it; what it does in turn is part of it."""
        if self._facts is not None:
            return compute()
        facts = OpFacts(name=self.unused(name))
        tensors = list(_tensors(given))
        facts.reads = list(dict.fromkeys(value.storage.name for value in tensors))
        self._live_bytes = self._peak_bytes = self._kernel_bytes = 0
        self._facts = facts
        try:
            result = compute()
        finally:
            self._facts = None
        self._end(name, facts, tensors, result)
        return result

    def _end(self, name: str, facts: OpFacts, given: Sequence[Outline], result: Any) -> None:
        single = isinstance(result, Outline)
        results = list(_tensors([result]))
        # Before results are told who made them: one may be what was given.
        makers = frozenset(value.op for value in given)
        own_bytes = 0
        for place, value in enumerate(results):
            value.op = len(self.ops)
            if single and given and value is not given[0]:
                value.made_by, value.source = name, given[0]
            if not value.storage.name:
                value.storage.name = f"%{facts.name}" if single else f"%{facts.name}.{place}"
                facts.writes.append(value.storage.name)
                own_bytes += value.storage.size_bytes
                self.made_bytes[value.storage.name] = value.storage.size_bytes
        facts.has_one_dtype = len({value.dtype for value in (*given, *results)}) <= 1
        facts.workspace_bytes = max(self._peak_bytes - own_bytes, 0) + self._kernel_bytes
        if facts.leaves:
            facts.workspace_bytes += SCALAR_BYTES
        recorded = Recorded(name=name, facts=facts, of=makers)
        if name == "linear" and facts.has_one_dtype and given[1].weight:
            recorded.splits[given[1].weight] = given[1].shape[0]
        if name == "embedding" and given[0].weight:
            recorded.gathers[given[0].weight] = results[0].storage.size_bytes
        self.ops.append(recorded)

    def leaf(
        self,
        name: str,
        inputs: Sequence[Outline],
        outputs: Sequence[Outline],
        *,
        flops: int = 0,
        pointwise: bool = False,
        rows: bool = False,
        args: Sequence[Any] = (),
    ) -> None:
        """Record a kernel; ``rows``: it reads single rows of its first input."""
        assert self._facts is not None, name
        read_bytes, write_bytes = _nbytes(inputs), _nbytes(outputs)
        if rows:
            read_bytes = min(read_bytes, write_bytes + _nbytes(inputs[1:]))
        floating = [v.dtype for v in (*inputs, *outputs) if v.is_floating_point()]
        dtype = floating[0] if floating else (*outputs, *inputs)[0].dtype
        self._facts.leaves.append(
            LeafOp(
                target=f"aten.{name}",
                flops=flops,
                read_bytes=read_bytes,
                write_bytes=write_bytes,
                dtype=dtype.name,
                known=True,
            )
        )
        common = promoted(inputs) if pointwise and inputs else None
        kernel = HostKernel(f"aten::{name}", common, lambda _: "Mkldnn")
        both: tuple[Any, Any] = (inputs, outputs)  # of whom it asks what tensors of torch have, too
        taken_bytes = workspace_bytes(kernel, args, *both)
        self._kernel_bytes = max(self._kernel_bytes, taken_bytes)


def _nbytes(values: Iterable[Outline]) -> int:
    return sum(value.numel() * value.element_size() for value in values)


def _tensors(values: Iterable[Any]) -> Iterator[Outline]:
    for value in values:
        if isinstance(value, Outline):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


_log: ContextVar[Log | None] = ContextVar("onnx_outline_log", default=None)


@contextmanager
def recording(*, groups_attention: bool) -> Iterator[Log]:
    """Record what ops do to outlines."""
    log = Log(groups_attention=groups_attention)
    before = _log.set(log)
    try:
        yield log
    finally:
        _log.reset(before)


def now() -> Log:
    """Return what records now."""
    log = _log.get()
    assert log is not None, "outlines are made while something records"
    return log


def op(name: str) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Let a function be an op of that name, unless it is called by one."""

    def wrap(compute: Callable[..., Result]) -> Callable[..., Result]:
        @wraps(compute)
        def run(*args: Any, **kwargs: Any) -> Result:
            given = [*args, *kwargs.values()]
            return now().run(name, lambda: compute(*args, **kwargs), given)

        return run

    return wrap


def refuse(what: str) -> UnsupportedOpError:
    """Return the refusal of what outlines cannot do."""
    return UnsupportedOpError(
        f"{what}, of which costs are not known without torch; install torch to plan it"
    )
