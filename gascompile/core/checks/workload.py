"""Refuses a workload that is no planning problem, with the JSON path of the first thing that is wrong.

It reads plain data and no file: what a user writes and what a user builds in Python pass the same checks.
Whether the ops have times for a machine is for the planner to say, which knows the machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from gascompile.core import serial
from gascompile.core.errors import FormatError, UnsupportedOpError
from gascompile.core.machine import Machine
from gascompile.core.sizes import MAX_SIZE_BYTES
from gascompile.core.workload import PERSISTENT, OpSpec, TensorKind, TensorSpec, Workload

MAX_ITEMS = 250_000
"""Ops, and tensors, that a workload may have: several times those of the largest models known."""
MAX_TIME_S = 1e9  # 30 years, for one op

_WRITTEN_FIRST = frozenset(
    {TensorKind.ACTIVATION, TensorKind.GRADIENT, TensorKind.OUTPUT, TensorKind.WORKSPACE}
)
"""Kinds whose bytes exist only after an op has written them."""


def check_workload(workload: Workload, *, where: str = "$") -> None:
    """Return if a workload that was built in Python is a planning problem.

    Raises:
        FormatError: a field has a wrong type, or ``check_content`` refuses it.
    """
    for field, items in (("tensors", workload.tensors), ("ops", workload.ops)):
        if isinstance(items, (tuple, list)):
            check_count(len(items), f"{where}.{field}")
    serial.check_types(workload, where=where)
    check_content(workload, where=where)


def check_content(workload: Workload, *, where: str = "$", is_captured: bool = False) -> None:
    """Return if ``workload``, whose types are right, is a planning problem: names resolve, numbers make sense.

    Args:
        workload: as it was read.
        where: what stands before a field's name in a message.
        is_captured: it is a captured model's, whose ops may look up more rows than a small table has.

    Raises:
        FormatError: names the first field that makes no sense and what to write instead.
    """
    for path, problem in _problems(workload):
        if is_captured and ".gathers." in path and not problem.startswith("it needs -"):
            continue
        raise FormatError(f"{where}{path}: {problem}")


def check_times(workload: Workload, machine: Machine, *, where: str = "$") -> None:
    """Return if every op has a time on the tier of ``machine`` that computes.

    Raises:
        UnsupportedOpError: names the first op that has none.
    """
    tier = machine.compute_tier
    for i, op in enumerate(workload.ops):
        if tier not in op.time_s:
            known = ", ".join(sorted(op.time_s))
            raise UnsupportedOpError(
                f"{where}.ops[{i}].seconds: op '{op.name}' has no time for tier '{tier}' of machine "
                f"'{machine.name}' (it has: {known}); annotate the workload for this machine"
            )


def check_count(count: int, where: str) -> None:
    """Refuse a list that is too long to plan; raises ``FormatError``."""
    if count > MAX_ITEMS:
        raise FormatError(
            f"{where}: {count} of them, at most {MAX_ITEMS} can be planned; merge ops that run together, or "
            f"plan a part of the model"
        )


def _problems(workload: Workload) -> Iterator[tuple[str, str]]:
    """Yield ``(path below the workload, what is wrong with it)``."""
    if not workload.ops:
        yield ".ops", "a workload needs at least one op"
    yield from _bad_names("tensors", (tensor.name for tensor in workload.tensors))
    yield from _bad_names("ops", (op.name for op in workload.ops))
    for i, tensor in enumerate(workload.tensors):
        if not 0 <= tensor.size_bytes <= MAX_SIZE_BYTES:
            yield (
                f".tensors[{i}].bytes",
                f"'{tensor.name}' has the size {tensor.size_bytes}; give 0 to {MAX_SIZE_BYTES} bytes",
            )
    tensors = {tensor.name: tensor for tensor in workload.tensors}
    written: set[str] = set()
    for i, op in enumerate(workload.ops):
        for path, problem in _bad_op(op, tensors, written):
            yield f".ops[{i}]{path}", f"op '{op.name}': {problem}"
        written.update(op.writes)


def _bad_names(field: str, names: Iterable[str]) -> Iterator[tuple[str, str]]:
    first: dict[str, int] = {}
    for i, name in enumerate(names):
        if not name or not name.isprintable():
            yield f".{field}[{i}].name", f"{name!r} is no name; use printable characters"
        if first.setdefault(name, i) != i:
            yield (
                f".{field}[{i}].name",
                f"{field}[{first[name]}] is called '{name}' as well; names are unique",
            )


def _bad_op(
    op: OpSpec, tensors: Mapping[str, TensorSpec], written: set[str]
) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with one op; ``written`` are the tensors that earlier ops write."""
    if not op.time_s:
        yield ".seconds", "it has no time; give seconds for each tier that can run it"
    for tier, time_s in op.time_s.items():
        if not 0 <= time_s <= MAX_TIME_S:
            yield f".seconds.{tier}", f"it takes {time_s} s; give 0 to {MAX_TIME_S:g} seconds"
    for field, names in (("reads", op.reads), ("writes", op.writes)):
        for k, name in enumerate(names):
            if name not in tensors:
                yield f".{field}[{k}]", f"no tensor is called '{name}'; add it to tensors"
    for k, name in enumerate(op.reads):
        if name not in written and tensors[name].kind in _WRITTEN_FIRST:
            problem = f"it reads the {tensors[name].kind} '{name}' before any op has written it"
            yield (
                f".reads[{k}]",
                f"{problem}; put its writer before, or make it an input or a state",
            )
    for field in ("workspace_bytes", "flops", "read_bytes", "write_bytes"):
        value = getattr(op, field)
        if value < 0:
            yield f".{field}", f"{value} is less than zero"
    yield from _bad_rows(op, tensors)


def _bad_rows(op: OpSpec, tensors: Mapping[str, TensorSpec]) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with the weights of which an op takes parts, and the states of which it changes some."""
    for name, amount in op.patches.items():
        if name not in op.writes or tensors[name].kind not in PERSISTENT:
            yield f".patches.{name}", f"'{name}' is nothing that lasts and that it writes"
        elif not 0 <= amount <= tensors[name].size_bytes:
            size_bytes = tensors[name].size_bytes
            yield (
                f".patches.{name}",
                f"it changes {amount} bytes of '{name}', which has {size_bytes}",
            )
    for field, parts in (("splits", op.splits), ("gathers", op.gathers)):
        for name, amount in parts.items():
            path = f".{field}.{name}"
            # What is gathered in a plan is no longer read whole.
            known = name in op.reads or (field == "gathers" and name in tensors)
            if not known or tensors[name].kind != TensorKind.WEIGHT:
                yield path, f"'{name}' is no weight that it reads"
            elif field == "splits" and amount < 1:
                yield path, f"'{name}' has {amount} rows; give one or more"
            elif field == "gathers" and not 0 <= amount <= tensors[name].size_bytes:
                size_bytes = tensors[name].size_bytes
                yield path, f"it needs {amount} bytes of '{name}', which has {size_bytes}"
