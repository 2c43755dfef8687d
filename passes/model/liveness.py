"""Liveness: how many bytes of activations are live at each op, and which ops read each weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from gascompile.core.workload import TensorKind, Workload

_OWN_KINDS = (TensorKind.ACTIVATION, TensorKind.GRADIENT, TensorKind.OUTPUT, TensorKind.WORKSPACE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Liveness:
    """Lifetimes of a workload's tensors. Inputs are the caller's memory and count nowhere."""

    peak_bytes: int
    """Largest sum of live activations and workspace over all ops."""
    peak_op: int
    """The op that sets ``peak_bytes``; 0 where there is none."""
    state_bytes: int
    """States, which live all the time."""
    weight_uses: Mapping[str, tuple[int, ...]]
    """Ops that read each weight, ascending; empty for a weight that no op reads."""


def liveness(workload: Workload) -> Liveness:
    """Return the lifetimes of ``workload``.

    An activation lives from its first write to its last read, an output to the end. What an op writes
    stands beside what it reads.

    Raises:
        ValueError: an op names a tensor that the workload does not have.
    """
    tensors = {tensor.name: tensor for tensor in workload.tensors}
    uses: dict[str, list[int]] = {
        name: [] for name, tensor in tensors.items() if tensor.kind == TensorKind.WEIGHT
    }
    for i, op in enumerate(workload.ops):
        for name in (*op.reads, *op.writes):
            if name not in tensors:
                raise ValueError(f"op '{op.name}' names the tensor '{name}', which does not exist")
        for name in dict.fromkeys(op.reads):
            if name in uses:
                uses[name].append(i)
    live = live_bytes(workload)
    peak = max(live, default=0)
    return Liveness(
        peak_bytes=peak,
        peak_op=live.index(peak) if live else 0,
        state_bytes=sum(t.size_bytes for t in workload.tensors if t.kind == TensorKind.STATE),
        weight_uses={name: tuple(ops) for name, ops in uses.items()},
    )


def lifetimes(workload: Workload) -> dict[str, range]:
    """Return the ops at which each activation and output is live; those that no op touches never are."""
    kinds = {tensor.name: tensor.kind for tensor in workload.tensors}
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for i, op in enumerate(workload.ops):
        for name in (*op.reads, *op.writes):
            first.setdefault(name, i)
            last[name] = len(workload.ops) - 1 if kinds[name] == TensorKind.OUTPUT else i
    return {
        name: range(begin, last[name] + 1)
        for name, begin in first.items()
        if kinds[name] in _OWN_KINDS
    }


def live_bytes(workload: Workload) -> list[int]:
    """Return the bytes of live activations and outputs at each op, workspace included."""
    workspace = [op.workspace_bytes for op in workload.ops]
    return live_over(workload, lifetimes(workload), workspace)


def live_over(
    workload: Workload, spans: Mapping[str, range], workspace: Sequence[int]
) -> list[int]:
    """Return the bytes at each op of the tensors that ``spans`` has live there, and of ``workspace`` beside them."""
    sizes = {tensor.name: tensor.size_bytes for tensor in workload.tensors}
    change = [0] * (len(workspace) + 1)
    for name, ops in spans.items():
        change[ops.start] += sizes[name]
        change[ops.stop] -= sizes[name]
    held = accumulate(change[:-1])
    return [live + beside for live, beside in zip(held, workspace, strict=True)]
